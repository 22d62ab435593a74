package conformance

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestStd runs failures and load with net/http's client between proxy and
// engines in place of our own client. An engine can notice one difference. Our
// own client reads on for a cancelled prefill leg on any connection. net/http's
// does so only over HTTP/1.1 and until the first byte of an answer. So an
// answer that is sent while the client leaves is lost more often, and its
// blocks wait for the engine's lease.
func TestStd(t *testing.T) {
	std := func(c *config.Config) { c.Transport.Client = "nethttp" }
	eachConnector(t, func(t *testing.T, connector string) {
		t.Run("failures", func(t *testing.T) {
			f := startFleet(t, connector, fleetOptions{
				engine: slow(enginesim.RoleDecode, 3000),
				config: func(c *config.Config) {
					std(c)
					c.Timeouts.Prefill, c.Timeouts.FirstByte = config.Duration(time.Second), config.Duration(time.Second)
					c.Timeouts.StreamIdle = config.Duration(500 * time.Millisecond)
					c.Circuit.OpenFor = config.Duration(10 * time.Millisecond) // each row gets its fault
				},
			})
			for _, row := range stdFailures {
				t.Run(row.name, func(t *testing.T) {
					g := *f
					g.t = t
					row.run(&g)
					for _, e := range append(g.prefill, g.decode...) {
						e.SetFault("", 0, "")
					}
					g.settled()
				})
			}
		})
		t.Run("soak", func(t *testing.T) { runSoak(t, connector, soakTime(t), std) })
	})
}

// stdFailures are rows of the failure table, one for each way in which an
// upstream connection can end.
var stdFailures = []struct {
	name string
	run  func(f *fleet)
}{
	{"none", func(f *fleet) {
		for _, stream := range []bool{false, true} {
			body := chat(long, 20, stream)
			f.right(f.try(chatPath, body), chatPath, body)
		}
	}},
	{"prefill is reset", func(f *fleet) { f.fails(f.prefill[0], "1:reset", "") }},
	{"prefill hangs", func(f *fleet) { f.fails(f.prefill[0], "", "prefill") }},
	{"decode is reset", func(f *fleet) { f.fails(f.decode[0], "1:reset", "") }},
	{"decode closes", func(f *fleet) { f.fails(f.decode[0], "1:close", "") }},
	{"decode refuses", func(f *fleet) { f.fails(f.decode[0], "1:503", "") }},
	{"decode hangs", func(f *fleet) { f.fails(f.decode[0], "", "head") }},
	{"streams are cut", func(f *fleet) {
		for _, d := range f.decode {
			d.SetFault("1:cut", 0, "")
		}
		f.breaks()
	}},
	{"streams hang", func(f *fleet) {
		for _, d := range f.decode {
			d.SetFault("", 0, "stream")
		}
		f.breaks()
	}},
	{"the client leaves while prefill works", func(f *fleet) {
		for _, p := range f.prefill {
			p.SetFault("", 0, "prefill")
		}
		ctx, leave := context.WithCancel(context.Background())
		gone := make(chan answer, 1)
		go func() { gone <- f.post(ctx, f.url, chatPath, chat(long+"left", 20, true)) }()
		f.eventually("prefill works", func() bool { return f.busy(f.prefill) })
		leave()
		if a := <-gone; !errors.Is(a.err, context.Canceled) {
			f.t.Errorf("the client got %+v", a)
		}
	}},
	{"the client leaves a stream", func(f *fleet) {
		ctx, leave := context.WithCancel(context.Background())
		defer leave()
		resp := f.open(ctx, chat(long, 2000, true))
		if _, err := resp.Body.Read(make([]byte, 10)); err != nil {
			f.t.Error(err)
		}
		resp.Body.Close()
	}},
}

// fails makes one engine fail until a leg was retried, and asserts that the
// client does not notice.
func (f *fleet) fails(e *enginesim.Engine, fail, hang string) {
	f.t.Helper()
	if err := e.SetFault(fail, 0, hang); err != nil {
		f.t.Fatal(err)
	}
	body := chat("the other engine answers "+fail+hang, 8, true)
	before := f.metric("pdproxy_retries_total")
	f.eventually("a leg is tried again", func() bool {
		f.right(f.try(chatPath, body), chatPath, body)
		return f.metric("pdproxy_retries_total") > before
	})
}

// breaks asserts that a stream ends with an error event.
func (f *fleet) breaks() {
	f.t.Helper()
	if a := f.try(chatPath, chat(long, 40, true)); a.status != 200 || a.err != nil || a.errors != 1 || a.done {
		f.t.Errorf("got status %d, %d error events, done %v, err %v: %s", a.status, a.errors, a.done, a.err, a.body)
	}
}
