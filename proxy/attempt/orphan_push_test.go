package attempt_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// pushAnswer is the answer of a prefill engine in push mode.
var pushAnswer = strings.Replace(world.NIXLAnswer, `"remote_engine_id":"e"`, `"remote_engine_id":"push"`, 1)

// TestADeadProcessLeavesNoWaitingDecode: if a process dies while prefill computes for a decode engine
// that waits without end (push mode), the coordinator sends the prefill leg again. At any other time
// it sends nothing. A process that runs sends the leg itself.
func TestADeadProcessLeavesNoWaitingDecode(t *testing.T) {
	for _, tt := range []struct {
		name           string
		prefillAnswers bool
		decodeBegins   bool
		leaves         bool // the client leaves before the process dies
		stepsDown      bool // the coordinator steps down at once
		size           int  // of the prompt, in bytes
		again          int  // prefill legs that are sent again
		byWorker       bool
	}{
		{name: "while prefill computes", again: 1},
		{name: "while prefill computes, and the term ends", stepsDown: true, again: 1},
		{name: "while prefill computes a prompt that is too long for the coordinator", size: cleanup.MaxEncoded},
		{name: "while prefill computes a prompt that is nearly too long", size: cleanup.MaxEncoded - 4<<10, again: 1},
		{name: "after prefill's answer", prefillAnswers: true},
		{name: "after the start of decode's answer", decodeBegins: true},
		{name: "after the client has left", leaves: true, again: 1, byWorker: true},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			var r *remote
			var w *world.World
			taken := 0
			arrived := make(chan time.Time, 2)
			prefill := &world.Engine{Name: "p", Role: "prefill", Connector: "vllm-nixl-push", Serve: func(c *world.Conn, nth int) {
				if nth > 1 {
					arrived <- time.Now()
				} else if !tt.prefillAnswers {
					c.Hold()
					return
				}
				c.JSON(200, pushAnswer)
			}}
			decode := &world.Engine{Name: "d", Role: "decode", Connector: "vllm-nixl-push", Serve: func(c *world.Conn, _ int) {
				if tt.decodeBegins {
					c.Send(world.StreamHead)
					c.Chunks(`data: {"choices":[{"text":"x"}]}` + "\n\n")
				}
				c.Hold()
			}}
			w = world.New(t, world.Setup{Engines: []*world.Engine{prefill, decode}, Options: func(d *proxy.Options) {
				r = newRemote(t, d, func(owed []byte) {
					taken++
					if err := w.CleanUp(owed); err != nil {
						t.Error(err)
					}
				})
			}})
			defer r.stop()
			synctest.Wait()
			ctx, hangUp := context.WithCancel(t.Context())
			defer hangUp()
			var asked sync.WaitGroup
			body := strings.Replace(world.Completions(true), `"prompt":"`, `"prompt":"`+strings.Repeat("x", tt.size), 1)
			if len(body) < tt.size {
				t.Fatalf("got a body of %d bytes", len(body))
			}
			asked.Go(func() { world.Ask(ctx, w.Client, "POST", "http://proxy"+world.CompletionsPath, body) })
			time.Sleep(time.Second)
			if len(prefill.Seen()) != 1 || len(decode.Seen()) != 1 || w.Local.Open() != 1 {
				t.Fatalf("got %d and %d legs and %d leases", len(prefill.Seen()), len(decode.Seen()), w.Local.Open())
			}
			ended := time.Now()
			if tt.leaves {
				hangUp()
				time.Sleep(cleanup.Yield / 2)
			}
			r.cut()
			if tt.stepsDown {
				synctest.Wait()
				r.server.StandBy()
			}
			time.Sleep(5 * time.Second)
			legs := prefill.Seen()
			if len(legs)-1 != tt.again || w.Local.Open() != 0 {
				t.Fatalf("prefill got %d legs again, and the coordinator holds %d leases, want %d and 0", len(legs)-1, w.Local.Open(), tt.again)
			}
			if n := w.Cleaned("prefill_again"); n != float64(tt.again) {
				t.Errorf("got %v counted clean-ups", n)
			}
			if byWorker := tt.again == 1 && taken == 0; taken > tt.again || byWorker != tt.byWorker {
				t.Errorf("the coordinator got %d clean-ups", taken)
			}
			if tt.again == 1 {
				if after := (<-arrived).Sub(ended); after < cleanup.Yield {
					t.Errorf("the leg was sent again %v after the end of the first", after)
				}
				if legs[1].Path != legs[0].Path || legs[1].Body != legs[0].Body || legs[1].Header.Get("X-Request-Id") != legs[0].Header.Get("X-Request-Id") {
					t.Errorf("the second leg differs: %s %v", legs[1].Path, legs[1].Header)
				}
			}
			hangUp()
			asked.Wait()
		})
	}
}
