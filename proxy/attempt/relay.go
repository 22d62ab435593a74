package attempt

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// relay sends a 2xx answer to the client: a stream event by event, any other answer when the
// proxy has read all of it. If an engine dies in the middle of an answer that is no stream,
// another engine can still answer the request.
func (a *attempt) relay(ctx context.Context, l *leg, resp *upstream.Response) error {
	if a.env.Request.Stream && isStream(resp) {
		return a.relayStream(ctx, l, resp)
	}
	return a.relayWhole(ctx, l, resp)
}

// relayWhole reads the answer to its end, then writes it to the client.
func (a *attempt) relayWhole(ctx context.Context, l *leg, resp *upstream.Response) error {
	env := a.env
	answer, err := readAnswer(env.Memory, resp, buffer.MaxAnswer, l.Start.Add(a.wholeLimit(l)))
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
	if err := a.awaitPrefill(ctx); err != nil {
		return err
	}
	if err := a.awaitVerdict(ctx); err != nil {
		return err
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
	env.Journal.AnswerBegins(l.Leg)
	if env.Journal.Span != nil {
		env.Journal.Whole(env.Request.API, public)
	}
	if a.recounts() {
		public = openai.RecountCached(public, a.cachedByPrefill())
	}
	if u, ok := openai.ParseUsage(public); ok {
		env.Journal.Usage = u
		if a.p.Flow == abi.FlowAggregated {
			a.reportCached(answer.B)
		}
	} else {
		env.Journal.Counted = wholeTokens(env.Request.API, answer.B)
	}
	a.copyHeader(resp)
	a.tellTiming()
	a.keepTurn(answer.B, true)
	if env.Answering != nil {
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
	limit, _ := a.within(time.Duration(a.env.Config.Timeouts.FirstByte))
	return limit
}

// notePair reports to the pair whether the KV transfer worked, and, for a stream, how long the
// transfer took. If decode got no KV because prefill names an unknown host, that is a failure
// of the pair. Decode without KV for any other reason says nothing about the pair.
func (a *attempt) notePair(stream bool) {
	switch {
	case a.pair == nil:
	case a.p.Flow == abi.FlowPrefillFirst && a.prefill.handoff.Fallback == connector.ForeignHost:
		a.pair.Failure(connector.ForeignHost)
	case a.p.Flow == abi.FlowPrefillFirst && a.prefill.handoff.Fallback != "":
	default:
		a.pair.Success()
		if stream && !a.prefill.handed.IsZero() && !a.fresh { // the first transfer of a pair includes the handshake
			a.env.Registry.MeasurePair(a.p.Prefill, a.p.Decode, a.env.Ask.Request.PromptTokens, time.Since(a.prefill.handed))
		}
	}
}

// claimAnswer records that decode has read the KV, unless prefill has failed before. Then it
// returns the error of prefill. If stream is set, decode's answer has only begun.
func (a *attempt) claimAnswer(ctx context.Context, stream bool) error {
	if !a.claimKV() {
		<-ctx.Done() // the winner cancels this leg next
		return context.Cause(ctx)
	}
	a.owed.KVRead = true
	a.notePair(stream)
	a.p.Lease.Answered(stream)
	return nil
}

// claimKV reports whether decode has read the KV: its answer has content, or has been opened and
// the engine has reported no failure. It returns false if prefill has failed before.
func (a *attempt) claimKV() bool {
	return !a.both.runs() || a.both.winner.CompareAndSwap(0, decodeTook)
}
