package attempt

import (
	"errors"

	"github.com/pdproxy/pdproxy/proxy/continuation"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

var (
	// errOtherText: the answer of another engine does not repeat the text that the client has.
	errOtherText = errors.New("the new answer differs from the text that the client has")
	// errErrorEvent: the engine has sent an error event, which the client has not got yet.
	errErrorEvent = errors.New("the engine reported an error")
)

// maxSplicing is the memory to splice events that a stream keeps for the next events, in bytes.
const maxSplicing = 256 << 10

// Continued reports whether the stream has been continued before.
func (k *Kept) Continued() bool { return k.splicer != nil }

// Resume prepares the leg that continues the stream with the first ids of IDs: drop ids at their end
// are generated again. It returns false if there is no memory.
func (k *Kept) Resume(s *continuation.Splicer, drop int) bool {
	k.release(4 * cap(k.again))
	k.again = nil
	if !k.reserve(4 * drop) {
		return false
	}
	s.Memory = k.client
	k.splicer, k.drop, k.again, k.began = s, drop, make([]uint32, 0, drop), false
	k.open.Store(notOpen)
	return true
}

// Sent returns the ids that are the prompt of the running leg.
func (k *Kept) Sent() []uint32 { return k.IDs[:len(k.IDs)-k.drop] }

// meets reports whether the engine of a leg that continues the stream has the prompt that it was
// sent. take has seen the start of its answer.
func (k *Kept) meets(api openai.API) bool {
	return k.same || api == openai.VLLMGenerate // its events do not tell
}

// relay returns whole events as the client gets them, and keeps their ids. It changes events. The
// result is valid until the next call. began: they have the first event of a leg that continues the
// stream. The error is errOtherText, or that the memory to splice them is missing.
func (k *Kept) relay(events []byte) (public []byte, began bool, err error) {
	if k.splicer == nil {
		return k.keep(events), false, nil
	}
	if err := k.beginSplicing(len(events)); err != nil {
		return nil, false, err
	}
	k.spliced = k.spliced[:0]
	for len(events) > 0 {
		end := openai.EventEnd(events)
		if end == 0 { // the last line of a stream
			end = len(events)
		}
		first, err := k.splice(events[:end])
		if err != nil {
			return nil, false, err
		}
		began = began || first
		events = events[end:]
	}
	return k.spliced, began, nil
}

// beginSplicing counts the memory to splice n bytes of events.
func (k *Kept) beginSplicing(n int) error {
	if k.splicing > maxSplicing {
		k.endSplicing()
	}
	if more := continuation.SpliceRoom*n - k.splicing; more > 0 {
		if err := k.client.TakeMemory(int64(more)); err != nil {
			k.Lose(continuation.Memory)
			return err
		}
		k.splicing += more
	}
	return nil
}

// endSplicing frees the memory of the spliced events.
func (k *Kept) endSplicing() {
	if k.splicing > 0 {
		k.client.ReleaseMemory(int64(k.splicing))
		k.splicing, k.spliced = 0, nil
	}
}

// splice appends one event of a leg that continues the stream to spliced, as the client gets it.
// first: it is the first event of the leg that is relayed.
func (k *Kept) splice(event []byte) (first bool, err error) {
	e, choice := continuation.ReadEvent(event)
	from, left := len(k.spliced), k.splicer.Drop
	k.spliced = k.splicer.Append(k.spliced, event)
	if k.splicer.Wrong {
		k.Lose(continuation.Seam)
		return false, errOtherText
	}
	relayed := k.spliced[from:]
	known := e.IDs[:left-k.splicer.Drop] // the client has as many ids already
	if !k.began {
		k.again = append(k.again, known...)
		if !choice || len(relayed) == 0 {
			return false, nil
		}
		first, k.began, known = true, true, k.again
		if k.holds() {
			k.IDs = k.Sent()
			k.drop, k.written, k.before = 0, 0, 0
		}
	}
	if k.holds() {
		k.IDs = append(k.IDs, known...)
	}
	k.spliced = k.spliced[:from+len(k.keep(relayed))]
	return first, nil
}

// usage returns the usage that an engine reports of a leg as that of the stream.
func (k *Kept) usage(u openai.Usage) openai.Usage {
	if k.splicer == nil {
		return u
	}
	if u.Prompt >= 0 {
		u.Prompt = max(0, u.Prompt-k.splicer.Kept)
		u.Cached = min(u.Cached, u.Prompt)
	}
	if u.Completion >= 0 {
		u.Completion += k.splicer.Kept
	}
	return u
}
