package filter

import (
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// flow is one direction of a stream: headers, data and trailers on their way
// from a source through hops to a sink. It is a state machine without a
// goroutine: the caller that delivers data runs it, under the direction's lock.
// Data that a hop stops waits there until resumeAll sends it on.
type flow struct {
	s    *stream
	d    direction
	hops []hop // in the order of travel
	sink sink

	headers  *headerMap
	trailers *headerMap // nil while there are none
	signal   chan struct{}
	limit    int64
	counted  int64 // bytes that limits.Memory counts

	begun  bool // the headers have entered the flow
	headed bool // the headers have reached the sink
	ended  bool // the sink has received everything
}

// sink is where a flow ends.
type sink interface {
	headers(end bool)
	data(b []byte, end bool)
	trailers(t *headerMap)
}

// hop is one filter of a flow, and the data that it holds back.
type hop struct {
	f       *filter
	stop    host.Action // Continue, stopIteration or stopAll
	passed  bool        // the headers have passed it
	headEnd bool        // the headers ended the stream
	held    *body
	size    int64 // bytes that arrived while the hop held
	dataEnd bool  // the end of the data is held
	trailed bool  // the trailers are held
	told    bool  // the guest has seen the trailers
}

// count counts the bytes that the flow holds, plus rest. The stream fails if
// there is no memory for them.
func (w *flow) count(rest int) {
	memory := w.s.limits.Memory
	if memory == nil {
		return
	}
	now := int64(rest)
	for i := range w.hops {
		if held := w.hops[i].held; held != nil {
			now += int64(len(held.bytes()))
		}
	}
	switch more := now - w.counted; {
	case more < 0:
		memory.Release(-more)
	case more > 0 && !memory.Take(more):
		w.s.fail(newFailure(openai.CodeMemoryLimit, "the memory of the proxy for requests and answers is used up"))
		return
	}
	w.counted = now
}

// release subtracts the counted bytes, at the end of the stream.
func (w *flow) release() {
	if w.counted > 0 {
		w.s.limits.Memory.Release(w.counted)
		w.counted = 0
	}
}

// begin sends the headers into the flow. end: no data follows.
func (w *flow) begin(end bool) {
	w.begun = true
	w.headersFrom(0, end)
}

// failed handles the error of a hop's callback and reports whether the flow
// ends here.
func (w *flow) failed(h *hop, err error) bool {
	if err != nil {
		w.s.lost(h.f, err)
	}
	return w.s.interrupted()
}

// headersFrom passes the headers on, starting at hop i.
func (w *flow) headersFrom(i int, end bool) {
	for ; i < len(w.hops); i++ {
		h := &w.hops[i]
		action, err := w.callHeaders(h.f, end)
		if w.failed(h, err) {
			return
		}
		if action != host.Continue && err == nil {
			h.stop, h.headEnd = action, end
			return
		}
		h.passed = true
	}
	w.headed = true
	w.ended = end
	w.sink.headers(end)
}

func (w *flow) callHeaders(f *filter, end bool) (host.Action, error) {
	if w.d == request {
		return f.start(w.headers, end)
	}
	return f.headers(response, w.headers, end)
}

// dataFrom passes a chunk on, starting at hop i. It may use b only during the call. end:
// b is the last chunk and no trailers follow.
func (w *flow) dataFrom(i int, b []byte, end bool) {
	chunk := &body{b: b}
	for ; i < len(w.hops); i++ {
		h := &w.hops[i]
		if h.stop == stopAll {
			h.keep(chunk, end)
			return
		}
		if h.held != nil { // the guest sees all held data
			if h.size += int64(len(chunk.bytes())); h.size > w.limit {
				w.s.tooLarge(w.d)
				return
			}
			h.held.append(chunk.bytes())
			chunk = h.held
		}
		action, more, err := w.callData(h, chunk, end)
		if w.failed(h, err) {
			return
		}
		if action != host.Continue && err == nil {
			w.stopData(h, action, chunk, end, more)
			return
		}
		h.held, h.size = nil, 0
		if h.stop != host.Continue {
			h.stop = host.Continue
			if !h.passed {
				h.passed = true
				if w.headersFrom(i+1, false); w.s.interrupted() {
					return
				}
			}
		}
		if more != nil { // the guest created a trailer: the data does not end the stream
			w.trailers = more
			if w.dataFrom(i+1, chunk.bytes(), false); !w.s.interrupted() {
				w.trailersFrom(i + 1)
			}
			return
		}
	}
	w.ended = end
	w.sink.data(chunk.bytes(), end)
}

func (w *flow) callData(h *hop, chunk *body, end bool) (host.Action, *headerMap, error) {
	c := host.OnRequestBody
	if w.d == response {
		c = host.OnResponseBody
	}
	if !h.f.has(c) {
		return host.Continue, nil, nil
	}
	return h.f.data(w.d, chunk, end)
}

// keep adds a chunk that the guest has not seen to the held data.
func (h *hop) keep(chunk *body, end bool) {
	if h.held == nil {
		h.held = &body{owned: true}
	}
	h.held.append(chunk.bytes())
	h.size += int64(len(chunk.bytes()))
	h.dataEnd = h.dataEnd || end
}

// stopData holds the data that the guest has stopped.
func (w *flow) stopData(h *hop, action host.Action, chunk *body, end bool, more *headerMap) {
	h.stop = stopIteration
	if more != nil {
		w.trailers = more
		h.trailed, h.told = true, true
		end = false
	}
	h.dataEnd = end
	if action == stopDrop {
		h.held, h.size = nil, 0
		return
	}
	if h.held == nil {
		h.held, h.size = chunk, int64(len(chunk.bytes()))
	}
	if h.size > w.limit {
		w.s.tooLarge(w.d)
	}
}

// trailersFrom passes the trailers on, starting at hop i.
func (w *flow) trailersFrom(i int) {
	for ; i < len(w.hops); i++ {
		h := &w.hops[i]
		if h.stop == stopAll {
			h.trailed = true
			return
		}
		action, err := h.f.trailers(w.d, w.trailers)
		if w.failed(h, err) {
			return
		}
		if action != host.Continue && err == nil {
			h.stop, h.trailed, h.told = stopIteration, true, true
			return
		}
		if h.stop != host.Continue { // the hop releases everything
			h.trailed, h.told = true, true
			w.resume(i)
			return
		}
	}
	w.ended = true
	w.sink.trailers(w.trailers)
}

// resume sends on the data that hop i holds. If the data was stopped together
// with the headers, that hop itself still has to see it.
func (w *flow) resume(i int) {
	h := &w.hops[i]
	was := *h
	h.stop, h.held, h.size, h.dataEnd, h.trailed, h.told = host.Continue, nil, 0, false, false, false
	if !h.passed {
		h.passed = true
		if w.headersFrom(i+1, h.headEnd); w.s.interrupted() {
			return
		}
	}
	next := i + 1
	if was.stop == stopAll {
		next = i
	}
	if was.held != nil || was.dataEnd {
		var b []byte
		if was.held != nil {
			b = was.held.bytes()
		}
		if w.dataFrom(next, b, was.dataEnd && !was.trailed); w.s.interrupted() {
			return
		}
	}
	if was.trailed {
		if was.told {
			next = i + 1
		}
		w.trailersFrom(next)
	}
}

// resumeAll sends on all data that may continue, and reports whether there was
// any.
func (w *flow) resumeAll() (any bool) {
	for i := len(w.hops) - 1; i >= 0; i-- {
		h := &w.hops[i]
		if h.stop == host.Continue || !h.f.resumed[w.d].Swap(false) && !h.f.dead.Load() {
			continue
		}
		any = true
		if w.resume(i); w.s.interrupted() {
			return any
		}
	}
	return any
}

// stopped reports whether a hop holds data back.
func (w *flow) stopped() bool {
	for i := range w.hops {
		if w.hops[i].stop != host.Continue {
			return true
		}
	}
	return false
}

// closed reports whether a hop holds everything and cannot take more, because
// it already holds at least room bytes.
func (w *flow) closed(room int64) bool {
	for i := range w.hops {
		if w.hops[i].stop == stopAll && w.hops[i].size >= room {
			return true
		}
	}
	return false
}

// uses reports whether any hop has one of the callbacks.
func (w *flow) uses(c ...host.Callback) bool {
	for i := range w.hops {
		for _, c := range c {
			if w.hops[i].f.has(c) {
				return true
			}
		}
	}
	return false
}

// poke wakes the goroutine that waits for the flow to continue.
func (w *flow) poke() {
	select {
	case w.signal <- struct{}{}:
	default:
	}
}
