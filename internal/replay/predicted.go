package replay

import (
	"math"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/state/predict"
)

// predicted counts the predictions of times to first token.
type predicted struct{ all, near int }

// add compares a real time to first token with the prediction of the placement.
func (p *predicted) add(l *lease, first time.Duration) {
	start := l.stream.Said()
	if l.prompt.Said() == 0 || start == 0 {
		return
	}
	p.all++
	real := float64(first) / float64(time.Microsecond)
	if math.Abs(l.prompt.Said()+start-real) <= predict.Near*real {
		p.near++
	}
}

// share returns the share of near predictions; nil without predictions.
func (p *predicted) share() *float64 {
	if p.all == 0 {
		return nil
	}
	s := float64(p.near) / float64(p.all)
	return &s
}

// engine returns the models of row i.
func (v *view) engine(i int) *predict.Engine {
	if i < len(v.targets)-v.cfg.Decode {
		return &v.prefill
	}
	return &v.decode
}

// follow begins to measure the legs of a decision.
func (v *view) follow(q *Request, l *lease, d abi.PlaceDecision, now time.Duration) {
	p, t := &v.facts.Candidates[d.Prefill], &v.facts.Candidates[d.Decode]
	l.prompt = v.targets[d.Prefill].queue.Begin(&v.prefill, promptOf(q, p), streamsOf(p), epoch.Add(now))
	l.stream = v.decode.Stream(promptOf(q, t), streamsOf(t))
}

func promptOf(q *Request, c *abi.Candidate) predict.Prompt {
	return predict.Prompt{Tokens: int64(q.InputLength), Cached: c.Matched()}
}

// streamsOf returns the streams of a candidate: a prefill rank has none.
func streamsOf(c *abi.Candidate) predict.Streams {
	if c.Roles&abi.RoleDecode == 0 {
		return predict.Streams{}
	}
	return predict.Streams{Requests: int64(c.Requests), Tokens: c.Tokens}
}
