package enginesim

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/vllm"
)

// pushPair is a prefill and a decode engine in push mode, and a third engine
// with both roles.
type pushPair struct {
	p, d, both *Engine
	serial     int
}

func startPush(t *testing.T, change ...func(*Config)) *pushPair {
	t.Helper()
	start := func(role string) *Engine {
		cfg := Config{Connector: ConnectorVLLMNixlPush, Role: role, KVBlocks: 256}
		for _, c := range change {
			c(&cfg)
		}
		return startEngine(t, cfg)
	}
	return &pushPair{p: start(RolePrefill), d: start(RoleDecode), both: start(RoleBoth)}
}

// legs returns the id and the parameters of the two legs of a new request.
func (pd *pushPair) legs() (id, prefill, decode string) {
	pd.serial++
	id = fmt.Sprintf("%032x", pd.serial)
	host, port, _ := net.SplitHostPort(pd.p.SideAddress())
	return id, prefillParams, fmt.Sprintf(`"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":%q,`+
		`"remote_host":%q,"remote_port":%s,"tp_size":1,"pp_size":1,"remote_request_id":%q}`, pd.p.EngineID(), host, port, id)
}

// write runs both legs of a prompt. With late, decode's leg is sent after the
// answer of prefill's.
func (pd *pushPair) write(t *testing.T, prompt string, late bool) (p, d answer) {
	t.Helper()
	id, prefill, decode := pd.legs()
	var wg sync.WaitGroup
	wg.Go(func() {
		p, _ = try(t.Context(), pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,`+prefill), "X-Request-Id", id)
	})
	if late {
		wg.Wait()
	}
	d = post(t, pd.d.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12,`+decode), "X-Request-Id", id)
	wg.Wait()
	return p, d
}

func TestPushEqualsDirect(t *testing.T) {
	pd := startPush(t)
	for round, late := range []bool{false, true, false} { // after the first round, both caches have prefixes
		for _, n := range lengths {
			prompt := words(n+100*round*(1-round/2), n)
			_, got := pd.write(t, prompt, late)
			want := post(t, pd.both.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12`))
			if got.text(t) != want.text(t) {
				t.Errorf("round %d, %d tokens: text %q, direct %q", round, n, got.text(t), want.text(t))
			}
		}
	}
	eventually(t, "prefill holds nothing", func() bool { return pd.p.State().BlocksUsed == 0 })
	if p, d := pd.p.State(), pd.d.State(); d.Transfers != int64(3*len(lengths)) || p.StaleReads+d.StaleReads+p.LeasesExpired != 0 {
		t.Errorf("prefill %+v, decode %+v", p, d)
	}
}

// Each data-parallel rank of prefill is a separate engine, with its own id and port.
func TestPushToARank(t *testing.T) {
	pd := startPush(t, func(c *Config) { c.Ranks = 3; c.Nixl.EngineID = "e-" + c.Role })
	for rank := range 3 {
		pd.serial++
		id := fmt.Sprintf("%032x", pd.serial)
		host, port := pd.p.Ranks[rank].Side.HostPort()
		decode := fmt.Sprintf(`"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"e-prefill_dp%d","remote_host":%q,"remote_port":%d,"tp_size":1,"remote_request_id":%q}`, rank, host, port, id)
		prompt := words(rank, 40)
		post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,`+prefillParams), "X-Request-Id", id, "X-Data-Parallel-Rank", fmt.Sprint(rank))
		got := post(t, pd.d.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12,`+decode), "X-Request-Id", id)
		if want := post(t, pd.both.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12`)); got.text(t) != want.text(t) {
			t.Errorf("rank %d: text %q, direct %q", rank, got.text(t), want.text(t))
		}
	}
}

// TestPushMismatch: a decode leg that names prefill wrongly fails. A decode leg
// with another id or route than prefill's waits until its client leaves.
func TestPushMismatch(t *testing.T) {
	short := func(c *Config) {
		c.HandshakeTimeout, c.Nixl.ReclaimAfter, c.Lease = 100*time.Millisecond, 100*time.Millisecond, 200*time.Millisecond
	}
	for name, edit := range map[string][2]string{
		"another engine": {`"remote_engine_id":"`, `"remote_engine_id":"x`},
		"more ranks":     {`"tp_size":1`, `"tp_size":2`},
		"more stages":    {`"pp_size":1`, `"pp_size":2`},
		"nobody there":   {`"remote_port":`, `"remote_port":1,"port":`},
	} {
		t.Run(name, func(t *testing.T) {
			pd := startPush(t, short)
			id, _, decode := pd.legs()
			a := post(t, pd.d.URL()+core.RouteCompletions, completion("x", strings.Replace(decode, edit[0], edit[1], 1)), "X-Request-Id", id)
			if a.status != http.StatusInternalServerError || pd.d.State().BlocksUsed != 0 {
				t.Errorf("got status %d, %+v", a.status, pd.d.State())
			}
		})
	}
	for name, leg := range map[string][2]string{
		"another id":    {core.RouteCompletions, "another"},
		"another route": {core.RouteChat, ""},
	} {
		t.Run(name, func(t *testing.T) {
			pd := startPush(t, short)
			id, prefill, decode := pd.legs()
			post(t, pd.p.URL()+core.RouteCompletions, completion("x", `"max_tokens":1,`+prefill), "X-Request-Id", id)
			ctx, leave := context.WithCancel(t.Context())
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				body := completion("x", decode)
				if leg[0] == core.RouteChat {
					body = `{"model":"sim","messages":[{"role":"user","content":"x"}],` + decode + `}`
				}
				try(ctx, pd.d.URL()+leg[0], body, "X-Request-Id", id+leg[1])
			}()
			eventually(t, "the lease ends", func() bool { return pd.p.State().LeasesExpired == 1 })
			if s := pd.d.State(); s.BlocksPinned == 0 || s.RequestsWaiting != 1 {
				t.Errorf("decode does not wait: %+v", s)
			}
			leave()
			<-gone
			eventually(t, "decode gives its blocks up", func() bool { return pd.d.State().BlocksUsed == 0 })
		})
	}
}

// A decode whose client has left holds its blocks until prefill has written
// into them. Another prefill leg of the same id does that.
func TestPrefillAgainFreesDecode(t *testing.T) {
	pd := startPush(t)
	id, prefill, decode := pd.legs()
	prompt := words(4, 70)
	ctx, leave := context.WithCancel(t.Context())
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		try(ctx, pd.d.URL()+core.RouteCompletions, completion(prompt, decode), "X-Request-Id", id)
	}()
	eventually(t, "decode has registered", func() bool {
		m := pd.p.Proto.(*vllm.VLLM).Push
		m.Mu.Lock()
		defer m.Mu.Unlock()
		return len(m.Registered) == 1
	})
	leave()
	<-gone
	if s := pd.d.State(); s.BlocksPinned == 0 {
		t.Errorf("decode released its blocks while prefill may write into them: %+v", s)
	}
	post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,`+prefill), "X-Request-Id", id)
	eventually(t, "both are empty", func() bool { return pd.d.State().BlocksUsed == 0 && pd.p.State().BlocksUsed == 0 })
	if p, d := pd.p.State(), pd.d.State(); p.LeasesExpired+p.StaleReads+d.StaleReads != 0 || d.Aborted != 1 {
		t.Errorf("prefill %+v, decode %+v", p, d)
	}
}

// A message that makes the scheduler of vLLM raise ends the engine.
func TestPushEnds(t *testing.T) {
	for _, key := range []string{"remote_engine_id", "remote_host", "remote_port", "tp_size", "remote_request_id"} {
		t.Run(key, func(t *testing.T) {
			pd := startPush(t)
			id, _, decode := pd.legs()
			try(t.Context(), pd.d.URL()+core.RouteCompletions, completion("x", strings.Replace(decode, key, "no_"+key, 1)), "X-Request-Id", id)
			select {
			case <-pd.d.Died():
			case <-time.After(20 * time.Second):
				t.Error("the engine still runs")
			}
		})
	}
}

// Without parameters any engine of push mode computes the prompt itself.
func TestPushPlain(t *testing.T) {
	pd := startPush(t)
	body := completion(words(3, 60), `"max_tokens":12`)
	want := post(t, pd.both.URL()+core.RouteCompletions, body).text(t)
	for _, e := range []*Engine{pd.p, pd.d} {
		if got := post(t, e.URL()+core.RouteCompletions, body).text(t); got != want {
			t.Errorf("answer of %s %q, want %q", e.Cfg.Name, got, want)
		}
	}
}
