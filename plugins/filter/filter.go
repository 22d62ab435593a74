package filter

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
)

// direction is one of the two ways through a stream.
type direction uint8

const (
	request direction = iota
	response
)

// filter is the state of one plugin in one stream: a stream context in one of
// its VMs. It is the host.Stream of that context.
type filter struct {
	s  *stream
	p  *Plugin
	v  *vm    // nil until the context is made
	id uint32 // of the context, 0: none

	dead     atomic.Bool // the guest is no longer called for this stream
	gone     atomic.Bool // the stream has ended
	released atomic.Bool // the plugin no longer counts this stream
	resumed  [2]atomic.Bool

	held  [3]atomic.Int64 // bytes that the host holds for the guest in this stream, by kind (see ofStream)
	freed atomic.Bool     // no bytes are held any more, and no more may be

	// v.lock guards the following fields.
	sides    [2]side
	maps     [host.HTTPResponseTrailers + 1]guestMap // the maps as passed to the guest
	called   bool                                    // the guest changed state that requires an action of the stream
	over     bool                                    // done and log run: all maps are readable
	doneSaid bool                                    // proxy_on_done was called
	waiting  bool                                    // proxy_on_done returned false, and proxy_done has not been called
}

// side is the part of one direction that the guest may access: while one of its
// callbacks runs and, if that returned Pause, until the guest calls Continue.
type side struct {
	headers, trailers *headerMap
	body              *body
	mayTrail          bool // the last body callback runs: the guest may create a trailer
	calling           bool // a callback runs
	goOn              bool // the callback called Continue
	paused            bool
}

// body is a part of a message body in transit. While a guest holds it, the
// guest may read and change it from a tick while more bytes arrive, so a body
// is safe for concurrent use. Bytes that bytes has returned are never written
// to.
type body struct {
	mu    sync.Mutex
	b     []byte // guarded by mu
	owned bool   // else b belongs to its producer; guarded by mu
}

// bytes returns the current bytes.
func (b *body) bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b
}

// keep copies the bytes, unless the body already owns them.
func (b *body) keep() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.own()
}

// own is keep for a caller that holds mu.
func (b *body) own() {
	if !b.owned {
		b.b, b.owned = append([]byte(nil), b.b...), true
	}
}

// append adds a copy of p.
func (b *body) append(p []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.own()
	b.b = append(b.b, p...)
}

// splice replaces length bytes from start.
func (b *body) splice(start, length int, value []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := make([]byte, 0, len(b.b)-length+len(value))
	out = append(out, b.b[:start]...)
	out = append(out, value...)
	b.b, b.owned = append(out, b.b[start+length:]...), true
}

// live reports whether the guest still takes part in the stream.
func (f *filter) live() bool { return f.id != 0 && !f.dead.Load() }

// has reports whether the guest has this callback and still takes part.
func (f *filter) has(c host.Callback) bool { return f.live() && f.p.has[c] }

// release ends the plugin's count of this stream, once.
func (f *filter) release() {
	if f.released.CompareAndSwap(false, true) {
		f.p.release()
	}
}

// lose handles the loss of the VM.
func (f *filter) lose() {
	if f.gone.Load() {
		f.free()
		f.release()
		return
	}
	f.s.lost(f, errGone)
	f.s.poke()
}

// end handles the end of the stream. The guest's last callbacks run in the
// background.
func (f *filter) end() {
	f.gone.Store(true)
	if f.id == 0 || f.v.dead.Load() {
		f.free()
		f.release()
		return
	}
	f.v.end(f)
}

// start makes the stream's context in a VM, and calls proxy_on_request_headers.
func (f *filter) start(headers *headerMap, end bool) (host.Action, error) {
	v, err := f.p.pick(f.s.ctx)
	if err != nil {
		return host.Continue, err
	}
	f.v = v
	began := time.Now()
	var action host.Action
	var suspicion complaint
	err = v.call(host.OnRequestHeaders, func(ctx context.Context) error {
		id, ok := v.add(f)
		if !ok {
			return errGone
		}
		f.id = id
		v.complaint = noComplaint
		err := v.guest.ContextCreate(ctx, id, rootContext)
		if err == nil {
			action, err = f.callHeaders(ctx, request, headers, end)
		}
		if v.complained(err); err != nil && v.complaint != noComplaint && !f.p.served.Load() {
			suspicion, v.suspected = v.complaint, true
			f.p.suspectBackground(suspicion)
			v.remove(id) // remove the stream before the VM is lost: the probe decides first
			f.id = 0
		}
		return err
	})
	switch {
	case err == nil:
		f.p.served.Store(true)
	case !f.p.served.Load() && f.p.inBackground(f.s.ctx):
		f.dead.Store(true)
		return host.Continue, nil
	case suspicion != noComplaint:
		f.p.failed(host.OnRequestHeaders, f.p.report(err), timeoutOf(err, began))
	}
	return action, err
}

// headers calls a header callback.
func (f *filter) headers(d direction, headers *headerMap, end bool) (action host.Action, err error) {
	c := host.OnRequestHeaders
	if d == response {
		c = host.OnResponseHeaders
	}
	if !f.has(c) {
		return host.Continue, nil
	}
	err = f.v.call(c, func(ctx context.Context) error {
		var err error
		action, err = f.callHeaders(ctx, d, headers, end)
		return err
	})
	return action, err
}

// callHeaders is headers for a caller that is inside the guest.
func (f *filter) callHeaders(ctx context.Context, d direction, headers *headerMap, end bool) (host.Action, error) {
	side := f.enter(d)
	side.headers = headers
	var action host.Action
	var err error
	if d == request {
		action, err = f.v.guest.RequestHeaders(ctx, f.id, headers.len(), end)
	} else {
		action, err = f.v.guest.ResponseHeaders(ctx, f.id, headers.len(), end)
	}
	return f.leave(side, f.headerAction(action)), err
}

// The statuses of Envoy's header and data callbacks (envoy/http/filter.h).
const (
	stopIteration host.Action = 1 // headers: hold them, deliver the body; data: buffer
	stopAll       host.Action = 4 // headers: hold everything; data has no such number
	stopDrop      host.Action = 3 // data: stop and do not keep the chunk
)

// headerAction translates the answer of a header callback. Pause holds
// everything unless the plugin is configured otherwise. Envoy's own statuses
// are used unchanged, and an undefined number is the strongest stop.
func (f *filter) headerAction(a host.Action) host.Action {
	switch {
	case a == host.Continue, a == 2: // 2: continue and end the stream, which has no use here
		return host.Continue
	case a == host.Pause && f.p.spec.HoldHeaders:
		return stopIteration
	}
	return stopAll
}

// data calls a body callback. If the guest has paused, visible contains all
// held bytes. more is the trailer that the guest created in the last callback
// of a stream without one.
func (f *filter) data(d direction, visible *body, end bool) (action host.Action, more *headerMap, err error) {
	c := host.OnRequestBody
	if d == response {
		c = host.OnResponseBody
	}
	err = f.v.call(c, func(ctx context.Context) error {
		side := f.enter(d)
		side.body, side.mayTrail = visible, end
		var a host.Action
		var err error
		if d == request {
			a, err = f.v.guest.RequestBody(ctx, f.id, len(visible.bytes()), end)
		} else {
			a, err = f.v.guest.ResponseBody(ctx, f.id, len(visible.bytes()), end)
		}
		if side.mayTrail = false; end && side.trailers != nil && side.trailers.len() > 0 {
			more = side.trailers
		}
		switch {
		case a == host.Continue, a == stopDrop:
		default:
			a = stopIteration
		}
		if action = f.leave(side, a); action != host.Continue {
			visible.keep() // the guest may change it at any time from now on
		}
		return err
	})
	return action, more, err
}

// trailers calls a trailer callback.
func (f *filter) trailers(d direction, trailers *headerMap) (action host.Action, err error) {
	c := host.OnRequestTrailers
	if d == response {
		c = host.OnResponseTrailers
	}
	if !f.has(c) {
		return host.Continue, nil
	}
	err = f.v.call(c, func(ctx context.Context) error {
		side := f.enter(d)
		side.trailers = trailers
		var a host.Action
		var err error
		if d == request {
			a, err = f.v.guest.RequestTrailers(ctx, f.id, trailers.len())
		} else {
			a, err = f.v.guest.ResponseTrailers(ctx, f.id, trailers.len())
		}
		if a != host.Continue {
			a = stopIteration
		}
		action = f.leave(side, a)
		return err
	})
	return action, err
}

// enter begins a callback of one direction. The caller holds v.lock.
func (f *filter) enter(d direction) *side {
	side := &f.sides[d]
	side.calling, side.goOn = true, false
	return side
}

// leave ends a callback and returns whether the stream stops. The caller holds
// v.lock.
func (f *filter) leave(side *side, action host.Action) host.Action {
	side.calling = false
	if side.goOn {
		action = host.Continue
	}
	side.paused = action != host.Continue
	if !side.paused {
		side.clear()
	}
	return action
}

// clear ends the guest's access to the direction.
func (s *side) clear() { s.headers, s.trailers, s.body, s.paused = nil, nil, nil, false }

// Header implements host.Stream.
func (f *filter) Header(kind host.MapKind) host.HeaderMap {
	if f.over {
		if m := f.s.finalMap(kind); m != nil {
			return readOnly{m}
		}
		return nil
	}
	var m *headerMap
	switch kind {
	case host.HTTPRequestHeaders:
		m = f.sides[request].headers
	case host.HTTPRequestTrailers:
		m = f.sides[request].trailer()
	case host.HTTPResponseHeaders:
		m = f.sides[response].headers
	case host.HTTPResponseTrailers:
		m = f.sides[response].trailer()
	}
	if m == nil {
		return nil
	}
	f.maps[kind] = guestMap{m, f}
	return &f.maps[kind]
}

// trailer returns the trailer, or creates one where that is possible.
func (s *side) trailer() *headerMap {
	if s.trailers == nil && s.mayTrail {
		s.trailers = &headerMap{plain: true}
	}
	return s.trailers
}

// sideOf returns the direction of a body.
func (f *filter) sideOf(kind host.BufferKind) *side {
	if kind == host.HTTPRequestBody {
		return &f.sides[request]
	}
	return &f.sides[response]
}

// Body implements host.Stream.
func (f *filter) Body(kind host.BufferKind) ([]byte, host.Status) {
	if b := f.sideOf(kind).body; b != nil {
		return b.bytes(), host.OK
	}
	return nil, host.NotFound
}

// SetBody implements host.Stream. InternalFailure: the plugin's budget is too
// small.
func (f *filter) SetBody(kind host.BufferKind, start, length int, value []byte) host.Status {
	b := f.sideOf(kind).body
	if b == nil {
		return host.NotFound
	}
	if !f.hold(direction(kind), int64(len(value)-length)) { // the numbers of bodies are those of the directions
		return host.InternalFailure
	}
	b.splice(start, length, value)
	return host.OK
}

// Continue implements host.Stream. It has no effect on a direction that is not
// paused.
func (f *filter) Continue(kind host.StreamKind) host.Status {
	d := request
	if kind == host.HTTPResponse {
		d = response
	}
	side := &f.sides[d]
	switch {
	case f.over:
		return host.BadArgument
	case side.calling:
		side.goOn = true
	case side.paused:
		side.clear()
		f.resumed[d].Store(true)
		f.touch()
	}
	return host.OK
}

// Close implements host.Stream: it cuts the stream in both directions.
func (f *filter) Close(host.StreamKind) host.Status {
	if f.over {
		return host.BadArgument
	}
	f.s.cut()
	f.touch()
	return host.OK
}

// LocalResponse implements host.Stream. It cuts the stream when the client has already
// received a head. BadArgument: the status is invalid, there was a local response before,
// or the stream has ended. InternalFailure: the plugin's budget is too small.
func (f *filter) LocalResponse(r *host.LocalResponse) host.Status {
	if f.over || r.Status < 200 || r.Status > 599 {
		return host.BadArgument
	}
	size := sizeOf(r.Headers).cost() + int64(len(r.Body)+len(r.Details))
	kept := !f.s.begun() // else the stream is cut, and nothing of the response is kept
	if kept && !f.hold(ofStream, size) {
		return host.InternalFailure
	}
	status := f.s.answer(func() *reply { return newReply(f, r) })
	switch {
	case status == host.OK:
		f.touch()
	case kept:
		f.letGo(ofStream, size)
	}
	return status
}

// Done implements host.Stream.
func (f *filter) Done() host.Status {
	if !f.waiting {
		return host.NotFound
	}
	f.waiting = false
	f.v.waiting--
	f.v.mu.Lock()
	f.v.ended = append(f.v.ended, f)
	f.v.mu.Unlock()
	f.v.wakeBackground()
	return host.OK
}

// touch makes the stream act on the change after the call has returned.
func (f *filter) touch() {
	if !f.called {
		f.called = true
		f.v.touched = append(f.v.touched, f)
	}
}
