package attempt

import (
	"bytes"
	"context"
	"errors"
	"io"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/continuation"
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
	// maxWithheld limits the bytes of an engine's error event, and of those behind it, that are held
	// until another engine goes on with the stream. The client gets longer ones at once.
	maxWithheld = 64 << 10
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
	k, continues := env.Kept, env.Client.Begun()
	if continues && !k.meets(env.Request.API) {
		k.Lose(continuation.Prompt)
		f := l.failedBy("other_prompt", 502, nil)
		f.Permanent = true
		return f
	}
	if a.both.merger != nil {
		if err := a.awaitPrefill(ctx); err != nil {
			return err
		}
	}
	if !resp.Commit() {
		return l.failed(&upstream.Error{Op: upstream.OpBody, Sent: true, Err: upstream.ErrEvicted})
	}
	if err := a.claimAnswer(ctx, true); err != nil {
		return err
	}
	s := streamRelay{ctx: ctx, a: a, l: l, resp: resp, timed: a.c.TRTLLM.PerfMetrics, recounts: a.recounts(), cached: -1}
	s.cuts = a.p.Decode.Spec.Bidirectional && !a.p.Prefill.IsZero() && !a.c.Trust
	if s.kept = k; k != nil && !continues {
		k.begin(env.Client, env.Request)
		k.beginTurn(env)
	}
	s.edits = s.timed || s.cuts || a.concurrent || k != nil
	if s.recounts && !a.concurrent {
		s.cached = a.cachedByPrefill() // releaseRequest frees prefill's answer
	}
	a.releaseRequest()
	l.short = false
	env.Journal.AnswerBegins(&l.Leg)
	if !continues {
		a.beginAnswer(resp, buf.B)
	}
	if k != nil {
		k.open.Store(isOpen)
		resp.Uncommit()
	}
	resp.SetIdleTimeout(time.Duration(env.Config.Timeouts.StreamIdle))

	s.events.Reasons = env.Journal.Span != nil
	if a.both.merger != nil || s.cuts || k != nil {
		s.events.Limit = buffer.MaxAnswer // only a whole event can be completed or cut
	}
	if env.Request.API == openai.Responses {
		s.events.Begin(buf.B)
	}
	first := buf
	buf = nil
	defer env.Memory.Release(first.Uncount()) // later pieces of the stream use as much at most
	return s.end(s.pump(first))
}

// beginAnswer sends the head of the client's answer, whose stream begins with head.
func (a *attempt) beginAnswer(resp *upstream.Response, head []byte) {
	env := a.env
	if env.Journal.Span != nil {
		env.Journal.StreamBegan(env.Request.API, head)
	}
	if a.p.Decode.IsRemote() {
		a.copyRemoteHeader(resp)
	} else {
		env.Client.CopyHeader(resp)
	}
	env.note(resp.Status)
	env.Client.Begin(resp.Status) // the request cannot begin anew afterwards
}

// readHead reads until buf holds an event with content. The first event of the answer must come
// within the limit of the leg, even if comments come before it, and each later event within
// timeouts.stream_idle. If an error event or the end of the stream comes before any content, the
// leg has failed. An answer whose engine sends keep-alives for headHold after the first event has
// begun without content: a parser of the engine may hold the text back, or hide the reasoning.
func (a *attempt) readHead(l *leg, resp *upstream.Response, buf *buffer.Buffer) error {
	head := a.env.Request.StreamHead()
	most := maxHead
	if k := a.env.Kept; k != nil {
		k.restart()
		most += 8 * k.Limit // the client's head has no token ids, but this one has
	}
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
			if len(buf.B) >= most {
				return nil // no head of a failed answer is this large
			}
			if err := buf.Grow(0, 2*most); err != nil {
				return l.failed(downstream.ErrMemory)
			}
		}
		n, err := resp.Read(buf.B[len(buf.B):cap(buf.B)])
		buf.B = buf.B[:len(buf.B)+n]
		if k := a.env.Kept; k != nil {
			k.take(a.env.Client, buf) // the classification then reads a short event
		}
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
			a.kvRead = !a.concurrent || a.claimKV()
		}
		if err != nil {
			return l.failed(err)
		}
	}
}

// releaseRequest frees the memory that an open stream does not need: the client's request, the
// body of the leg, and prefill's answer.
func (a *attempt) releaseRequest() {
	a.env.ReleaseBody()
	a.c.PromptIDs = nil
	a.legBody.Free()
	a.legBody = nil
	if !a.concurrent { // a concurrent prefill may answer later
		a.prefill.answer.Free()
		a.prefill.answer, a.prefill.handoff, a.prefill.read = nil, connector.Handoff{}, false
	}
}

// streamRelay relays one stream after its first event has come. It is the Sink of the stream: it
// writes the whole events of each piece, with one flush.
type streamRelay struct {
	downstream.Events // lends the memory of the pieces

	ctx    context.Context
	a      *attempt
	l      *leg
	resp   *upstream.Response
	events openai.EventScanner
	held   int // bytes that are reserved for incomplete or merged events

	intervals *telemetry.Intervals
	last      time.Time // when the last piece came
	lastEvent time.Time // when the last piece with an event came
	seen      int64     // the events at that time
	failed    error     // why the relay has ended before the stream; nil: it has not
	withheld  []byte    // the engine's error event, which the client gets if no engine goes on

	kept *Kept // what is kept of the stream; nil: nothing

	edits bool // edited must see the events
	timed bool // the stream ends with the engine's timing
	cuts  bool // the stream may have parameters of retained KV that the client must not get

	recounts  bool   // the usage gets the cached tokens of prefill
	cached    int64  // the cached tokens of prefill; -1: not known yet
	usages    int64  // the usage objects among the events so far
	recounted []byte // memory for recounted events
}

// pump copies the stream. first holds the bytes that have been read already; pump frees it.
func (s *streamRelay) pump(first *buffer.Buffer) error {
	journal := s.a.env.Journal
	s.last, s.lastEvent, s.intervals = journal.FirstByte, journal.FirstByte, &journal.Intervals
	s.Events = s.a.env.Client.Events(first)
	defer s.Free()
	if s.kept != nil && s.kept.splicer != nil {
		s.last = time.Now()
		s.lastEvent = s.last
	}
	s.RenewWrites(s.last)
	if s.relay(first.B, nil) {
		if cap(first.B) > 2*streamBuffer { // of a long head
			s.Free()
		}
		s.resp.Each(s)
	}
	return s.failed
}

// Use implements upstream.Sink.
func (s *streamRelay) Use(n int, at time.Time, err error) (more bool) {
	if n > 0 {
		s.intervals.Observe(at.Sub(s.last))
		s.last = at
	}
	s.RenewWrites(at)
	return s.relay(s.Take()[:n], err)
}

// relay writes the whole events after the next piece, and notes the error that ends the stream.
func (s *streamRelay) relay(piece []byte, err error) (more bool) {
	whole, named := s.events.Feed(piece), s.a.streamed != nil
	var werr error
	if n := s.events.Held() + cap(s.a.both.merged); n > s.held {
		werr = s.hold(n)
	}
	switch {
	case s.events.Aborted:
		whole, s.failed = openai.BeforeFailure(whole, false), errAborted
	case s.events.Failed && s.kept != nil && s.kept.Reason == "":
		whole = s.withhold(whole)
	}
	if len(whole) > 0 && werr == nil && (s.edits || s.recounts && s.events.Usages != s.usages) {
		whole, werr = s.edited(whole)
	}
	if len(whole) > 0 && werr == nil {
		if werr = s.Write(whole, s.resp.Ended()); werr != nil && !named && s.a.streamed != nil {
			s.a.recallTurn()
		}
	}
	switch {
	case werr != nil:
		s.failed = werr
	case err != nil:
		if err != io.EOF && s.failed == nil {
			s.failed = err
		}
	case s.events.Events != s.seen:
		s.seen, s.lastEvent = s.events.Events, s.last
		if sent := s.a.env.Sent; sent != nil {
			sent.Store(s.seen)
		}
	case s.last.Sub(s.lastEvent) > time.Duration(s.a.env.Config.Timeouts.StreamIdle):
		s.failed = errNoEvent // an engine that hangs may still send comments
	}
	return err == nil && s.failed == nil
}

// withhold holds the engine's error event in whole events, and returns those before it. If the error event
// is too long, or its memory is missing, withhold returns all events, and no engine goes on.
func (s *streamRelay) withhold(whole []byte) []byte {
	before := openai.BeforeFailure(whole, true)
	held := whole[len(before):]
	if len(held) > maxWithheld || s.a.env.Client.Reserve(3*len(held)) != nil { // EndBroken makes two more copies
		s.kept.Lose(continuation.Refused)
		return whole
	}
	s.withheld, s.failed = bytes.Clone(held), errErrorEvent
	return before
}

// edited returns whole events as the client gets them. The result is valid until the next call.
func (s *streamRelay) edited(whole []byte) ([]byte, error) {
	a := s.a
	var err error
	if a.both.merger != nil {
		if whole, err = a.completedEvents(whole); err != nil {
			return nil, err
		}
	}
	if a.concurrent && s.events.Done { // the client would take the answer for complete
		if err = a.awaitVerdict(s.ctx); err != nil {
			return nil, err
		}
	}
	if s.timed && s.events.Done {
		whole = a.cutTiming(s.l, whole)
	}
	if s.cuts {
		whole = a.cutKept(whole)
	}
	if s.recounts && s.events.Usages != s.usages && len(whole) > 0 {
		s.usages = s.events.Usages
		s.recounted = openai.AppendRecounted(s.recounted[:0], whole, s.cachedTokens())
		whole = s.recounted
	}
	if s.kept != nil {
		var began bool
		if whole, began, err = s.kept.relay(whole); began {
			gap := time.Since(s.kept.Last)
			s.intervals.Observe(gap)
			a.env.Journal.Continued(int(s.kept.splicer.Kept), gap)
		}
	}
	if err == nil && a.streamed != nil {
		a.storeStreamed()
	}
	return whole, err
}

// cachedTokens returns the cached tokens of prefill.
func (s *streamRelay) cachedTokens() int64 {
	if s.cached < 0 {
		s.cached = s.a.cachedByPrefill()
	}
	return s.cached
}

// hold reserves memory so that it is n bytes for incomplete and merged events.
func (s *streamRelay) hold(n int) error {
	more := n - s.held
	s.held = n
	return s.a.env.Client.Reserve(more)
}

// end ends the client's answer after the engine's stream has ended with err. A stream without its
// closing event is incomplete, even if its HTTP framing is complete. If an incomplete event follows
// the last whole event, end drops it: the client could not use it.
func (s *streamRelay) end(err error) error {
	a, env, events := s.a, s.a.env, &s.events
	env.Journal.Counted += events.Events
	if s.kept != nil && (s.kept.splicer == nil || s.kept.began) {
		s.kept.Last = s.lastEvent
	}
	if env.Journal.Span != nil {
		env.Journal.Finished(events)
	}
	if u, ok := events.Usage(); ok {
		if s.recounts {
			u = u.Recounted(env.Request.API, s.cachedTokens())
		}
		env.Registry.MeasureOutput(a.p.Decode, u.Completion-1, time.Since(s.l.FirstByte()))
		if s.kept != nil {
			u = s.kept.usage(u)
		}
		env.Journal.Usage = u
	}
	// A connection that broke after the last event has lost nothing. Any error of another type means
	// that the client has not received all events.
	if err == nil || events.Done && !events.MidEvent() && isLost(err) {
		rest := events.Finish()
		switch {
		case events.Aborted:
			err = errAborted
		case !events.Done && !events.Failed && env.Request.API.Generates(): // other APIs may have no closing event
			err = errNoEnd
		default:
			if err = nil; len(rest) > 0 {
				if rest, err = s.edited(rest); err == nil && len(rest) > 0 {
					err = env.Client.Write(rest)
				}
			}
		}
	}
	switch {
	case err != nil:
		return s.broken(err)
	case events.Failed: // the client has received the error event
		env.broken = &Broken{kind: "error_event", told: true, Final: true}
		return a.failedInside(s.l, "error_event", events.Status, nil, nil)
	case s.timed && a.asksTiming():
		return a.timingEvent()
	case s.cuts:
		a.notNamed()
	}
	return nil
}

// isLost reports whether err is an error of the connection.
func isLost(err error) bool {
	_, ok := errors.AsType[*upstream.Error](err)
	return ok
}
