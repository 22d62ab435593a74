package conformance

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// continuedRequests are the requests whose streams are continued, by the path.
func continuedRequests(connector string) map[string][2]string {
	const completion = `{"model":"sim","prompt":"<split> tell me"`
	list := map[string][2]string{
		"completions":        {completionPath, completion + `,"max_tokens":24`},
		"completions greedy": {completionPath, completion + `,"max_tokens":24,"temperature":0`},
		"completions stop":   {completionPath, completion + `,"max_tokens":24,"temperature":0,"stop":["never comes"]`},
		"completions probs":  {completionPath, completion + `,"max_tokens":20,"logprobs":1`},
	}
	if kindOf(connector) == enginesim.ConnectorSGLang {
		return list
	}
	const messages = `{"model":"sim","messages":[{"role":"user","content":"<split> tell"}]`
	list["chat"] = [2]string{chatPath, messages + `,"max_tokens":24`}
	list["chat greedy"] = [2]string{chatPath, messages + `,"max_completion_tokens":24,"min_tokens":4,"temperature":0,"logprobs":true`}
	list["chat, tools"] = [2]string{chatPath, messages + `,"max_tokens":20,"tools":[{"type":"function","function":{"name":"echo"}}]`}
	list["generate"] = [2]string{"/inference/v1/generate", `{"model":"sim","token_ids":[5,6,7,8,9,10,11,12],"sampling_params":{"max_tokens":20}`}
	return list
}

// TestContinuedAtEachEvent breaks a stream behind each of its events, in each way. The client reads
// what one engine would have sent. The streams of a fleet run at the same time: the proxy may see a
// connection that breaks right behind an event a second later.
func TestContinuedAtEachEvent(t *testing.T) {
	eachOfBoth(t, func(t *testing.T, connector string, pair bool) {
		f, b := startBroken(t, connector, pair, fleetOptions{})
		step := 1
		if pair { // the seam does not depend on the connector, nor does the way in which the proxy sees the break
			step, b.pause = 5, 10*time.Millisecond
		}
		t.Run("streams", func(t *testing.T) { // the fleet ends behind all of them
			for name, c := range continuedRequests(connector) {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					continuedAtEachEvent(t, f, b, c[0], c[1], step)
				})
			}
		})
	})
}

// continuedAtEachEvent breaks the streams of one request behind each step'th event.
func continuedAtEachEvent(t *testing.T, f *fleet, b *breaker, path, body string, step int) {
	if path == "/inference/v1/generate" {
		body += `,"stream":true}`
	} else {
		body += `,"stream":true,"stream_options":{"include_usage":true}}`
	}
	read := func(a answer) string {
		s := readStream(t, []byte(a.body))
		s.id = ""
		delete(s.usage, "reasoning_tokens") // not in a usage that the proxy itself writes
		return fmt.Sprint(s)
	}
	want := read(f.post(context.Background(), f.alone.URL(), path, body))
	type broken struct {
		breakage
		key string
		answer
	}
	var list []*broken
	var wg sync.WaitGroup
	for k := 4; k < 24; k += step {
		s := &broken{breakage: breakage{k, breakages[k%len(breakages)]}, key: fmt.Sprintf("%s, event %d", t.Name(), k)}
		if s.how == stalls {
			s.how = cutOff
		}
		list = append(list, s)
		b.planFor(s.key, s.breakage)
		wg.Go(func() { s.answer = f.post(context.Background(), f.url, path, body, breakKey, s.key) })
	}
	wg.Wait()
	for _, s := range list {
		if s.errors > 0 || s.err != nil {
			t.Errorf("%s behind event %d: %v, %.600s", s.how, s.after, s.err, s.body[max(0, len(s.body)-600):])
			continue
		}
		if got := read(s.answer); got != want {
			t.Errorf("%s behind event %d:\n%s, want\n%s", s.how, s.after, got, want)
		}
		if strings.Contains(s.body, `"token_ids":[`) != (path == "/inference/v1/generate") {
			t.Errorf("the client got ids: %s", s.body)
		}
		if b.planned(s.key) {
			t.Errorf("%s: the breaker has not got the stream", s.key)
		}
	}
}

// mayEnd are the reasons for which a stream may end in TestContinuedAtRandom: the stream broke again
// before a whole letter came, or the machine was too busy to go on within timeouts.stream_idle.
var mayEnd = regexp.MustCompile(`"not_continued":"(seam|late|no_engine)"`)

// TestContinuedAtRandom breaks two thirds of the streams, those that continue others too, at random
// and in every way. Each complete text is that of one engine alone, each other one is a prefix of it,
// and nothing is left.
func TestContinuedAtRandom(t *testing.T) {
	const streams = 50
	seed := uint64(soakSeed)
	if n, err := strconv.ParseUint(os.Getenv("PDPROXY_SOAK_SEED"), 10, 64); err == nil {
		seed = n
	}
	run := func(t *testing.T, connector string, pair bool) {
		f, b := startBroken(t, connector, pair, fleetOptions{
			engine: func(role string, _ int, c *enginesim.Config) { c.DecodeUsPerToken = 500 },
			config: func(c *config.Config) {
				c.Retry.Attempts = 20
				c.Timeouts.StreamIdle = config.Duration(2 * time.Second) // for those that hang
				c.Timeouts.FirstByte = config.Duration(5 * time.Second)
			},
		})
		b.mu.Lock()
		b.random = rand.New(rand.NewPCG(seed, 1))
		b.mu.Unlock()
		all := continuedRequests(connector)
		names := slices.Sorted(maps.Keys(all))
		var wg sync.WaitGroup
		var ended atomic.Int64
		next := make(chan int)
		for range 16 { // most of the time is that of streams that hang
			wg.Go(func() {
				for i := range next {
					c := all[names[i%len(names)]]
					body := strings.Replace(c[1], "tell", fmt.Sprintf("tell %d", i%7), 1) + `,"stream":true}`
					want := f.post(context.Background(), f.alone.URL(), c[0], body)
					a := f.try(c[0], body)
					switch {
					case a.status == 200 && a.errors == 0 && a.err == nil && a.text == want.text && a.done:
					case a.status == 200 && a.errors == 1 && a.err == nil && strings.HasPrefix(want.text, a.text) && mayEnd.MatchString(a.body):
						ended.Add(1)
					case a.status >= 500 && a.err == nil: // broken before the first byte
					default:
						t.Errorf("seed %d, stream %d (%s): status %d, %d errors, %v\n got %q\nwant %q\n%s", seed, i, names[i%len(names)], a.status, a.errors, a.err, a.text, want.text, a.body[max(0, len(a.body)-900):])
					}
				}
			})
		}
		for i := range streams {
			next <- i
		}
		close(next)
		wg.Wait()
		f.settled()
		if n := ended.Load(); n > streams/5 {
			t.Errorf("seed %d: %d of %d streams ended with an error event", seed, n, streams)
		}
		if n := f.metric("pdproxy_continuations_total", `result="continued"`); n < streams/4 {
			t.Errorf("only %v streams were continued", n)
		}
	}
	eachOfBoth(t, run)
}

// eachOfBoth runs a test for engines that serve whole requests, and for pairs of each connector whose
// events have token ids.
func eachOfBoth(t *testing.T, run func(t *testing.T, connector string, pair bool)) {
	for _, kind := range []string{enginesim.ConnectorNone, enginesim.ConnectorSGLang} {
		t.Run("aggregated "+kind, func(t *testing.T) { run(t, kind, false) })
	}
	eachConnector(t, func(t *testing.T, connector string) {
		if kindOf(connector) == enginesim.ConnectorTRTLLM {
			return // its events have no ids
		}
		run(t, connector, true)
	})
}
