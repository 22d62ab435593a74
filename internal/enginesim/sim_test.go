package enginesim

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// startEngine starts an engine with FutureParams that ends with the test. The test
// fails if blocks are still referenced after the last request and lease.
func startEngine(t *testing.T, cfg Config) *Engine {
	t.Helper()
	cfg.FutureParams = true
	return startAsConfigured(t, cfg)
}

// startAsConfigured starts an engine as startEngine does, without FutureParams of its
// own.
func startAsConfigured(t *testing.T, cfg Config) *Engine {
	t.Helper()
	e, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Close()
		for _, r := range e.Ranks {
			checkAccounting(t, r)
		}
		if s := e.State(); s.BlocksUsed != 0 || s.BlocksPinned != 0 || s.RequestsRunning != 0 || s.RequestsWaiting != 0 {
			t.Errorf("engine %s ended with %+v", e.Cfg.Name, s)
		}
	})
	return e
}

// checkAccounting verifies that every block is either referenced or idle, and
// that the idle list and the hash index agree with the blocks.
func checkAccounting(t *testing.T, r *core.Rank) {
	t.Helper()
	r.Mu.Lock()
	defer r.Mu.Unlock()
	c := r.Cache
	idle := 0
	for id, last := c.Head, core.BlockID(-1); id >= 0; last, id = id, c.Blocks[id].Next {
		b := &c.Blocks[id]
		if !b.Idle || b.Refs != 0 || b.Pins != 0 || b.Prev != last {
			t.Fatalf("idle list: block %d is %+v after %d", id, *b, last)
		}
		if idle++; idle > len(c.Blocks) {
			t.Fatal("idle list: a cycle")
		}
	}
	used := 0
	for i := range c.Blocks {
		if c.Blocks[i].Refs > 0 {
			used++
		}
		if h := c.Blocks[i].Hash; h != 0 && c.ByHash[h] != core.BlockID(i) {
			t.Errorf("block %d has a hash that the index does not know", i)
		}
	}
	if idle != c.Free || idle+used != len(c.Blocks) {
		t.Errorf("blocks: %d idle (counted %d) + %d used of %d", idle, c.Free, used, len(c.Blocks))
	}
	for h, id := range c.ByHash {
		if c.Blocks[id].Hash != h {
			t.Errorf("the index has block %d under a wrong hash", id)
		}
	}
}

// answer is a complete answer of an engine.
type answer struct {
	status int
	body   []byte
	header http.Header
}

// field returns a value of the answer's JSON by its path: "choices", 0, "text".
func (a answer) field(t *testing.T, path ...any) any {
	t.Helper()
	var v any
	dec := json.NewDecoder(bytes.NewReader(a.body))
	dec.UseNumber()
	if err := dec.Decode(&v); err != nil {
		t.Fatalf("answer %d %q: %v", a.status, a.body, err)
	}
	for _, step := range path {
		switch step := step.(type) {
		case string:
			m, ok := v.(map[string]any)
			if !ok {
				t.Fatalf("%v of %s: not an object", path, a.body)
			}
			v = m[step]
		case int:
			l, ok := v.([]any)
			if !ok || step >= len(l) {
				t.Fatalf("%v of %s: no such element", path, a.body)
			}
			v = l[step]
		}
	}
	return v
}

// params are the raw kv_transfer_params, byte for byte.
func (a answer) params(t *testing.T) string {
	t.Helper()
	var v struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(a.body, &v); err != nil {
		t.Fatal(err)
	}
	return string(v.Params)
}

// try posts a body; header pairs are name, value.
func try(ctx context.Context, url, body string, header ...string) (answer, error) {
	return send(ctx, http.MethodPost, url, body, header...)
}

// send sends a request and reads the answer until its end.
func send(ctx context.Context, method, url, body string, header ...string) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, raw, resp.Header}, err
}

// post is try for requests whose connection must hold.
func post(t *testing.T, url, body string, header ...string) answer {
	t.Helper()
	a, err := try(t.Context(), url, body, header...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// get returns the answer to a GET.
func get(t *testing.T, url string) answer {
	t.Helper()
	a, err := send(t.Context(), http.MethodGet, url, "")
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// eventually waits until other goroutines have reached a state.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("condition not met: %s", what)
		}
		time.Sleep(200 * time.Microsecond)
	}
}

// completion is the body of a completion request for a prompt of some words,
// with further fields.
func completion(prompt string, extra string) string {
	raw, _ := json.Marshal(prompt)
	if extra != "" {
		extra = "," + extra
	}
	return fmt.Sprintf(`{"model":"sim","prompt":%s%s}`, raw, extra)
}

// words is a prompt of n tokens, different for each seed.
func words(seed, n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(core.WordText(int(core.Mix(uint64(seed*100000+i)) % uint64(len(core.WordTokens)))))
	}
	return b.String()
}

// prefillParams are a proxy's parameters for a prefill leg.
const prefillParams = `"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`
