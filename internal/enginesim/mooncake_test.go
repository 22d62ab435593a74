package enginesim

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/vllm"
)

// mooncakePair is a prefill engine, a decode engine, and an engine that is both.
type mooncakePair struct {
	p, d, both *Engine
	serial     int
}

func startMooncake(t *testing.T, change ...func(*Config)) *mooncakePair {
	t.Helper()
	start := func(role string) *Engine {
		cfg := Config{Connector: ConnectorVLLMMooncake, Role: role, KVBlocks: 256}
		for _, c := range change {
			c(&cfg)
		}
		return startEngine(t, cfg)
	}
	return &mooncakePair{p: start(RolePrefill), d: start(RoleDecode), both: start(RoleBoth)}
}

// engineID returns the engine id of a rank from p's bootstrap server.
func (pd *mooncakePair) engineID(t *testing.T, rank int) string {
	t.Helper()
	resp, err := http.Get(pd.bootstrap() + "/query")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var engines map[string]struct {
		ID      string                       `json:"engine_id"`
		Workers map[string]map[string]string `json:"worker_addr"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&engines); err != nil {
		t.Fatal(err)
	}
	e := engines[fmt.Sprint(rank)]
	if !strings.HasPrefix(e.Workers["0"]["0"], "tcp://127.0.0.1:") {
		t.Errorf("workers of rank %d: %v", rank, e.Workers)
	}
	return e.ID
}

func (pd *mooncakePair) bootstrap() string {
	return fmt.Sprintf("http://127.0.0.1:%d", pd.p.BootstrapPort())
}

// legs are the parameters of the two legs of a new transfer.
func (pd *mooncakePair) legs(t *testing.T, rank int) (prefill, decode string) {
	t.Helper()
	pd.serial++
	transfer := fmt.Sprintf("xfer-%d", pd.serial)
	return fmt.Sprintf(`"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":%q}`, transfer),
		fmt.Sprintf(`"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":%q,"remote_engine_id":%q,"transfer_id":%q}`,
			pd.bootstrap(), pd.engineID(t, rank), transfer)
}

// concurrent runs both legs of a prompt at once.
func (pd *mooncakePair) concurrent(t *testing.T, prompt string, rank int) (p, d answer) {
	t.Helper()
	prefill, decode := pd.legs(t, rank)
	var wg sync.WaitGroup
	wg.Go(func() {
		p, _ = try(t.Context(), pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,`+prefill), "X-Data-Parallel-Rank", fmt.Sprint(rank))
	})
	d = post(t, pd.d.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12,`+decode))
	wg.Wait()
	return p, d
}

func (pd *mooncakePair) settled(t *testing.T) {
	t.Helper()
	for _, e := range []*Engine{pd.p, pd.d} {
		eventually(t, "engine holds nothing", func() bool { s := e.State(); return s.BlocksUsed == 0 && s.RequestsWaiting == 0 })
	}
}

func TestMooncakeEqualsDirect(t *testing.T) {
	pd := startMooncake(t, func(c *Config) {
		if c.Role != RoleBoth {
			c.Ranks = 2
		}
	})
	transfers := int64(0)
	for round := range 2 { // the second round finds prefixes in both caches
		for _, n := range lengths {
			prompt := words(n, n)
			p, got := pd.concurrent(t, prompt, n%2)
			transfers++
			want := post(t, pd.both.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12`))
			if got.text(t) != want.text(t) {
				t.Errorf("round %d, %d tokens: text %q, direct %q", round, n, got.text(t), want.text(t))
			}
			if p.params(t) != "null" {
				t.Errorf("prefill answers parameters: %s", p.body)
			}
		}
	}
	pd.settled(t)
	if p, d := pd.p.State(), pd.d.State(); d.Transfers < transfers || p.StaleReads+d.StaleReads+p.LeasesExpired+p.DuplicateIDs != 0 {
		t.Errorf("prefill %+v, decode %+v", p, d)
	}
}

// Any engine computes a request without parameters.
func TestMooncakePlain(t *testing.T) {
	pd := startMooncake(t)
	body := completion(words(3, 60), `"max_tokens":12`)
	want := post(t, pd.both.URL()+core.RouteCompletions, body).text(t)
	for _, e := range []*Engine{pd.p, pd.d} {
		if got := post(t, e.URL()+core.RouteCompletions, body).text(t); got != want {
			t.Errorf("post(e.URL()+routeCompletions, body).text(t) = %q, want %q", got, want)
		}
	}
	pd.settled(t)
}

// Prefill keeps its blocks only when it ended at its limit of tokens. For a
// text that ended otherwise decode waits until its timeout.
func TestMooncakeOnlyTheLimitKeepsBlocks(t *testing.T) {
	pd := startMooncake(t, func(c *Config) { c.Mooncake.AbortTimeout = 300 * time.Millisecond })
	p, d := pd.concurrent(t, "<eos1> now", 0)
	if p.status != http.StatusOK || d.status != http.StatusInternalServerError {
		t.Errorf("prefill %d, decode %d: %s", p.status, d.status, d.body)
	}
	pd.settled(t)
	if s := pd.p.State(); s.LeasesExpired != 0 {
		t.Errorf("pd.p.State() = %+v", s)
	}
}

// A leg without its partner holds its blocks until its timeout, whether or not
// its client stays.
func TestMooncakeLegAlone(t *testing.T) {
	pd := startMooncake(t, func(c *Config) { c.Mooncake.AbortTimeout = 400 * time.Millisecond })
	prefill, decode := pd.legs(t, 0)
	post(t, pd.p.URL()+core.RouteCompletions, completion(words(5, 100), `"max_tokens":1,`+prefill))
	if s := pd.p.State(); s.BlocksPinned != 7 {
		t.Errorf("prefill: %+v", s)
	}
	pd.settled(t)
	if s := pd.p.State(); s.LeasesExpired != 1 {
		t.Errorf("prefill: %+v", s)
	}
	// Expired blocks are not available any more.
	if a := post(t, pd.d.URL()+core.RouteCompletions, completion(words(5, 100), decode)); a.status != http.StatusInternalServerError {
		t.Errorf("decode: status %d", a.status)
	}
	pd.settled(t)
}

// A rejected decode leg, and one whose client leaves before it has blocks, free
// prefill's blocks.
func TestMooncakeRefusedLegReleases(t *testing.T) {
	pd := startMooncake(t)
	prefill, decode := pd.legs(t, 0)
	post(t, pd.p.URL()+core.RouteCompletions, completion(words(7, 50), `"max_tokens":1,`+prefill))
	if a := post(t, pd.d.URL()+core.RouteCompletions, completion("x", `"max_tokens":0,`+decode)); a.status != http.StatusBadRequest {
		t.Errorf("got status %d: %s", a.status, a.body)
	}
	pd.settled(t)
	if s := pd.p.State(); s.LeasesExpired > 0 || s.StaleReads > 0 {
		t.Errorf("pd.p.State() = %+v", s)
	}
}

// An engine id that the bootstrap server does not know is a failed load. Decode
// looks for a known engine id at its earlier address.
func TestMooncakeOtherEngine(t *testing.T) {
	pd := startMooncake(t)
	_, decode := pd.legs(t, 0)
	decode = strings.Replace(decode, pd.p.ID(), core.NewUUID(), 1)
	if a := post(t, pd.d.URL()+core.RouteCompletions, completion("x y z", decode)); a.status != http.StatusInternalServerError {
		t.Errorf("got status %d: %s", a.status, a.body)
	}
	pd.settled(t)
}

// A leg for the other role ends the engine. So does a rejected leg that does
// not name the prefill engine.
func TestMooncakeEnds(t *testing.T) {
	for name, leg := range map[string]struct{ role, body string }{
		"decode's at prefill": {RolePrefill, `"kv_transfer_params":{"do_remote_prefill":true,"transfer_id":"x","remote_engine_id":"e","remote_bootstrap_addr":"http://127.0.0.1:1"}`},
		"prefill's at decode": {RoleDecode, `"kv_transfer_params":{"do_remote_decode":true,"transfer_id":"x"}`},
		"refused and half":    {RoleDecode, `"max_tokens":0,"kv_transfer_params":{"do_remote_prefill":true,"transfer_id":"x"}`},
	} {
		t.Run(name, func(t *testing.T) {
			pd := startMooncake(t)
			e := pd.p
			if leg.role == RoleDecode {
				e = pd.d
			}
			try(t.Context(), e.URL()+core.RouteCompletions, completion("x", leg.body))
			select {
			case <-e.Died():
			case <-time.After(20 * time.Second):
				t.Error("the engine still runs")
			}
		})
	}
}

// The texts of the bootstrap server are those of the real one.
func TestMooncakeBootstrap(t *testing.T) {
	pd := startMooncake(t)
	for _, tt := range []struct {
		method, path, body string
		status             int
		answer             string
	}{
		{"POST", "/register", `{"engine_id":"other","dp_rank":0,"tp_rank":1,"pp_rank":0,"addr":"tcp://x:1"}`, 400, "Engine ID mismatch"},
		{"POST", "/register", fmt.Sprintf(`{"engine_id":%q,"dp_rank":0,"tp_rank":0,"pp_rank":0,"addr":"tcp://x:1"}`, pd.p.ID()), 400, "already registered"},
		{"POST", "/register", fmt.Sprintf(`{"engine_id":%q,"dp_rank":0,"tp_rank":1,"pp_rank":0,"addr":"tcp://x:1"}`, pd.p.ID()), 200, `"ok"`},
		{"POST", "/register", `{`, 422, "detail"},
		{"GET", "/query", "", 200, `"worker_addr":{"0":{"0":"tcp://`},
		{"GET", "/health", "", 404, "Not Found"},
		{"POST", "/query", "", 405, "Method Not Allowed"},
	} {
		req, err := http.NewRequest(tt.method, pd.bootstrap()+tt.path, strings.NewReader(tt.body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != tt.status || !strings.Contains(string(body), tt.answer) {
			t.Errorf("%s %s %s: %d %s", tt.method, tt.path, tt.body, resp.StatusCode, body)
		}
	}
}

// The bytes are Python msgpack's encoding of a MooncakeXferMetadata.
func TestMooncakeAsk(t *testing.T) {
	// {"remote_hostname": "10.0.1.7", "remote_port": 15000, "remote_tp_size": 1,
	// "remote_tp_rank": 0, "req_blocks": {"cmpl-a-0-1": ("xfer-a", [[3, 4, 300]])},
	// "kv_caches_base_addr": [4096], "block_lens": [16], "kv_block_lens": [16]}
	const python = "88af72656d6f74655f686f73746e616d65a831302e302e312e37ab72656d6f74655f706f7274cd3a98ae72656d6f74655f74705f73697a6501ae72656d6f74655f74705f72616e6b00aa7265715f626c6f636b7381aa636d706c2d612d302d3192a6786665722d6191930304cd012cb36b765f6361636865735f626173655f6164647291cd1000aa626c6f636b5f6c656e739110ad6b765f626c6f636b5f6c656e739110"
	raw, err := hex.DecodeString(python)
	if err != nil {
		t.Fatal(err)
	}
	ask := vllm.MooncakeAsk{Host: "10.0.1.7", Port: 15000, Request: "cmpl-a-0-1", Transfer: "xfer-a", Blocks: []core.BlockID{3, 4, 300}, BlockLen: 16}
	if got := hex.EncodeToString(ask.Encode()); got != python {
		t.Errorf("encoded %s", got)
	}
	back, err := vllm.DecodeAsk(raw)
	if err != nil || fmt.Sprint(back) != fmt.Sprint(ask) {
		t.Errorf("decodeAsk(raw) = %+v, %v", back, err)
	}
	if _, err := vllm.DecodeAsk(vllm.PackMap("remote_hostname", "x")); err == nil {
		t.Error("half a message is read")
	}
}
