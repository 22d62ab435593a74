package security

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// adversarialBodies are bodies of about size bytes that a careless scanner handles in
// more than linear time.
func adversarialBodies(size int) map[string]string {
	prompt := func(text string) string {
		return `{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":"` + text + `"}]}`
	}
	member := func(text string) string {
		return `{"model":"sim","max_tokens":1,` + text + `,"messages":[{"role":"user","content":"x"}]}`
	}
	several := func(piece string) string { return strings.Repeat(piece, size/len(piece)) }
	keys := func(format string) string {
		var b strings.Builder
		for n := 0; b.Len() < size; n++ {
			fmt.Fprintf(&b, format, n)
		}
		return strings.TrimSuffix(b.String(), ",")
	}
	return map[string]string{
		"escapes":                     prompt(several(`\u00e9`)),
		"surrogate pairs":             prompt(several(`\ud83d\ude00`)),
		"spaces":                      prompt(several(" ")),
		"many messages":               `{"model":"sim","messages":[` + several(`{"role":"user"},`) + `{"role":"user"}]}`,
		"many keys":                   member(`"k":{` + keys(`"%07x":0,`) + `}`),
		"keys with a long beginning":  member(`"k":{` + keys(`"`+strings.Repeat("p", 1000)+`%07x":0,`) + `}`),
		"escaped keys":                member(`"k":{` + keys(`"\u0061%06x":0,`) + `}`),
		"many keys of vllm_xargs":     member(`"vllm_xargs":{` + keys(`"%07x":0,`) + `}`),
		"deep lists":                  member(`"k":[` + several(strings.Repeat("[", 250)+strings.Repeat("]", 250)+",") + `0]`),
		"deeper than any limit":       member(`"k":` + several("[") + several("]")),
		"empty objects":               member(`"k":[` + several("{},") + `{}]`),
		"long number":                 member(`"k":1` + several("0")),
		"white space":                 several(" ") + member(`"k":1`),
		"stop list":                   member(`"stop":[` + several(`"a",`) + `"a"]`),
		"long string in vllm_xargs":   member(`"vllm_xargs":{"kv_transfer_params":"x","z":"` + several("a") + `"}`),
		"objects in transfer objects": member(`"kv_transfer_params":[` + several(`{"a":{}},`) + `{}]`),
	}
}

// TestAdversarialBodies: the processing time of a body is proportional to its
// length.
func TestAdversarialBodies(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	p := startProxy(t, setup{sections: e.section("both", "vllm-nixl") + "[policy]\nplace = \"kv_aware\"\n"})
	c := p.client(1, hostile)
	defer c.close()
	for name, body := range adversarialBodies(times(4<<20, 14<<20)) {
		if !within(tolerated, func() { c.post(chatPath, body) }) { // an error is a right answer
			t.Errorf("%s: no answer within %s", name, tolerated)
		}
	}
	p.serves("after the bodies")
	c.close()
	p.nothingLeft()
}

// TestMemoryOfBodies: the memory for bodies of any shape stays near limits.buffer_memory, also
// while a body is scanned.
func TestMemoryOfBodies(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	p := startProxy(t, setup{sections: e.section("both", "vllm-nixl") + "[limits]\nbuffer_memory = \"96MiB\"\n"})
	p.serves("before the bodies")
	bodies := adversarialBodies(7 << 20)
	p.wantGrowth("bodies of all shapes", 300, func() {
		for _, name := range []string{"many keys", "escaped keys", "many keys of vllm_xargs", "deep lists", "empty objects", "long string in vllm_xargs", "many messages"} {
			testbed.Parallel(8, 8, func(int) {
				c := p.client(1, hostile)
				defer c.close()
				c.post(chatPath, bodies[name]) // an error is a right answer
			})
		}
	})
	p.serves("after the bodies")
	p.nothingLeft()
}

// TestManyIDs: ids that clients choose make no series and hold no memory for long.
func TestManyIDs(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	p := startProxy(t, setup{sections: e.section("both", "none")})
	p.serves("before the ids")
	p.wantGrowth("ids", 96, func() {
		testbed.Parallel(8, 8, func(n int) {
			c := p.client(1, hostile)
			defer c.close()
			for i := range times(200, 2000) {
				id := fmt.Sprintf("id-%d-%d-%s", n, i, strings.Repeat("x", 200))
				body := strings.Replace(chat("ids", false), `"model":"sim"`, fmt.Sprintf(`"model":%q,"session_id":%q`, id, id), 1)
				c.post(chatPath, body, "X-Request-Id", id, "X-Session-ID", id) // the model is unknown
				c.post(chatPath, chat("ids", false), "X-Request-Id", id, "X-Session-ID", id)
			}
		})
	})
	wantMetrics(t, p)
	p.nothingLeft()
}

// TestSidecarParameters: a caller that coordinates the phases itself may only
// name hosts that the sidecar knows.
func TestSidecarParameters(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	p := startProxy(t, setup{sections: fmt.Sprintf("[sidecar]\nlocal = \"http://%s\"\nrole = \"decode\"\nconnector = \"vllm-nixl\"\nprofile_header = \"EPP-Profile\"\n", e.listener.Addr())})
	c := p.client(1, "127.0.0.1")
	defer c.close()
	params, many := pull(foreignHost, 5600), padded(4096, pull(foreignHost, 5600))
	message := []map[string]any{{"role": "user", "content": "sidecar"}}
	with := func(name string, v any) map[string]any {
		return map[string]any{"model": "sim", "messages": message, "max_tokens": 3, name: v}
	}
	arguments := func(v any) map[string]any {
		return map[string]any{"model": "sim", "token_ids": []int{1, 2}, "sampling_params": map[string]any{"max_tokens": 3, "extra_args": v}}
	}
	for name, tt := range map[string]struct {
		path string
		body map[string]any
	}{
		"top level":         {chatPath, with("kv_transfer_params", params)},
		"4096 members":      {chatPath, with("kv_transfer_params", many)},
		"vllm_xargs":        {chatPath, with("vllm_xargs", map[string]any{"kv_transfer_params": params})},
		"vllm_xargs, 4096":  {chatPath, with("vllm_xargs", padded(4096, map[string]any{"kv_transfer_params": params}))},
		"nested":            {chatPath, with("kv_transfer_params", map[string]any{"x": params})},
		"host in a list":    {chatPath, with("kv_transfer_params", map[string]any{"do_remote_prefill": true, "remote_host": []string{foreignHost}})},
		"encoder":           {chatPath, with("ec_transfer_params", map[string]any{"a": map[string]any{"remote_host": foreignHost}})},
		"bootstrap address": {chatPath, with("kv_transfer_params", map[string]any{"do_remote_prefill": true, "remote_bootstrap_addr": "http://" + foreignHost + ":1"})},
		"extra_args":        {"/inference/v1/generate", arguments(map[string]any{"kv_transfer_params": params})},
		"extra_args, 4096":  {"/inference/v1/generate", arguments(padded(4096, map[string]any{"kv_transfer_params": params}))},
	} {
		body, err := json.Marshal(tt.body)
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.post(tt.path, string(body), "EPP-Profile", "decode")
		for _, r := range e.take("") {
			if strings.Contains(r.body, foreignHost) {
				t.Errorf("%s: the engine received the host (the caller got: %v)", name, err)
			}
		}
	}
	if _, err := c.post(chatPath, chat("sidecar", false), "EPP-Profile", "decode"); err != nil {
		t.Errorf("a caller without parameters: %v", err)
	}
	c.close()
	p.nothingLeft()
}
