package attempt

import (
	"context"
	"fmt"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// relayWhole reads the answer to its end, then writes it to the client.
func (a *attempt) relayWhole(ctx context.Context, l *leg, resp *upstream.Response) error {
	env := a.env
	answer, err := readAnswer(env.Memory, resp, l.Start.Add(a.wholeLimit(l)))
	defer func() { answer.Free() }()
	if err != nil {
		return l.failed(err)
	}
	if len(answer.B) == 0 && env.Request.API != openai.EngineRoute {
		return l.failedBy("empty_answer", 502, nil)
	}
	if reason, status := openai.WholeFailure(env.Request.API, answer.B); reason != "" {
		return a.failedInside(l, reason, status, answer.B, nil)
	}
	if a.both.merger != nil {
		if err := a.awaitPrefill(ctx); err != nil {
			return err
		}
	}
	if a.concurrent {
		if err := a.awaitVerdict(ctx); err != nil {
			return err
		}
	}
	if a.p.Decode.IsRemote() && !isJSONObject(answer.B) {
		return l.failedBy("bad_answer", 502, nil)
	}
	if err := a.claimAnswer(ctx, false); err != nil {
		return err
	}
	public, err := a.public(answer.B)
	if err != nil {
		a.keepTurn(answer.B, false)
	}
	if downstream.OwnFault(err) {
		return l.failed(err)
	}
	if err != nil {
		return l.failedBy("bad_answer", 502, err)
	}
	l.short = false
	return a.answerWhole(l, resp, answer.B, public)
}

// answerWhole records decode's whole answer, and sends its public form to the client.
func (a *attempt) answerWhole(l *leg, resp *upstream.Response, answer, public []byte) error {
	env := a.env
	env.Journal.AnswerBegins(&l.Leg)
	if env.Journal.Span != nil {
		env.Journal.Whole(env.Request.API, public)
	}
	if a.recounts() {
		public = openai.RecountCached(public, a.cachedByPrefill())
	}
	if u, ok := openai.ParseUsage(public); ok {
		env.Journal.Usage = u
		if a.p.Flow == abi.FlowAggregated && a.p.Matched >= 0 {
			a.reportCached(answer)
		}
	} else {
		env.Journal.Counted = wholeTokens(env.Request.API, answer)
	}
	if a.p.Decode.IsRemote() {
		a.copyRemoteHeader(resp)
	} else {
		env.Client.CopyHeader(resp)
	}
	if a.c.TRTLLM.PerfMetrics {
		a.tellTiming()
	}
	a.keepTurn(answer, true)
	if env.Answering != nil {
		env.reached = true // the attempt has not ended yet
		env.Answering()
	}
	return env.Answer(resp.Status, public)
}

// wholeTokens returns the estimated tokens of an answer without usage: a quarter of its bytes.
func wholeTokens(api openai.API, answer []byte) int64 {
	if !api.Generates() {
		return 0
	}
	return int64(len(answer)+3) / 4
}

// wholeLimit returns how long an answer that is no stream may take, from the start of its leg
// to its last byte. The limit of the KV transfer does not apply: the proxy cannot see when
// the transfer of such an answer has ended.
func (a *attempt) wholeLimit(l *leg) time.Duration {
	if !l.kvBound {
		return l.limit
	}
	limit := time.Duration(a.env.Config.Timeouts.FirstByte)
	if !a.deadline.IsZero() {
		limit, _ = a.within(limit)
	}
	return limit
}

// public returns the client's form of decode's whole answer, completed with prefill's answer if
// necessary. The error satisfies downstream.OwnFault or wraps errMerge.
func (a *attempt) public(answer []byte) ([]byte, error) {
	public := a.conn.Public(&a.c, answer)
	room := 0
	if len(public) != len(answer) { // it is a copy
		room = len(public)
	}
	if a.both.merger != nil {
		room += len(public) + len(a.prefill.answer.B)
	}
	if err := a.env.Client.Reserve(room); err != nil {
		return nil, err
	}
	if a.both.merger == nil {
		return public, nil
	}
	whole, err := a.both.merger.Merge(nil, &a.prefill.handoff, public, false)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errMerge, err)
	}
	return whole, nil
}
