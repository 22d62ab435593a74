package cleanup

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// refusal is a call that an engine has refused for lack of room.
type refusal struct {
	target   engine.Target
	at       time.Time
	requests int32 // of this proxy, in flight on the target then
}

// noteRefusal notes whether the answer of t refuses the call for lack of room. resp has no 2xx
// status.
func (c *call) noteRefusal(memory *buffer.Budget, t engine.Target, resp *upstream.Response) {
	answer, err := memory.ReadAll(resp, resp.ContentLength, buffer.MaxErrorAnswer, time.Time{}) // the context of the call limits the time
	defer answer.Free()
	if err == nil && openai.Overloaded(resp.Status, resp.Get("Retry-After"), answer.B) {
		c.refusals = append(c.refusals, refusal{t, time.Now(), t.Load[t.Rank].Requests()})
	}
}

// longestPause is the longest pause before the next round: a longer one only if all engines of the
// last round work and had no room.
func (c *call) longestPause() time.Duration {
	if c.tries > 0 && len(c.refusals) == c.tries {
		return longestFull
	}
	return longestPause
}

// rest waits for the pause between two rounds, but beyond the usual longest pause only while no
// engine that has refused the call may have room. It returns false if ctx has ended.
func (c *call) rest(ctx context.Context, pause time.Duration) bool {
	usual := min(pause, longestPause)
	for sleep(ctx, usual); pause > usual && ctx.Err() == nil && !c.mayHaveRoom(); pause -= firstPause {
		sleep(ctx, firstPause)
	}
	return ctx.Err() == nil
}

// mayHaveRoom reports whether a request has ended on an engine since it refused the call, or whether
// its next load report has no waiting request.
func (c *call) mayHaveRoom() bool {
	for i := range c.refusals {
		r := &c.refusals[i]
		load := &r.target.Load[r.target.Rank]
		said, ok := load.Reported()
		if load.Requests() < r.requests || ok && said.At.After(r.at) && said.Waiting == 0 {
			return true
		}
	}
	return false
}
