package cleanup

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// PrefillLinger is how long the proxy waits for the answer of a prefill whose client has left, if
// the proxy needs the answer to free the blocks and prefill may be near its end. A prefill of one
// step cannot be stopped. A vLLM that finishes it after the connection was closed holds the blocks
// for its whole lease (8 to 23 % of short prompts, conformance/real/README.md).
const PrefillLinger = 2 * time.Second

// Late is a prefill leg that was given up because its engine does not respond, and what
// its clean-up needs. It refers to no memory of the request but Body.
type Late struct {
	Leg       *upstream.Detached
	Connector connector.Connector
	Attempt   connector.Attempt // its Request refers to Body
	Orphan    connector.Orphan
	Body      *buffer.Buffer // AwaitLate frees it
	Job       *Job           // without calls
	// Ended is called when the leg has ended: the engine has answered, or AwaitLate has closed
	// the connection. served: the whole answer has come and has a 2xx status. May be nil.
	Ended func(served bool)
}

// AwaitLate waits in the background for the answer that the engine gives when it responds
// again. Then it makes the engines free the blocks that they hold.
func (r *Runner) AwaitLate(l *Late) {
	r.running.Go(func() {
		defer l.Body.Free()
		ctx, cancel := context.WithTimeout(r.ctx, max(l.Job.Prompt, 2*PrefillLinger)) // the engine may answer soon, even if timeouts.prefill is short
		defer cancel()
		failed := l.Job.Since
		if d, ok := l.Connector.(connector.Deferrer); !ok || !d.Defers() {
			r.running.Go(func() { // waits as long as for a leg whose client has left: the engine aborts the request
				awaitRecovery(ctx, l.Attempt.Prefill)
				// After a cut of a link, TCP may wait as long as the cut lasted before it sends
				// lost packets again.
				sleep(ctx, PrefillLinger+time.Since(failed))
				cancel()
			})
		}
		served := false
		if resp, err := l.Leg.Await(ctx); err == nil {
			var answer *buffer.Buffer
			answer, served = l.read(r.Memory, resp)
			defer answer.Free()
		}
		if l.Ended != nil {
			l.Ended(served)
		}
		l.Job.Since = time.Now() // no block could be freed before
		l.Job.Add(l.Connector.Cleanup(&l.Attempt, l.Orphan), l.Attempt.Prefill, l.Attempt.Decode)
		if !l.Job.Empty() {
			r.Start(l.Job)
		}
	})
}

// read reads the answer, and closes the connection. Orphan refers to the memory of the answer
// afterwards. served is that of Ended.
func (l *Late) read(memory *buffer.Budget, resp *upstream.Response) (answer *buffer.Buffer, served bool) {
	defer resp.Close()
	answer, err := memory.ReadAll(resp, resp.ContentLength, buffer.MaxAnswer, time.Time{}) // ctx limits the time
	switch {
	case err != nil:
	case resp.Status/100 != 2:
		l.Orphan.Refused = true
	default:
		served = true
		if handoff, err := l.Connector.ReadPrefill(&l.Attempt, answer.B); err == nil {
			l.Orphan.PrefillDone, l.Orphan.Handoff = true, &handoff
		}
	}
	return answer, served
}
