package attempt

import (
	"context"
	"errors"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// broken notes that the stream has ended with err before its end, and returns the failure of the
// leg.
func (s *streamRelay) broken(err error) error {
	a, l, events := s.a, s.l, &s.events
	switch {
	case a.both.over && a.belies(err):
		s.noteBroken(l.failed(err), true)
		return err
	case errors.Is(err, downstream.ErrWrite):
		return err
	}
	var f *failure
	final := false
	switch {
	case errors.Is(err, errAborted):
		f = a.failedInside(l, "aborted", events.Status, nil, err)
	case errors.Is(err, errErrorEvent):
		f = a.failedInside(l, "error_event", events.Status, nil, nil)
	case errors.Is(err, errNoEnd):
		f = l.failedBy("no_end", 502, err)
	case errors.Is(err, errOtherText):
		f = l.failedBy("other_text", 502, err)
		f.Permanent = true // the engine works
	case downstream.OwnFault(err):
		f, final = l.failed(err), true
		a.env.Journal.Shed(f.Reason)
	case errors.Is(err, errMerge):
		f, final = l.failedBy("bad_answer", 502, err), true
	default:
		f = l.failed(err)
	}
	s.noteBroken(f, final || f.Permanent)
	return f
}

// noteBroken notes how the client's stream ends if no engine goes on.
func (s *streamRelay) noteBroken(f *failure, final bool) {
	b := &Broken{kind: "leg", err: f, mid: s.events.MidEvent(), sequence: s.events.NextSequence(), Final: final}
	b.public = *openai.NewError(openai.CodeStreamBroken, "the engine's stream broke off; the answer is not complete")
	switch {
	case errors.Is(f, errAborted):
		b.kind, b.public.Message = "aborted", "the engine aborted the request; the answer is not complete"
	case len(s.withheld) > 0:
		b.kind, b.err, b.withheld = "error_event", nil, s.withheld
	}
	s.a.env.broken = b
}

// Broken is a stream that has broken off between two events, before its end. The client waits for
// the rest of the stream, or for its end.
type Broken struct {
	Final bool // no engine may go on: the text that the client has may be wrong, or the request is at fault

	kind     string       // label of pdproxy_broken_streams_total
	err      error        // for the log; nil: none
	public   openai.Error // that the client gets
	withheld []byte       // the engine's error event, which the client gets instead; empty: none
	told     bool         // the client has the engine's error event already
	mid      bool         // a part of an event has been sent
	sequence int64        // of the error event in a responses stream
}

// Stopped returns the error for the client of a request that this proxy has stopped, because it shuts
// down or because a request of a higher class needs its place; nil: it has not.
func (env *Env) Stopped() *openai.Error {
	cause := context.Cause(env.Context)
	if errors.Is(cause, downstream.ErrDraining) {
		return downstream.Draining
	}
	var e *openai.Error
	errors.As(cause, &e)
	return e
}

// evicted reports whether the proxy has ended the request for one of a higher class.
func (env *Env) evicted() bool {
	e := env.Stopped()
	return e != nil && e.Code == openai.CodeEvicted
}

// EndBroken ends the client's stream that has broken off. Between two events it sends an error
// event, which has reason, why no other engine went on; "" for none. If a part of an event has been
// sent, it cuts the connection.
func (env *Env) EndBroken(b *Broken, reason string) {
	env.Journal.Outcome = telemetry.OutcomeBroken
	if b.told {
		env.Journal.Broken(b.kind, nil)
		return
	}
	if env.Client.Gone() {
		return
	}
	if e := env.Stopped(); e != nil {
		b.public, b.withheld = *e, nil
		if env.evicted() {
			b.kind, b.err = e.Code.String(), nil // no engine has failed
		}
	}
	env.Journal.Broken(b.kind, b.err)
	switch {
	case b.mid:
		env.Client.Cut()
	case len(b.withheld) > 0:
		_ = env.Client.Write(openai.WithNotContinued(b.withheld, reason)) // the client may have left
	default:
		b.public.NotContinued = reason
		env.Client.Break(env.Request.API, &b.public, b.sequence)
	}
}
