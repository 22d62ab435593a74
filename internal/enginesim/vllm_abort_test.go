package enginesim

import (
	"context"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// TestRejectedDecodeLeg: a rejection by the serving layer frees the prefill's
// blocks, a rejection by the body models does not.
func TestRejectedDecodeLeg(t *testing.T) {
	tests := []struct {
		name, extra string
		status      int
		frees       bool
	}{
		{"max_tokens 0", `"max_tokens":0`, 400, true},
		{"min over max", `"max_tokens":2,"min_tokens":3`, 400, true},
		{"unknown model", `"model":"other"`, 404, true},
		{"samples", `"n":0`, 400, true},
		{"empty prompt", `"prompt":""`, 400, false},
		{"temperature", `"temperature":-1`, 400, true},
		{"ill-typed field", `"max_tokens":"many"`, 400, false},
		{"stream_options without stream", `"stream_options":{"include_usage":true}`, 400, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			pd := startPair(t, func(c *Config) { c.Lease = time.Hour })
			prompt := words(17, 20)
			params := pd.prefill(t, prompt)
			a := post(t, pd.d.URL()+core.RouteCompletions, completion(prompt, tt.extra+`,"kv_transfer_params":`+params))
			if a.status != tt.status {
				t.Errorf("got status %d %s", a.status, a.body)
			}
			if tt.frees {
				eventually(t, "free blocks", func() bool { return pd.p.State().BlocksPinned == 0 })
			} else if s := pd.p.State(); s.BlocksPinned != 2 {
				t.Errorf("prefill %+v", s)
			}
		})
	}
}

// TestAbortDecodeLeg: when its client leaves, a waiting decode leg frees the
// prefill's blocks with an empty read. A leg before its admission does not.
func TestAbortDecodeLeg(t *testing.T) {
	t.Run("waiting for blocks", func(t *testing.T) {
		pd := startPair(t, func(c *Config) { c.Lease = time.Hour })
		if err := pd.d.SetFault("", 0, core.HangDecode); err != nil {
			t.Fatal(err)
		}
		_, leaveFirst := openStream(t, pd.d.URL()+core.RouteCompletions, completion(words(18, 250*16), `"max_tokens":1,"stream":true`))
		eventually(t, "a running request", func() bool { return pd.d.State().RequestsRunning == 1 })
		prompt := words(19, 160)
		params := pd.prefill(t, prompt)
		_, leave := openStream(t, pd.d.URL()+core.RouteCompletions, completion(prompt, `"stream":true,"kv_transfer_params":`+params))
		eventually(t, "a waiting request", func() bool { return pd.d.State().RequestsWaiting == 1 })
		if s := pd.p.State(); s.BlocksPinned != 10 {
			t.Errorf("prefill %+v", s)
		}
		leave()
		eventually(t, "free blocks", func() bool { return pd.p.State().BlocksPinned == 0 })
		eventually(t, "an abort", func() bool { return pd.d.State().Aborted == 1 })
		leaveFirst()
		eventually(t, "an idle decode", func() bool { return pd.d.State().BlocksUsed == 0 })
		if s := pd.p.State(); s.Transfers != 0 || s.LeasesExpired != 0 {
			t.Errorf("prefill %+v", s)
		}
	})
	t.Run("closed right after writing", func(t *testing.T) {
		pd := startPair(t, func(c *Config) { c.Lease = time.Hour })
		for i := range 10 {
			prompt := words(40+i, 100)
			req, _ := http.NewRequest(http.MethodPost, pd.d.URL()+core.RouteCompletions,
				strings.NewReader(completion(prompt, `"kv_transfer_params":`+pd.prefill(t, prompt))))
			conn, err := net.Dial("tcp", pd.d.Addr())
			if err != nil {
				t.Fatal(err)
			}
			req.Write(conn)
			conn.Close()
			eventually(t, "free blocks", func() bool { return pd.p.State().BlocksPinned == 0 })
		}
	})
	t.Run("before admission", func(t *testing.T) {
		pd := startPair(t, func(c *Config) { c.Lease = time.Hour })
		prompt := words(20, 160)
		params := pd.prefill(t, prompt)
		if err := pd.d.SetFault("1:slow", 0, ""); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := try(ctx, pd.d.URL()+core.RouteCompletions, completion(prompt, `"kv_transfer_params":`+params)); err == nil {
			t.Fatal("answered")
		}
		pd.d.Close() // waits for the handler
		if s := pd.p.State(); s.BlocksPinned != 10 {
			t.Errorf("prefill %+v", s)
		}
		if s := pd.d.State(); s.Requests != 0 {
			t.Errorf("decode %+v", s)
		}
	})
}

// TestHeartbeat: the lease of a request that waits on decode is renewed.
func TestHeartbeat(t *testing.T) {
	pd := startPair(t, func(c *Config) { c.Lease = 3 * time.Second }) // a busy machine delays heartbeats
	pd.d.SetFault("", 0, core.HangDecode)
	_, leaveFirst := openStream(t, pd.d.URL()+core.RouteCompletions, completion(words(21, 250*16), `"max_tokens":1,"stream":true`))
	eventually(t, "a running request", func() bool { return pd.d.State().RequestsRunning == 1 })
	kept, left := words(22, 160), words(23, 160)
	params := pd.prefill(t, kept)
	events, _ := openStream(t, pd.d.URL()+core.RouteCompletions, completion(kept, `"max_tokens":5,"stream":true,"kv_transfer_params":`+params))
	eventually(t, "a waiting request", func() bool { return pd.d.State().RequestsWaiting == 1 })
	for n := range int64(2) {
		pd.prefill(t, left) // never read: the expiry of their leases measures time
		eventually(t, "an ended lease", func() bool { return pd.p.State().LeasesExpired == n+1 })
	}
	if s := pd.p.State(); s.BlocksPinned != 10 {
		t.Errorf("prefill %+v", s)
	}
	pd.d.SetFault("", 0, "")
	leaveFirst()
	rest, err := events()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := chatStreamText(t, rest), post(t, pd.both.URL()+core.RouteCompletions, completion(kept, `"max_tokens":5`)).text(t); got != want {
		t.Errorf("got text %q, want %q as without the proxy", got, want)
	}
}

func TestBidirectionalWithoutFlagWaits(t *testing.T) {
	pd := startPair(t)
	_, leave := openStream(t, pd.p.URL()+core.RouteCompletions, completion("hello", `"stream":true,"kv_transfer_params":{"do_remote_decode":true,"remote_block_ids":[[1]]}`))
	eventually(t, "a waiting request", func() bool { return pd.p.State().RequestsWaiting == 1 })
	leave()
	eventually(t, "an abort", func() bool { return pd.p.State().Aborted == 1 })
}
