package enginesim

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/vllm"
)

// moriioPair is a prefill and a decode engine, and a third without a connector.
type moriioPair struct {
	p, d, both *Engine
	serial     int
}

func startMoRIIO(t *testing.T, connector string, change ...func(*Config)) *moriioPair {
	t.Helper()
	start := func(role string) *Engine {
		cfg := Config{Connector: connector, Role: role, KVBlocks: 256}
		for _, c := range change {
			c(&cfg)
		}
		return startEngine(t, cfg)
	}
	return &moriioPair{p: start(RolePrefill), d: start(RoleDecode), both: start(RoleBoth)}
}

// legs returns the two legs of a new transfer, as a proxy sends them: a request
// id that names both engines, and parameters.
func (pd *moriioPair) legs() (id string, prefill, decode string) {
	pd.serial++
	id = fmt.Sprintf("___prefill_addr_%s___decode_addr_%s_%032x", pd.p.KVAddress(), pd.d.KVAddress(), pd.serial)
	transfer := fmt.Sprintf("tx-%d", pd.serial)
	prefill = `"kv_transfer_params":{"transfer_id":"` + transfer + `","do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_dp_size":1,"remote_tp_size":1}`
	decode = `"kv_transfer_params":{"transfer_id":"` + transfer + `","do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":null,"remote_block_ids":null,"remote_dp_size":1,"remote_tp_size":1}`
	return id, prefill, decode
}

// write runs both legs of a prompt in WRITE mode.
func (pd *moriioPair) write(t *testing.T, prompt string) (p, d answer) {
	t.Helper()
	id, prefill, decode := pd.legs()
	var wg sync.WaitGroup
	wg.Go(func() {
		p, _ = try(t.Context(), pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,`+prefill), "X-Request-Id", id)
	})
	d = post(t, pd.d.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12,`+decode), "X-Request-Id", id)
	wg.Wait()
	return p, d
}

func TestWriteEqualsDirect(t *testing.T) {
	pd := startMoRIIO(t, ConnectorVLLMMoRIIO)
	for round := range 2 { // the second round finds prefixes in both caches
		for _, n := range lengths {
			prompt := words(n, n)
			_, got := pd.write(t, prompt)
			want := post(t, pd.both.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12`))
			if got.text(t) != want.text(t) {
				t.Errorf("round %d, %d tokens: text %q, direct %q", round, n, got.text(t), want.text(t))
			}
		}
	}
	eventually(t, "prefill holds nothing", func() bool { return pd.p.State().BlocksUsed == 0 })
	if p, d := pd.p.State(), pd.d.State(); d.Transfers != 18 || p.StaleReads+d.StaleReads+p.LeasesExpired != 0 {
		t.Errorf("prefill %+v, decode %+v", p, d)
	}
}

func TestReadEqualsDirect(t *testing.T) {
	pd := startMoRIIO(t, ConnectorVLLMMoRIIORead)
	for _, n := range lengths {
		prompt := words(n, n)
		id, prefill, _ := pd.legs()
		p := post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,`+prefill), "X-Request-Id", id)
		if s := pd.p.State(); s.BlocksPinned != (n+15)/16 {
			t.Errorf("pinned %d blocks", s.BlocksPinned)
		}
		got := post(t, pd.d.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12,"kv_transfer_params":`+p.params(t)), "X-Request-Id", id)
		if want := post(t, pd.both.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12`)); got.text(t) != want.text(t) {
			t.Errorf("%d tokens: text %q, direct %q", n, got.text(t), want.text(t))
		}
		eventually(t, "prefill is told", func() bool { return pd.p.State().BlocksUsed == 0 })
	}
	// Changed parameters belong to another engine.
	id, prefill, _ := pd.legs()
	p := post(t, pd.p.URL()+core.RouteCompletions, completion(words(1, 40), `"max_tokens":1,`+prefill), "X-Request-Id", id)
	params := strings.Replace(p.params(t), `é/<&>`, `e`, 1)
	if a := post(t, pd.d.URL()+core.RouteCompletions, completion(words(1, 40), `"kv_transfer_params":`+params), "X-Request-Id", id); a.status != http.StatusInternalServerError {
		t.Errorf("got status %d", a.status)
	}
}

// Without a transfer a consumer in READ mode answers from unwritten memory. A
// consumer in WRITE mode, and any producer, computes.
func TestPlainRequest(t *testing.T) {
	for connector, wrong := range map[string]bool{ConnectorVLLMMoRIIO: false, ConnectorVLLMMoRIIORead: true} {
		pd := startMoRIIO(t, connector)
		body := completion(words(3, 60), `"max_tokens":12`)
		want := post(t, pd.both.URL()+core.RouteCompletions, body).text(t)
		if got := post(t, pd.p.URL()+core.RouteCompletions, body).text(t); got != want {
			t.Errorf("%s: answer of prefill %q, want %q", connector, got, want)
		}
		if got := post(t, pd.d.URL()+core.RouteCompletions, body).text(t); (got != want) != wrong {
			t.Errorf("%s: answer of decode %q, correct %q", connector, got, want)
		}
	}
}

// A prefill whose first token ends the text keeps no blocks.
func TestOnlyTheLimitKeepsBlocks(t *testing.T) {
	pd := startMoRIIO(t, ConnectorVLLMMoRIIORead)
	id, prefill, _ := pd.legs()
	a := post(t, pd.p.URL()+core.RouteCompletions, completion("<eos1> now", `"max_tokens":1,`+prefill), "X-Request-Id", id)
	if a.params(t) != "null" || pd.p.State().BlocksUsed != 0 {
		t.Errorf("params %s, %+v", a.params(t), pd.p.State())
	}
}

// A leg without its partner holds its blocks until its timeout, whether or not
// its client stays.
func TestLegAlone(t *testing.T) {
	short := func(c *Config) {
		c.MoRIIO.DeferTimeout, c.MoRIIO.ReceiveTimeout = 300*time.Millisecond, 300*time.Millisecond
	}
	pd := startMoRIIO(t, ConnectorVLLMMoRIIO, short)
	prompt := words(5, 100)
	id, prefill, _ := pd.legs()
	post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,`+prefill), "X-Request-Id", id)
	if s := pd.p.State(); s.BlocksPinned != 7 {
		t.Errorf("prefill: %+v", s)
	}
	eventually(t, "prefill reaps them", func() bool { return pd.p.State().BlocksUsed == 0 })
	if s := pd.p.State(); s.LeasesExpired != 1 {
		t.Errorf("prefill: %+v", s)
	}
	id, _, decode := pd.legs()
	a := post(t, pd.d.URL()+core.RouteCompletions, completion(prompt, decode), "X-Request-Id", id)
	if a.status != http.StatusInternalServerError || pd.d.State().BlocksUsed != 0 {
		t.Errorf("decode: status %d, %+v", a.status, pd.d.State())
	}
	id, _, decode = pd.legs()
	ctx, leave := context.WithCancel(t.Context())
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		try(ctx, pd.d.URL()+core.RouteCompletions, completion(prompt, decode), "X-Request-Id", id)
	}()
	eventually(t, "decode waits", func() bool { return pd.d.State().BlocksPinned > 0 })
	leave()
	<-gone
	if s := pd.d.State(); s.BlocksPinned == 0 {
		t.Errorf("decode released its blocks while prefill may write into them: %+v", s)
	}
	eventually(t, "decode gives them up", func() bool { return pd.d.State().BlocksUsed == 0 })
}

// A rejected decode leg frees prefill's blocks, if the parameters name the
// prefill engine.
func TestRefusedLegReleases(t *testing.T) {
	for _, connector := range []string{ConnectorVLLMMoRIIO, ConnectorVLLMMoRIIORead} {
		t.Run(connector, func(t *testing.T) {
			pd := startMoRIIO(t, connector)
			id, prefill, decode := pd.legs()
			p := post(t, pd.p.URL()+core.RouteCompletions, completion(words(7, 50), `"max_tokens":1,`+prefill), "X-Request-Id", id)
			if connector == ConnectorVLLMMoRIIORead {
				decode = `"kv_transfer_params":` + p.params(t)
			} else {
				host, notify := pd.p.Proto.(*vllm.VLLM).Connector.(*vllm.MoRIIO).Host, pd.p.Proto.(*vllm.VLLM).Connector.(*vllm.MoRIIO).Notify
				decode = strings.TrimSuffix(decode, "}") + fmt.Sprintf(`,"remote_host":%q,"remote_notify_port":%d,"remote_handshake_port":1}`, host, notify)
			}
			if a := post(t, pd.d.URL()+core.RouteCompletions, completion("x", `"max_tokens":0,`+decode)); a.status != http.StatusBadRequest {
				t.Errorf("got status %d: %s", a.status, a.body)
			}
			eventually(t, "prefill is told", func() bool { return pd.p.State().BlocksUsed == 0 })
			if s := pd.p.State(); s.LeasesExpired > 0 {
				t.Errorf("pd.p.State() = %+v", s)
			}
		})
	}
}

// A message that makes the scheduler or the notification listener of vLLM raise
// ends the engine.
func TestMoRIIOEnds(t *testing.T) {
	notified := func(bytes string) func(*testing.T, *moriioPair) *Engine {
		return func(t *testing.T, pd *moriioPair) *Engine {
			m := pd.p.Proto.(*vllm.VLLM).Connector.(*vllm.MoRIIO)
			c, err := pd.both.DialPeer(t.Context(), net.JoinHostPort(m.Host, strconv.Itoa(m.Notify)))
			if err != nil {
				t.Fatal(err)
			}
			defer pd.both.HangUp(c)
			raw, _ := hex.DecodeString(bytes)
			c.Send(raw)
			return pd.p
		}
	}
	leg := func(id, params string) func(*testing.T, *moriioPair) *Engine {
		return func(t *testing.T, pd *moriioPair) *Engine {
			if id == "" {
				id, _, _ = pd.legs()
			}
			try(t.Context(), pd.p.URL()+core.RouteCompletions, completion("x", `"kv_transfer_params":`+params), "X-Request-Id", id)
			return pd.p
		}
	}
	for name, act := range map[string]func(*testing.T, *moriioPair) *Engine{
		"no address":          leg("plain", `{"do_remote_decode":true,"remote_block_ids":null,"remote_engine_id":null}`),
		"no remote_block_ids": leg("", `{"do_remote_decode":true,"remote_engine_id":null}`),
		"no block":            notified("83a474797065ad72656d6f74655f626c6f636b73ab7472616e736665725f6964a178b1626c6f636b5f6e6f746966795f6c69737490"),
		"another's message":   notified("82a474797065aa77726974655f646f6e65ab7472616e736665725f6964a178"),
		"not a map":           notified("c0"),
	} {
		t.Run(name, func(t *testing.T) {
			pd := startMoRIIO(t, ConnectorVLLMMoRIIO)
			select {
			case <-act(t, pd).Died():
			case <-time.After(20 * time.Second):
				t.Error("the engine still runs")
			}
		})
	}
}

// A release that arrives before prefill has finished frees its blocks when
// prefill finishes.
func TestReleaseBeforePrefillEnds(t *testing.T) {
	pd := startMoRIIO(t, ConnectorVLLMMoRIIO, func(c *Config) { c.PrefillUsPerToken = 2000 })
	id, prefill, _ := pd.legs()
	done := make(chan answer, 1)
	go func() {
		a, _ := try(t.Context(), pd.p.URL()+core.RouteCompletions, completion(words(9, 50), `"max_tokens":1,`+prefill), "X-Request-Id", id)
		done <- a
	}()
	m := pd.p.Proto.(*vllm.VLLM).Connector.(*vllm.MoRIIO)
	pd.d.Proto.(*vllm.VLLM).Connector.(*vllm.MoRIIO).Release(&vllm.MoRIIOLeg{Transfer: fmt.Sprintf("tx-%d", pd.serial), Peer: vllm.MoRIIOPeer{Host: m.Host, Handshake: m.Handshake, Notify: m.Notify}})
	if a := <-done; a.status != http.StatusOK {
		t.Errorf("got status %d: %s", a.status, a.body)
	}
	eventually(t, "prefill holds nothing", func() bool { return pd.p.State().BlocksUsed == 0 })
}
