package conformance

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// The failure table of a sidecar: in both directions, for each order of the
// legs, with the remote engine named in the header.

// TestSidecarClientLeaves: if the client leaves in any phase, both engines are informed
// and hold nothing afterwards.
func TestSidecarClientLeaves(t *testing.T) {
	eachSidecarFlow(t, func(t *testing.T, connector, role string) {
		t.Run("before prefill answered", func(t *testing.T) {
			f := startSidecar(t, connector, role, fleetOptions{engine: slow(enginesim.RolePrefill, 2000)})
			f.leaves(role, func() bool { return f.busy(f.prefill) })
		})
		t.Run("between the legs", func(t *testing.T) {
			f := startSidecar(t, connector, role, fleetOptions{})
			for _, d := range f.decode {
				d.SetFault("", 0, "head")
			}
			f.leaves(role, func() bool {
				return slices.ContainsFunc(f.prefill, func(p *enginesim.Engine) bool {
					s := p.State()
					return s.BlocksPinned > 0 || s.RequestsWaiting > 0
				})
			})
			for _, d := range f.decode {
				d.SetFault("", 0, "")
			}
			f.settled()
			f.cleanupCounted()
		})
		t.Run("while decode streams", func(t *testing.T) {
			f := startSidecar(t, connector, role, fleetOptions{engine: slow(enginesim.RoleDecode, 20000)})
			f.leaves(role, func() bool {
				return slices.ContainsFunc(f.decode, func(d *enginesim.Engine) bool { s := d.State(); return s.Transfers > 0 && s.RequestsRunning > 0 })
			})
			f.settled()
		})
	})
}

// leaves sends a request to the first remote engine, and leaves when the
// condition holds.
func (f *fleet) leaves(role string, when func() bool) {
	f.t.Helper()
	ctx, leave := context.WithCancel(context.Background())
	gone := make(chan answer, 1)
	go func() {
		gone <- f.post(ctx, f.url, chatPath, chat(long, 2000, true), prefillerHeader, f.remotes(role)[0].Addr())
	}()
	f.eventually("the client may leave", when)
	leave()
	<-gone
	f.eventually("the outcome is counted", func() bool { return f.metric("pdproxy_exchanges_total", `outcome="cancelled"`) == 1 })
}

// TestSidecarRemoteFails: another named engine serves the request, or else an
// engine of the next policies. Each case is counted.
func TestSidecarRemoteFails(t *testing.T) {
	eachSidecarFlow(t, func(t *testing.T, connector, role string) {
		f := startSidecar(t, connector, role, fleetOptions{config: func(c *config.Config) {
			c.Retry.MinBudget = 100
		}})
		bad, good := f.remotes(role)[0], f.remotes(role)[1]
		named := map[string]string{enginesim.RoleDecode: "prefill_named", enginesim.RolePrefill: "decode_named"}[role]
		name, other := f.nameOf(bad), f.nameOf(good)
		for _, kind := range []string{"500", "reset", "close"} {
			bad.SetFault("1:"+kind, 0, "")
			body := chat("one is named"+kind+long, 12, true)
			a := f.tell(body, prefillerHeader, bad.Addr())
			f.right(a, chatPath, body)
			if _, fallbacks := f.coordination(a); !slices.Contains(fallbacks, named+"/failed") {
				t.Errorf("%s: fallbacks %v", kind, fallbacks)
			}
			body = chat("two are named"+kind+long, 12, true)
			a = f.tell(body, prefillerHeader, bad.Addr()+","+good.Addr())
			f.right(a, chatPath, body)
			if got := remoteOf(a, role); got != other {
				t.Errorf("%s: served by %q", kind, got)
			}
			bad.SetFault("", 0, "")
		}
		f.settled()
		bad.Kill()
		f.eventually("its probes have found that the engine is down", func() bool { return f.engineState(name) == "unhealthy" })
		body := chat("down"+long, 12, true)
		a := f.tell(body, prefillerHeader, bad.Addr())
		f.right(a, chatPath, body)
		if _, fallbacks := f.coordination(a); !slices.Contains(fallbacks, named+"/no_target") {
			t.Errorf("down: fallbacks %v", fallbacks)
		}
	})
}

// nameOf returns the name of an engine in the configuration.
func (f *fleet) nameOf(e *enginesim.Engine) string {
	var rows []struct{ Name, URL string }
	f.admin("/v1/engines", &rows)
	for _, r := range rows {
		if r.URL == e.URL() {
			return r.Name
		}
	}
	return ""
}

// TestSidecarLocalFails: no other engine can serve the leg. The client's error
// names the leg.
func TestSidecarLocalFails(t *testing.T) {
	eachSidecarFlow(t, func(t *testing.T, connector, role string) {
		f := startSidecar(t, connector, role, fleetOptions{})
		local := map[string]*enginesim.Engine{enginesim.RoleDecode: f.decode[0], enginesim.RolePrefill: f.prefill[0]}[role]
		local.SetFault("1:500", 0, "")
		a := f.tell(chat("local fails"+long, 12, true), prefillerHeader, f.remotes(role)[0].Addr())
		if a.status != 502 || !strings.Contains(a.body, role) {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
		local.SetFault("", 0, "")
		f.settled()
	})
}

func TestSidecarRemoteRefuses(t *testing.T) {
	eachSidecarFlow(t, func(t *testing.T, connector, role string) {
		f := startSidecar(t, connector, role, fleetOptions{})
		bad := f.remotes(role)[0]
		bad.SetFault("1:400", 0, "")
		a := f.tell(chat(long, 5, true), prefillerHeader, bad.Addr())
		if a.status != 400 || !strings.Contains(a.body, "message") {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
		bad.SetFault("", 0, "")
		f.settled()
		if n := f.metric("pdproxy_retries_total"); n != 0 {
			t.Errorf("a 4xx was retried %v times", n)
		}
	})
}

func TestSidecarDecodeDiesMidStream(t *testing.T) {
	eachSidecarFlow(t, func(t *testing.T, connector, role string) {
		f := startSidecar(t, connector, role, fleetOptions{engine: slow(enginesim.RoleDecode, 5000)})
		for _, d := range f.decode {
			d.SetFault("1:cut", 0, "")
		}
		a := f.tell(chat(long, 400, true), prefillerHeader, f.remotes(role)[0].Addr())
		if a.err != nil || a.errors != 1 || a.done {
			t.Fatalf("%d error events, done %v, err %v: %s", a.errors, a.done, a.err, a.body)
		}
		f.eventually("the broken stream is counted", func() bool { return f.metric("pdproxy_broken_streams_total") == 1 })
		f.settled()
	})
}

func TestSidecarRemoteHangs(t *testing.T) {
	eachSidecarFlow(t, func(t *testing.T, connector, role string) {
		f := startSidecar(t, connector, role, fleetOptions{config: func(c *config.Config) {
			c.Timeouts.Prefill, c.Timeouts.FirstByte = config.Duration(time.Second), config.Duration(time.Second)
		}})
		bad, good := f.remotes(role)[0], f.remotes(role)[1]
		phase := map[string]string{enginesim.RoleDecode: "prefill", enginesim.RolePrefill: "head"}[role]
		bad.SetFault("", 0, phase)
		body := chat("hangs"+long, 12, true)
		a := f.tell(body, prefillerHeader, bad.Addr()+","+good.Addr())
		f.right(a, chatPath, body)
		bad.SetFault("", 0, "")
		f.settled()
	})
}

// TestSidecarPickedDecodeFails: an unsent leg moves to another engine with the
// same blocks, or the request begins anew. The picker's choice is not used a
// second time.
func TestSidecarPickedDecodeFails(t *testing.T) {
	for _, connector := range []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorSGLang, trtllmFirst} {
		for _, kind := range []string{"500", "reset"} {
			t.Run(connector+" "+kind, func(t *testing.T) {
				var f *fleet
				url := startPicker(t, pickAlways(&f))
				f = startSidecar(t, connector, enginesim.RolePrefill, fleetOptions{config: func(c *config.Config) {
					c.Sidecar.Picker, c.Sidecar.PickerTimeout = url, config.Duration(10*time.Second)
				}})
				f.decode[1].SetFault("1:"+kind, 0, "")
				body := chat("picked and dead"+long, 12, true)
				a := f.tell(body)
				f.right(a, chatPath, body)
				if got := a.header.Get("X-Pdproxy-Decode"); got != "d0" {
					t.Errorf("decoded by %s", got)
				}
				if _, fallbacks := f.coordination(a); len(fallbacks) == 0 {
					t.Error("no fallback was recorded")
				}
				f.decode[1].SetFault("", 0, "")
				f.settled()
			})
		}
		t.Run(connector+" is gone", func(t *testing.T) {
			var f *fleet
			url := startPicker(t, pickAlways(&f))
			f = startSidecar(t, connector, enginesim.RolePrefill, fleetOptions{config: func(c *config.Config) {
				c.Sidecar.Picker, c.Sidecar.PickerTimeout = url, config.Duration(10*time.Second)
				c.Health.Interval = config.Duration(time.Hour) // so that its end stays unnoticed
			}})
			f.decode[1].Kill()
			body := chat("picked and gone"+long, 12, true)
			a := f.tell(body)
			f.right(a, chatPath, body)
			f.settled()
		})
	}
}
