package proxy

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

const (
	// streamBuffer is a stream's read buffer: many events, few resident pages.
	streamBuffer = 4 << 10
	// writeCheck is how often a stream renews the deadline of its writes.
	writeCheck = time.Second
)

var (
	errNoEnd   = errors.New("the stream ended without its closing event")
	errAborted = errors.New("the engine aborted the request")
	errNoEvent = &upstream.Error{Op: upstream.OpBody, Sent: true, Timeout: true, Err: errors.New("comments only")}
)

// relay gives the client a 2xx answer: streams as they come, all else when it
// is whole, so that an engine that dies inside it can be replaced.
func (a *attempt) relay(ctx context.Context, row *leg, resp *upstream.Response) error {
	if a.x.req.Stream && isStream(resp) {
		return a.relayStream(ctx, row, resp)
	}
	return a.relayWhole(ctx, row, resp)
}

// isStream reports whether an answer is a stream of events.
func isStream(resp *upstream.Response) bool {
	return strings.HasPrefix(strings.ToLower(resp.Get("Content-Type")), "text/event-stream")
}

// relayWhole reads the answer to its end, then writes it.
func (a *attempt) relayWhole(ctx context.Context, row *leg, resp *upstream.Response) error {
	x := a.x
	answer, err := readAnswer(x.s.memory, resp, buffer.MaxAnswer, row.Start.Add(a.wholeLimit()))
	defer func() { answer.Free() }()
	if err != nil {
		return newLegError(row.Phase, row.target, err)
	}
	if len(answer.B) == 0 {
		return &legError{phase: row.Phase, target: row.target, reason: "empty_answer", code: 502, sent: true}
	}
	if status, ok := openai.AbortStatus(x.req.API, answer.B); ok {
		return x.engineError(row, "aborted", status, answer.B)
	}
	if err := a.awaitPrefill(ctx); err != nil {
		return err
	}
	public, err := a.public(answer.B)
	if downstream.OwnFault(err) {
		return newLegError(row.Phase, row.target, err)
	}
	if err != nil {
		return &legError{phase: row.Phase, target: row.target, reason: "bad_answer", code: 502, sent: true, err: err}
	}
	if err := a.take(ctx, false); err != nil {
		return err
	}
	row.short = false
	x.journal.FirstByte(row.Leg)
	if u, ok := openai.ParseUsage(answer.B); ok {
		x.journal.Used(u)
		if a.p.Flow == abi.FlowAggregated {
			a.computed(answer.B)
		}
	}
	x.client.CopyHeader(resp)
	a.tellTiming()
	a.keepTurn(answer.B)
	return x.writeWhole(resp.Status, public)
}

// wholeLimit bounds the whole of an answer that is no stream, from the start of its
// leg. The limit of a transfer is none for that.
func (a *attempt) wholeLimit() time.Duration {
	if !a.kvBound {
		return a.limit
	}
	limit, _ := a.within(time.Duration(a.x.cfg.Timeouts.FirstByte))
	return limit
}

// take settles that decode has the KV; stream says that its answer has only
// begun. The error is prefill's: it had failed first.
func (a *attempt) take(ctx context.Context, stream bool) error {
	if !a.verdict.CompareAndSwap(0, decodeTook) {
		<-ctx.Done() // who failed it cancels this leg next
		return context.Cause(ctx)
	}
	a.orphan.KVRead = true
	a.notePair(stream)
	a.p.Lease.Answered(stream)
	return nil
}

// notePair notes what decode's answer says of the pair, and how long the transfer
// took where that can be told. Where decode was not told of any KV, it is only what
// kept it from that.
func (a *attempt) notePair(stream bool) {
	switch {
	case a.pair == nil:
	case a.p.Flow == abi.FlowPrefillFirst && a.handoff.Fallback == connector.ForeignHost:
		a.pair.Failure(connector.ForeignHost)
	case a.p.Flow == abi.FlowPrefillFirst && a.handoff.Fallback != "":
	default:
		a.pair.Success()
		if stream && !a.handed.IsZero() && !a.fresh { // else the handshake's time is in it
			a.x.s.deps.Registry.MeasurePair(a.p.Prefill, a.p.Decode, a.x.ask.Request.PromptTokens, time.Since(a.handed))
		}
	}
}

// relayStream writes whole events as they come, one flush per read. Until the
// first event that carries data the client has seen nothing: an error event
// there is a failed leg, which may be retried.
func (a *attempt) relayStream(ctx context.Context, row *leg, resp *upstream.Response) error {
	x := a.x
	buf, err := x.s.memory.Get(streamBuffer)
	if err != nil {
		return newLegError(row.Phase, row.target, downstream.ErrMemory)
	}
	defer buf.Free()
	if err := x.readFirstEvent(row, resp, buf, a.limit); err != nil {
		return err
	}
	if err := a.awaitPrefill(ctx); err != nil {
		return err
	}
	if !resp.Commit() {
		return newLegError(row.Phase, row.target, &upstream.Error{Op: upstream.OpBody, Sent: true, Err: upstream.ErrEvicted})
	}
	if err := a.take(ctx, true); err != nil {
		return err
	}
	a.releaseRequest()
	row.short = false
	x.journal.FirstByte(row.Leg)
	x.client.CopyHeader(resp)
	x.commit(resp.Status)
	resp.SetIdleTimeout(time.Duration(x.cfg.Timeouts.StreamIdle))

	var events openai.EventScanner
	if a.merge.merger != nil {
		events.Limit = buffer.MaxAnswer // they can be completed only whole
	}
	if a.timed {
		a.timing = row
	}
	err = a.pump(resp, buf, &events)
	if u, ok := events.Usage(); ok {
		x.journal.Used(u)
		x.s.deps.Registry.MeasureOutput(a.p.Decode, u.Completion-1, time.Since(x.journal.AnswerBegan()))
	}
	if err == nil || events.Done && !events.MidEvent() && !errors.Is(err, downstream.ErrWrite) {
		err = a.endStream(&events) // all was said before the connection broke
	}
	switch {
	case err == nil && events.Failed: // the client has been told
		return x.engineError(row, "error_event", events.Status, nil)
	case err == nil:
		return a.timingEvent()
	case errors.Is(err, downstream.ErrWrite):
		return err
	}
	le := newLegError(row.Phase, row.target, err)
	switch {
	case errors.Is(err, errAborted):
		le = x.engineError(row, "aborted", events.Status, nil)
		le.err = err
	case errors.Is(err, errNoEnd):
		le.reason = "no_end"
	case downstream.OwnFault(err):
		x.journal.Shed(publicError(err).Code)
	case errors.Is(err, errMerge):
		le.reason = "bad_answer"
	}
	x.breakStream(ctx, &events, le)
	return le
}

// readFirstEvent reads until an event with data is there, which must come within
// limit of the leg's start whatever comments come before. An error event is a
// failed leg with the engine's own status.
func (x *exchange) readFirstEvent(row *leg, resp *upstream.Response, buf *buffer.Buffer, limit time.Duration) error {
	for {
		left := limit - time.Since(row.Start)
		if left <= 0 {
			return &legError{phase: row.Phase, target: row.target, reason: "timeout", code: 504, sent: true}
		}
		resp.SetIdleTimeout(left)
		if len(buf.B) == cap(buf.B) {
			if len(buf.B) >= buffer.MaxErrorAnswer {
				return nil // an event as large as that is no error
			}
			if err := buf.Grow(0, 2*buffer.MaxErrorAnswer); err != nil {
				return newLegError(row.Phase, row.target, downstream.ErrMemory)
			}
		}
		n, err := resp.Read(buf.B[len(buf.B):cap(buf.B)])
		buf.B = buf.B[:len(buf.B)+n]
		switch f := openai.ReadFirstEvent(buf.B); f.Verdict {
		case openai.DataEvent:
			return nil
		case openai.ErrorEvent:
			return x.engineError(row, "error_event", f.Status, f.Data)
		}
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return newLegError(row.Phase, row.target, err)
		}
	}
}

// engineError is a leg that failed inside a 200: vLLM and SGLang report what
// happens before a stream's first token as an event with the status in it, and
// SGLang some aborts as a finish reason.
func (x *exchange) engineError(row *leg, reason string, status int, data []byte) *legError {
	e := &legError{phase: row.Phase, target: row.target, reason: reason, status: status, code: 502, sent: true}
	if status/100 == 4 {
		e.final = upstream.RequestAtFault(status)
		e.ctype = "application/json"
		x.relayed(e, data)
	}
	return e
}

// pump moves the stream: what is there is read, whole events are written, one
// flush per read. first holds what has been read already, and is the buffer
// for all that follows.
func (a *attempt) pump(resp *upstream.Response, first *buffer.Buffer, events *openai.EventScanner) error {
	x := a.x
	// Over HTTP/2 a passed deadline resets the stream even when nothing is being
	// written; so it outlives the idle time-out, which tells the client.
	idle := time.Duration(x.cfg.Timeouts.StreamIdle)
	limit := max(time.Duration(x.cfg.Server.WriteTimeout), idle+2*writeCheck)
	last := x.journal.AnswerBegan()
	renewed, lastEvent, seen := last, last, int64(0)
	x.client.LimitWrites(limit)
	out := x.client.Events(resp.Status, first.B[:cap(first.B)])
	var failed error
	use := func(chunk []byte, err error) (more bool) {
		whole := events.Feed(chunk)
		if failed = a.holdEvents(events); failed != nil {
			return false
		}
		if events.Aborted {
			whole, failed = openai.BeforeAbort(whole), errAborted
		}
		whole, merr := a.completedEvents(whole)
		if merr != nil {
			failed = merr
			return false
		}
		if a.timing != nil && events.Done {
			whole = a.cutTiming(whole)
		}
		whole = a.cutKept(whole)
		if len(whole) > 0 {
			if failed = out.Write(whole, resp.Ended()); failed != nil {
				return false
			}
		}
		if err != nil {
			if err != io.EOF && failed == nil {
				failed = err
			}
			return false
		}
		if events.Events != seen {
			seen, lastEvent = events.Events, last
		} else if last.Sub(lastEvent) > idle {
			failed = errNoEvent // an engine that hangs may still send comments
		}
		return failed == nil
	}
	if !use(first.B, nil) {
		return failed
	}
	resp.Each(out.Space(), func(n int, err error) bool {
		now := time.Now()
		if n > 0 {
			x.journal.Read(now.Sub(last))
			last = now
		}
		if now.Sub(renewed) > writeCheck {
			x.client.LimitWrites(limit)
			renewed = now
		}
		return use(out.Space()[:n], err)
	})
	return failed
}

// holdEvents counts the memory that takes part of an event, or its completion.
func (a *attempt) holdEvents(events *openai.EventScanner) error {
	n := events.Held() + cap(a.merge.buf)
	if n <= a.held {
		return nil
	}
	more := n - a.held
	a.held = n
	return a.x.client.Reserve(more)
}

// endStream closes a stream whose framing ended in order. One that lacks its
// closing event was cut off all the same, and half an event behind the whole
// ones is of no use to the client.
func (a *attempt) endStream(events *openai.EventScanner) error {
	x := a.x
	rest := events.Finish()
	switch {
	case events.Aborted:
		return errAborted
	case !events.Done && !events.Failed:
		return errNoEnd
	}
	if rest, err := a.completedEvents(rest); err != nil {
		return err
	} else if rest = a.cutKept(rest); len(rest) > 0 {
		if err := x.client.Write(rest); err != nil {
			return err
		}
	}
	if events.Failed {
		x.journal.Ends(telemetry.OutcomeBroken)
		x.journal.Broken("error_event", nil)
	}
	return nil
}

// breakStream tells the client that the stream is broken: an error event on an
// event border, or, inside an event that is half out, a cut connection.
func (x *exchange) breakStream(ctx context.Context, events *openai.EventScanner, le *legError) {
	x.journal.Ends(telemetry.OutcomeBroken)
	if x.client.Gone() {
		return
	}
	e := &openai.Error{Status: 502, Type: "upstream_error", Code: "stream_broken", Message: "the engine's stream broke off; the answer is not complete"}
	kind := "leg"
	if errors.Is(le, errAborted) {
		kind, e.Message = "aborted", "the engine aborted the request; the answer is not complete"
	}
	x.journal.Broken(kind, le)
	if events.MidEvent() {
		x.client.Cut()
		return
	}
	if errors.Is(context.Cause(ctx), downstream.ErrDraining) {
		e = downstream.Draining
	}
	x.client.Break(x.req.API, e)
}
