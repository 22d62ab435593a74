package conformance

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

var cachedCount = regexp.MustCompile(`"(?:cached_tokens|cache_read_input_tokens)":(\d+)`)

// The cached tokens of an answer are those of prefill: KV that was transferred for a new prompt
// was not cached. The second request with a prompt finds it in the caches.
func TestCachedTokensArePrefills(t *testing.T) {
	eachConnector(t, func(t *testing.T, name string) {
		f := startFleet(t, name, fleetOptions{prefill: 1, decode: 1, config: func(c *config.Config) { c.Policy.Place = "round_robin" }})
		prompt := strings.Repeat("one two three four five ", 40)
		bodies := map[string]func(prompt string, stream bool) string{
			completionsPath: func(p string, stream bool) string {
				return fmt.Sprintf(`{"model":"sim","prompt":%s,"max_tokens":6,"ignore_eos":true,"stream":%t%s}`, quoted(p), stream, map[bool]string{true: `,"stream_options":{"include_usage":true}`}[stream])
			},
			chatPath: func(p string, stream bool) string {
				body := chat(p, 6, stream)
				if stream {
					body = strings.TrimSuffix(body, "}") + `,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`
				}
				return body
			},
		}
		for _, a := range apis {
			if strings.HasPrefix(name, "vllm") && a.path != "/generate" && a.path != "/inference/v1/generate" {
				bodies[a.path] = func(p string, stream bool) string { return a.body(p, 6, stream) }
			}
		}
		for path, body := range bodies {
			for _, stream := range []bool{true, false} {
				fresh := fmt.Sprintf("%s %t %s", path, stream, prompt)
				for n := range 2 {
					a := f.try(path, body(fresh, stream))
					counts := cachedCount.FindAllStringSubmatch(a.body, -1)
					if a.status != 200 || len(counts) == 0 {
						t.Fatalf("%s: status %d, no cached tokens: %s", path, a.status, a.body)
					}
					got := counts[len(counts)-1][1]
					if n == 0 && len(got) > 2 {
						t.Errorf("%s stream %t: %s tokens of a new prompt were cached: %s", path, stream, got, a.body)
					}
					if n == 1 && len(got) < 2 {
						t.Errorf("%s stream %t: %s tokens of a known prompt were cached", path, stream, got)
					}
				}
			}
		}
	})
}
