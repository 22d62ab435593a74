package attempt

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

const (
	// streamBuffer is the size of the read buffer of a stream, in bytes. It holds many events
	// and keeps few pages of memory resident.
	streamBuffer = 4 << 10
	// maxHead limits the bytes of a stream that are held until its first content. The head may
	// have the ids of the prompt's tokens, once for each choice.
	maxHead = 1 << 20
	// headHold is how long the head of an answer is held for its first content while the engine
	// sends keep-alives. An engine that fails to load the KV reports that at once.
	headHold = 5 * time.Second
	// writeCheck is how often a stream renews its write deadline.
	writeCheck = time.Second
)

var (
	errNoEnd   = errors.New("the stream ended without its closing event")
	errAborted = errors.New("the engine aborted the request")
	errNoEvent = &upstream.Error{Op: upstream.OpBody, Sent: true, Timeout: true, Err: errors.New("comments only")}
)

// relayStream writes whole events to the client as they come, with one flush per read. The
// client receives nothing before the first event that has content. If the engine reports an
// error or the end of the stream before that event, the leg has failed, and the exchange may
// retry it.
func (a *attempt) relayStream(ctx context.Context, l *leg, resp *upstream.Response) error {
	env := a.env
	buf, err := env.Memory.Get(streamBuffer)
	if err != nil {
		return l.failed(downstream.ErrMemory)
	}
	defer func() { buf.Free() }()
	if err := a.readHead(l, resp, buf); err != nil {
		return err
	}
	if err := a.awaitPrefill(ctx); err != nil {
		return err
	}
	if !resp.Commit() {
		return l.failed(&upstream.Error{Op: upstream.OpBody, Sent: true, Err: upstream.ErrEvicted})
	}
	if err := a.claimAnswer(ctx, true); err != nil {
		return err
	}
	s := streamRelay{a: a, l: l, timed: a.timed(), recounts: a.recounts(), cached: -1}
	if s.recounts && !a.both.runs() {
		s.cached = a.cachedByPrefill() // releaseRequest frees prefill's answer
	}
	a.releaseRequest()
	l.short = false
	env.Journal.AnswerBegins(l.Leg)
	if env.Journal.Span != nil {
		env.Journal.StreamBegan(env.Request.API, buf.B)
	}
	a.copyHeader(resp)
	env.begin(resp.Status)
	resp.SetIdleTimeout(time.Duration(env.Config.Timeouts.StreamIdle))

	events := &s.events
	events.Reasons = env.Journal.Span != nil
	if a.merges() || a.cutsKept() {
		events.Limit = buffer.MaxAnswer // only a whole event can be completed or cut
	}
	if env.Request.API == openai.Responses {
		events.Begin(buf.B)
	}
	first := buf
	buf = nil
	defer env.Memory.Release(first.Uncount()) // later pieces of the stream use as much at most
	err = s.pump(ctx, resp, first)
	env.Journal.Counted = events.Events
	if env.Journal.Span != nil {
		env.Journal.Finished(events)
	}
	if u, ok := events.Usage(); ok {
		if s.recounts {
			u = u.Recounted(env.Request.API, s.cachedTokens())
		}
		env.Journal.Usage = u
		env.Registry.MeasureOutput(a.p.Decode, u.Completion-1, time.Since(env.Journal.FirstByte))
	}
	return a.streamEnded(ctx, l, &s, err)
}

// streamEnded ends the client's answer after the engine's stream has ended with err.
func (a *attempt) streamEnded(ctx context.Context, l *leg, s *streamRelay, err error) error {
	events := &s.events
	if a.both.over && a.belies(err) {
		a.breakStream(ctx, events, l.failed(err))
		return err
	}
	var lost *upstream.Error // any other error means that the client has not received all events
	if err == nil || events.Done && !events.MidEvent() && errors.As(err, &lost) {
		err = s.end() // the connection broke after the last event
	}
	switch {
	case err == nil && events.Failed: // the client has received the error event
		return a.failedInside(l, "error_event", events.Status, nil, nil)
	case err == nil:
		return a.timingEvent()
	case errors.Is(err, downstream.ErrWrite):
		return err
	}
	var f *failure
	switch {
	case errors.Is(err, errAborted):
		f = a.failedInside(l, "aborted", events.Status, nil, err)
	case errors.Is(err, errNoEnd):
		f = l.failedBy("no_end", 502, err)
	case downstream.OwnFault(err):
		f = l.failed(err)
		a.env.Journal.Shed(f.Reason)
	case errors.Is(err, errMerge):
		f = l.failedBy("bad_answer", 502, err)
	default:
		f = l.failed(err)
	}
	a.breakStream(ctx, events, f)
	return f
}

// readHead reads until buf holds an event with content. The first event of the answer must come
// within the limit of the leg, even if comments come before it, and each later event within
// timeouts.stream_idle. If an error event or the end of the stream comes before any content, the
// leg has failed. An answer whose engine sends keep-alives for headHold after the first event has
// begun without content: a parser of the engine may hold the text back, or hide the reasoning.
func (a *attempt) readHead(l *leg, resp *upstream.Response, buf *buffer.Buffer) error {
	head := a.env.Request.StreamHead()
	var opened time.Time
	for {
		left := l.limit - time.Since(l.Start)
		if !opened.IsZero() {
			left = time.Duration(a.env.Config.Timeouts.StreamIdle)
		}
		if left <= 0 {
			return l.failedBy("timeout", 504, nil)
		}
		resp.SetIdleTimeout(left)
		if len(buf.B) == cap(buf.B) {
			if len(buf.B) >= maxHead {
				return nil // no head of a failed answer is this large
			}
			if err := buf.Grow(0, 2*maxHead); err != nil {
				return l.failed(downstream.ErrMemory)
			}
		}
		n, err := resp.Read(buf.B[len(buf.B):cap(buf.B)])
		buf.B = buf.B[:len(buf.B)+n]
		switch head.Read(buf.B) {
		case openai.ContentEvent:
			return nil
		case openai.ErrorEvent:
			return a.failedInside(l, "error_event", head.Status, head.Data, nil)
		case openai.EmptyAnswer:
			return a.failedInside(l, "empty_answer", head.Status, nil, nil)
		case openai.Opening:
			switch {
			case opened.IsZero():
				opened = time.Now()
				a.both.opened.Store(true)
			case err == nil && time.Since(opened) > headHold:
				return nil
			}
		}
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		} else if err != nil && !opened.IsZero() {
			a.owed.KVRead = a.claimKV()
		}
		if err != nil {
			return l.failed(err)
		}
	}
}

// streamRelay relays one stream after its first event has come.
type streamRelay struct {
	a      *attempt
	l      *leg
	events openai.EventScanner
	timed  bool // the stream ends with the engine's timing
	held   int  // bytes that are reserved for incomplete or merged events

	recounts  bool   // the usage gets the cached tokens of prefill
	cached    int64  // the cached tokens of prefill; -1: not known yet
	usages    int64  // the usage objects among the events so far
	recounted []byte // memory for recounted events
}

// cachedTokens returns the cached tokens of prefill.
func (s *streamRelay) cachedTokens() int64 {
	if s.cached < 0 {
		s.cached = s.a.cachedByPrefill()
	}
	return s.cached
}

// recount returns whole events with the cached tokens of prefill. The result is valid until the
// next call.
func (s *streamRelay) recount(events []byte) []byte {
	if !s.recounts || s.events.Usages == s.usages || len(events) == 0 {
		return events
	}
	s.usages = s.events.Usages
	s.recounted = openai.AppendRecounted(s.recounted[:0], events, s.cachedTokens())
	return s.recounted
}

// pump copies the stream: it reads the available bytes and writes the whole events among them,
// with one flush per read. first holds the bytes that have been read already; pump frees it.
func (s *streamRelay) pump(ctx context.Context, resp *upstream.Response, first *buffer.Buffer) error {
	a, env, events := s.a, s.a.env, &s.events
	// Over HTTP/2 a write deadline that has passed resets the stream, even if no write is in
	// progress. So the deadline is later than the idle time-out, which ends the stream with an
	// error event.
	idle := time.Duration(env.Config.Timeouts.StreamIdle)
	limit := max(time.Duration(env.Config.Server.WriteTimeout), idle+2*writeCheck)
	last := env.Journal.FirstByte
	renewed, lastEvent, seen := last, last, int64(0)
	env.Client.LimitWrites(limit)
	out := env.Client.Events(resp.Status, first)
	defer out.Free()
	var failed error
	use := func(chunk []byte, err error) (more bool) {
		whole := events.Feed(chunk)
		if failed = s.hold(); failed != nil {
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
		if events.Done && len(whole) > 0 { // the client would take the answer for complete
			if failed = a.awaitVerdict(ctx); failed != nil {
				return false
			}
		}
		if s.timed && events.Done {
			whole = a.cutTiming(s.l, whole)
		}
		whole = s.recount(a.cutKept(whole))
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
	resp.Each(&out, func(n int, err error) bool {
		now := time.Now()
		if n > 0 {
			env.Journal.Intervals.Observe(now.Sub(last))
			last = now
		}
		if now.Sub(renewed) > writeCheck {
			env.Client.LimitWrites(limit)
			renewed = now
		}
		return use(out.Take()[:n], err)
	})
	return failed
}

// hold reserves memory for an incomplete event and for merged events.
func (s *streamRelay) hold() error {
	n := s.events.Held() + cap(s.a.both.merged)
	if n <= s.held {
		return nil
	}
	more := n - s.held
	s.held = n
	return s.a.env.Client.Reserve(more)
}

// end ends a stream whose HTTP framing is complete. A stream without its closing event is
// incomplete nevertheless. If an incomplete event follows the last whole event, end drops it:
// the client could not use it.
func (s *streamRelay) end() error {
	a, env, events := s.a, s.a.env, &s.events
	rest := events.Finish()
	switch {
	case events.Aborted:
		return errAborted
	case !events.Done && !events.Failed && env.Request.API.Generates(): // other APIs may have no closing event
		return errNoEnd
	}
	if rest, err := a.completedEvents(rest); err != nil {
		return err
	} else if rest = s.recount(a.cutKept(rest)); len(rest) > 0 {
		if err := env.Client.Write(rest); err != nil {
			return err
		}
	}
	if events.Failed {
		env.Journal.Outcome = telemetry.OutcomeBroken
		env.Journal.Broken("error_event", nil)
	}
	return nil
}

// breakStream informs the client that the stream is broken. Between two events it sends an error
// event. If a part of an event has been sent, it aborts the connection.
func (a *attempt) breakStream(ctx context.Context, events *openai.EventScanner, f *failure) {
	env := a.env
	env.Journal.Outcome = telemetry.OutcomeBroken
	if env.Client.Gone() {
		return
	}
	e := openai.NewError(openai.CodeStreamBroken, "the engine's stream broke off; the answer is not complete")
	kind := "leg"
	if errors.Is(f, errAborted) {
		kind, e.Message = "aborted", "the engine aborted the request; the answer is not complete"
	}
	env.Journal.Broken(kind, f)
	if events.MidEvent() {
		env.Client.Cut()
		return
	}
	if errors.Is(context.Cause(ctx), downstream.ErrDraining) {
		e = downstream.Draining
	}
	env.Client.Break(env.Request.API, e, events.NextSequence())
}
