package conformance

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/filters"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// stablePrefix adds the built-in filter to a configuration.
func stablePrefix(text string) func(*config.Config) {
	return func(c *config.Config) {
		p := config.DefaultPlugin()
		p.Name, p.Path, p.Phase, p.Config = "prefix", "builtin:"+filters.StablePrefix, config.PhaseFilter, text
		p.Timeout = config.Duration(30 * time.Second)
		c.Plugins = append(c.Plugins, p)
	}
}

// billingHash is the hash of Claude Code's billing header in a turn.
func billingHash(turn int) string { return fmt.Sprintf("%05x", 0x36ee5+turn*0x1009) }

// claudeTurnBody is the body of one turn of a session, whose conversation grows. header is the block
// before the system text.
func claudeTurnBody(header string, turn int) string {
	list := []string{}
	for n := range turn + 1 {
		if n > 0 {
			list = append(list, fmt.Sprintf(`{"role":"assistant","content":[{"type":"text","text":"done %d"}]}`, n))
		}
		list = append(list, fmt.Sprintf(`{"role":"user","content":[{"type":"text","text":"Change the file %d. %s"}]}`, n, strings.Repeat("It has many lines. ", 10)))
	}
	return `{"model":"sim","messages":[` + strings.Join(list, ",") + `],"system":[` + header + `{"type":"text","text":"You are Claude Code. ` + strings.Repeat("Follow the rules of the project. ", 40) + `","cache_control":{"type":"ephemeral"}}],` +
		`"max_tokens":6,"metadata":{"user_id":"u"}}`
}

func billingBlock(turn int) string {
	return `{"type":"text","text":"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=` + billingHash(turn) + `;"},`
}

// promptTokens returns the cached tokens and all tokens of the prompt of an answer to /v1/messages.
// SGLang leaves out a count of 0.
func promptTokens(t *testing.T, a answer) (cached, prompt int) {
	t.Helper()
	var got struct {
		Usage struct {
			Fresh  int `json:"input_tokens"`
			Cached int `json:"cache_read_input_tokens"`
		}
	}
	if err := json.Unmarshal([]byte(a.body), &got); err != nil || got.Usage.Fresh == 0 {
		t.Fatalf("%v: %s", err, a.body)
	}
	return got.Usage.Cached, got.Usage.Fresh + got.Usage.Cached
}

// TestStablePrefixOfATenant: the rules hold for the requests of the tenant that the configuration
// names, and for no other tenant. Of each body only the header is missing.
func TestStablePrefixOfATenant(t *testing.T) {
	e := both("e", says(200, `{"choices":[{"message":{"content":"x"}}]}`))
	// The SHA-256 of "secret" and of "other".
	keys := writeFile(t, "keys", "alice 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\nbob d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa\n")
	f := startScripted(t, "none", func(c *config.Config) {
		c.Server.Auth.KeysFile = keys
		stablePrefix("tenants = alice")(c)
	}, e)
	const header = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"
	body := func(header string) string {
		return `{"model":"sim", "messages":[{"role":"system","content":"` + header + `Be brief."},{"content":"I see ` + header + ` in a log.","role":"user"}],"max_tokens":10 , "temperature":1e-1,"seed":9007199254740993}`
	}
	changed := strings.Replace(body(header), header, "", 1)
	for _, tt := range []struct{ key, want string }{{"secret", changed}, {"other", body(header)}, {"secret", changed}} {
		if a := f.post(t.Context(), f.url, chatPath, body(header), "Authorization", "Bearer "+tt.key); a.status != 200 {
			t.Fatalf("status %d: %s", a.status, a.body)
		}
		legs := e.Seen(nil)
		if got := legs[len(legs)-1].Text; got != tt.want {
			t.Errorf("%s: the engine got %s, want %s", tt.key, got, tt.want)
		}
	}
}

// TestStablePrefix: a session in the form of Claude Code on SGLang engines, whose billing header has
// another hash in each turn. With the filter each turn finds the prompt of the turn before in the
// cache, and the prompt is that of a request without the header.
func TestStablePrefix(t *testing.T) {
	const turns = 4
	session := func(t *testing.T, connector string, config func(*config.Config)) (cached, prompts []int, f *fleet) {
		f = startFleet(t, connector, fleetOptions{prefill: 1, decode: 1, config: config})
		for turn := range turns {
			a := f.post(t.Context(), f.url, claudePath, claudeTurnBody(billingBlock(turn), turn), claudeHeader()...)
			if a.status != 200 {
				t.Fatalf("status %d: %s", a.status, a.body)
			}
			c, p := promptTokens(t, a)
			cached, prompts = append(cached, c), append(prompts, p)
			if config != nil || connector != enginesim.ConnectorSGLang {
				f.right(a, claudePath, claudeTurnBody("", turn))
			} else {
				f.right(a, claudePath, claudeTurnBody(billingBlock(turn), turn))
			}
		}
		t.Logf("cached tokens %v of %v", cached, prompts)
		return cached, prompts, f
	}
	const block = 16
	t.Run("off", func(t *testing.T) {
		cached, _, _ := session(t, enginesim.ConnectorSGLang, nil)
		for turn, n := range cached {
			if n > 6*block { // the text before the hash
				t.Errorf("turn %d: %d tokens are cached", turn, n)
			}
		}
	})
	warm := func(t *testing.T, cached, prompts []int) {
		for turn := 1; turn < turns; turn++ {
			if least := prompts[turn-1] - 2*block; cached[turn] < least {
				t.Errorf("turn %d: %d tokens are cached, want %d", turn, cached[turn], least)
			}
		}
	}
	t.Run("on", func(t *testing.T) {
		cached, prompts, f := session(t, enginesim.ConnectorSGLang, stablePrefix(""))
		warm(t, cached, prompts)
		if n := f.metric("pdproxy_plugin_stable_prefix_billing_header_requests_total", `plugin="prefix"`); n != turns {
			t.Errorf("%v requests are counted", n)
		}
		if n := f.metric("pdproxy_plugin_stable_prefix_billing_header_bytes_total", `plugin="prefix"`); n != turns*81 {
			t.Errorf("%v bytes are counted", n)
		}
		a := f.post(t.Context(), f.url, claudePath, claudeTurnBody(billingBlock(0), 0), append(claudeHeader(), "X-Request-Id", "explained")...)
		if a.status != 200 {
			t.Fatalf("status %d: %s", a.status, a.body)
		}
		var record struct{ Notes []string }
		f.eventually("the record has the note", func() bool {
			f.admin("/v1/explain/explained", &record)
			return len(record.Notes) > 0
		})
		if want := "prefix: billing_header removed 81 bytes"; record.Notes[0] != want {
			t.Errorf("notes %q, want %q", record.Notes, want)
		}
	})
	t.Run("another client", func(t *testing.T) {
		f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{prefill: 1, decode: 1, config: stablePrefix("")})
		body := claudeTurnBody(billingBlock(0), 0)
		f.right(f.try(claudePath, body), claudePath, body)
	})
	t.Run("vLLM removes the header itself", func(t *testing.T) {
		cached, prompts, _ := session(t, enginesim.ConnectorVLLMNixl, nil)
		warm(t, cached, prompts)
	})
}
