package abi

// Traits are properties of a request, read from its body, and its deadline. The zero value
// is a request without any of them.
type Traits struct {
	// Salt is a hash of the request's cache salt, never its text; 0: no salt. Equal salts
	// have equal hashes in all processes.
	Salt uint64
	// Remaining is the time in milliseconds until the request's deadline, when the frame
	// is written; 0: no deadline; negative: the deadline has passed.
	Remaining int64
	// TokenMicros is the limit of the request for the mean time between two tokens of its answer, in
	// µs; 0: none.
	TokenMicros uint32
	// Adapter is the name of the request's LoRA adapter, cut to MaxAdapter bytes: the
	// adapter that the request selects beside its model, or in the facts of plan and place
	// also a model that the engines serve as an adapter.
	Adapter string
	// Tools: the request offers tools to the model. Images, Audio: a message has such a
	// part.
	Tools, Images, Audio bool
}

// MaxAdapter bounds Traits.Adapter in bytes.
const MaxAdapter = 256

func (t *Traits) flags() (flags uint32) {
	if t.Tools {
		flags |= flagTools
	}
	if t.Images {
		flags |= flagImages
	}
	if t.Audio {
		flags |= flagAudio
	}
	return flags
}

// decode reads the traits at an offset of the facts.
func (t *Traits) decode(b, facts []byte, at int) (ok bool) {
	t.Salt = get64(facts, at+traitsSalt)
	t.Remaining = int64(get64(facts, at+traitsRemaining))
	flags := get32(facts, at+traitsFlags)
	t.TokenMicros = get32(facts, at+traitsTokenMicros)
	t.Tools, t.Images, t.Audio = flags&flagTools != 0, flags&flagImages != 0, flags&flagAudio != 0
	t.Adapter, ok = textOf(b, facts, at+traitsAdapter)
	return ok
}
