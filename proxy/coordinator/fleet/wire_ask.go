package fleet

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/wire"
)

// Flags of an Ask on the wire.
const (
	askStream = 1 << iota
	askBroken
	askTwo
	askFixed
	askSame
	askOnly
	askLooked
	askFirst
	askPrompt
	askChain // the conversation's chain is not one of Key.Chains
	askWithinPrefill
	askWithinDecode
	askWithinWhole
	askIdentity
	askParent // never together with askLooked
	askTraits
	askHeaders
	askFlags
)

// appendAsk appends an Ask with the number of its lease. False: the coordinator does not have an
// instance that the Ask requires.
func appendAsk(dst []byte, lease uint64, a *coordinator.Ask, looked bool, n Numbers) (_ []byte, ok bool) {
	chain := chainOf(a)
	flags := uint64(0)
	for i, set := range [...]bool{
		a.Request.Stream, a.Request.PairBroken, a.Two, !a.Prefill.IsZero(), !a.Same.Decode.IsZero(), !a.Only.Decode.IsZero(),
		looked, a.Key.Conversation.First, a.Request.Prompt != "", chain == foreignChain,
		a.Within.Prefill != nil, a.Within.Decode != nil, a.Within.Whole != nil,
		a.Request.Identity != (abi.Identity{}), !looked && a.Key.Conversation.Parent != "",
		a.Request.Traits != (abi.Traits{}) || !a.Deadline.IsZero(), len(a.Request.Headers) != 0,
	} {
		if set {
			flags |= 1 << i
		}
	}
	dst = wire.AppendUint(wire.AppendUint(dst, lease), flags)
	dst = wire.AppendText(dst, a.Model)
	r := &a.Request
	dst = wire.AppendInt(wire.AppendInt(wire.AppendInt(dst, r.PromptTokens), r.MaxTokens), r.N)
	dst = wire.AppendUint(dst, a.Aggregate)
	if flags&askPrompt != 0 {
		dst = wire.AppendText(dst, r.Prompt)
	}
	if flags&askIdentity != 0 {
		dst = wire.AppendUint(wire.AppendUint(wire.AppendUint(dst, r.Client), r.Tenant), r.Class)
	}
	if flags&askTraits != 0 {
		dst = appendTraits(dst, a)
	}
	if flags&askHeaders != 0 {
		dst = appendHeaders(dst, a.Request.Headers)
	}
	if dst, ok = appendTargets(dst, a, flags, n); !ok {
		return dst, false
	}
	dst = wire.AppendText(dst, a.Key.Conversation.ID)
	if flags&askParent != 0 {
		dst = wire.AppendText(dst, a.Key.Conversation.Parent)
	}
	dst = wire.AppendUint(dst, chain)
	if chain == foreignChain {
		dst = appendHashes(dst, a.Key.Conversation.Chain)
	}
	chains := chainsOf(a)
	dst = wire.AppendUint(dst, len(chains))
	for i := range chains {
		c := &chains[i]
		dst = appendBlock(dst, c.Form.Block)
		if c.Form.Text {
			dst = append(dst, 1)
		} else {
			dst = append(dst, 0)
		}
		dst = appendHashes(dst, c.Blocks)
	}
	if looked {
		return a.Lookup.Turn.Append(dst), true
	}
	return appendEnds(dst, &a.Key.Conversation), true
}

// Flags of abi.Traits on the wire.
const (
	traitTools = 1 << iota
	traitImages
	traitAudio
	traitFlags
)

// appendTraits appends the traits of a request. A deadline is sent as the remaining time,
// because the clocks of two hosts differ.
func appendTraits(dst []byte, a *coordinator.Ask) []byte {
	t, flags := &a.Request.Traits, uint64(0)
	for i, set := range [...]bool{t.Tools, t.Images, t.Audio} {
		if set {
			flags |= 1 << i
		}
	}
	dst = wire.AppendInt(wire.AppendUint(wire.AppendUint(dst, flags), t.Salt), a.Remaining(time.Now()))
	return wire.AppendText(dst, t.Adapter)
}

// readTraits reads the output of appendTraits.
func (h *heard) readTraits(r *reader) {
	t, flags := &h.Request.Traits, r.UintUpTo(traitFlags-1)
	t.Tools, t.Images, t.Audio = flags&traitTools != 0, flags&traitImages != 0, flags&traitAudio != 0
	t.Salt = r.Uint()
	// The bound keeps the product below the range of a duration.
	if left := r.Int(); left != 0 {
		left = min(max(left, -maxRemaining), maxRemaining)
		h.Deadline = time.Now().Add(time.Duration(left) * time.Millisecond)
	}
	t.Adapter = string(r.Text())
}

// Flags of an abi.RequestHeader on the wire. A header that the request does not have is not sent.
const (
	headerCut = 1 << iota
	headerFlags
)

// appendHeaders appends the declared headers of a request.
func appendHeaders(dst []byte, list []abi.RequestHeader) []byte {
	list = list[:min(len(list), abi.MaxAllHeaders)]
	dst = wire.AppendUint(dst, len(list))
	for i := range list {
		l, flags := &list[i], 0
		if l.Cut {
			flags = headerCut
		}
		dst = wire.AppendText(wire.AppendUint(dst, flags), l.Name[:min(len(l.Name), abi.MaxHeaderName)])
		dst = wire.AppendText(dst, l.Value[:min(len(l.Value), abi.MaxHeaderValue)])
	}
	return dst
}

// readHeaders reads the output of appendHeaders. The values do not share the memory of the
// message.
func (h *heard) readHeaders(r *reader, known names) {
	n := r.headerCount()
	if n == 0 {
		r.Fail() // the flag says that there are headers
		return
	}
	list := make([]abi.RequestHeader, n)
	for i := range list {
		list[i] = abi.RequestHeader{
			Present: true, Cut: r.UintUpTo(headerFlags-1)&headerCut != 0,
			Name: known.of(r.short(abi.MaxHeaderName)), Value: string(r.short(abi.MaxHeaderValue)),
		}
	}
	h.Request.Headers = list
}

// maxRemaining bounds a deadline on the wire, in milliseconds: one year.
const maxRemaining = 365 * 24 * 3600 * 1000

// appendEnds appends the ends of a prompt: their number, the block from which they are
// complete, and for each the number of blocks since the one before.
func appendEnds(dst []byte, q *conversation.Query) []byte {
	dst = wire.AppendUint(dst, len(q.Ends))
	if len(q.Ends) == 0 {
		return dst
	}
	blocks := len(q.Chain)
	dst = wire.AppendUint(dst, min(max(q.EndsFrom, 0), blocks))
	before := 0
	for _, e := range q.Ends {
		at := min(max(int(e.Blocks), before), blocks)
		dst = wire.AppendUint(dst, at-before)
		dst = binary.LittleEndian.AppendUint64(dst, uint64(e.Hash))
		before = at
	}
	return dst
}

// appendTargets appends the targets of an Ask. Unknown targets are left out of Excluded
// and Same; an unknown required target is an error.
func appendTargets(dst []byte, a *coordinator.Ask, flags uint64, n Numbers) (_ []byte, ok bool) {
	if flags&askFixed != 0 {
		if dst, ok = appendTarget(dst, a.Prefill, n); !ok {
			return dst, false
		}
		dst = wire.AppendUint(dst, a.ID)
	}
	if flags&askSame != 0 {
		dst, _ = appendTarget(dst, a.Same.Prefill, n)
		dst, _ = appendTarget(dst, a.Same.Decode, n)
	}
	if flags&askOnly != 0 {
		var decode bool
		dst, ok = appendTarget(dst, a.Only.Prefill, n)
		if dst, decode = appendTarget(dst, a.Only.Decode, n); !ok || !decode {
			return dst, false
		}
	}
	dst = wire.AppendUint(dst, len(a.Excluded))
	for _, t := range a.Excluded {
		dst, _ = appendTarget(dst, t, n)
	}
	for _, list := range [...][]*engine.Instance{a.Within.Prefill, a.Within.Decode, a.Within.Whole} {
		if list == nil {
			continue
		}
		dst = wire.AppendUint(dst, len(list))
		for _, i := range list {
			number, _ := n.Number(i)
			dst = wire.AppendUint(dst, number)
		}
	}
	return dst, true
}

// Values for the index of the conversation's chain in the key, which counts from 1.
const (
	noChain      = 0
	foreignChain = 1<<32 - 1
)

// chainsOf returns the chains of the key that are sent.
func chainsOf(a *coordinator.Ask) []coordinator.Chain {
	return a.Key.Chains[:min(len(a.Key.Chains), mostChains)]
}

func chainOf(a *coordinator.Ask) uint32 {
	q := a.Key.Conversation.Chain
	if len(q) == 0 {
		return noChain
	}
	for i, c := range chainsOf(a) {
		if b := c.Blocks; len(b) == len(q) && &b[0] == &q[0] {
			return uint32(i) + 1
		}
	}
	return foreignChain
}

// heard is an Ask that was read from the wire, and its memory.
type heard struct {
	coordinator.Ask
	lease  uint64
	lost   bool // a required target is unknown here
	blocks [][]kvindex.Hash
	ends   []conversation.End
	within [3][]*engine.Instance
	out    []byte
}

// mostChains bounds the forms of a prompt.
const mostChains = 64

// read reads the output of appendAsk.
func (h *heard) read(payload []byte, n Numbers, known names) error {
	excluded, chains := h.Excluded[:0], h.Key.Chains[:0]
	h.Ask, h.lost = coordinator.Ask{}, false
	r := newReader(payload)
	h.lease = r.Uint()
	flags := r.UintUpTo(askFlags - 1)
	h.Model = known.of(r.Text())
	q := &h.Request
	q.PromptTokens, q.MaxTokens, q.N = r.Int(), r.Int(), r.Int()
	q.Stream, q.PairBroken, h.Two = flags&askStream != 0, flags&askBroken != 0, flags&askTwo != 0
	h.Aggregate = abi.Role(r.UintUpTo(uint64(abi.RoleBoth)))
	if flags&askPrompt != 0 {
		q.Prompt = string(r.Text())
	}
	if flags&askIdentity != 0 {
		q.Client, q.Tenant, q.Class = r.Uint(), uint32(r.UintUpTo(math.MaxUint32)), uint32(r.UintUpTo(math.MaxUint32))
	}
	if flags&askTraits != 0 {
		h.readTraits(&r)
	}
	if flags&askHeaders != 0 {
		h.readHeaders(&r, known)
	}
	h.readTargets(&r, flags, n, excluded)
	h.readKey(&r, flags, chains)
	if flags&askLooked != 0 {
		h.Found(conversation.ReadTurn(&r.Reader))
	} else {
		h.readEnds(&r)
	}
	if !r.Done() {
		return link.Garbage("a request for a placement")
	}
	return nil
}

func (h *heard) readTargets(r *reader, flags uint64, n Numbers, excluded []engine.Target) {
	insist := func(to *engine.Target) {
		t, known := r.target(n)
		if known && t.IsZero() {
			r.Fail()
		}
		*to, h.lost = t, h.lost || !known
	}
	if flags&askFixed != 0 {
		insist(&h.Prefill)
		h.ID = r.Uint()
	}
	if flags&askSame != 0 {
		prefill, one := r.target(n)
		if decode, two := r.target(n); one && two {
			h.Same = coordinator.Pair{Prefill: prefill, Decode: decode}
		}
	}
	if flags&askOnly != 0 {
		insist(&h.Only.Prefill)
		insist(&h.Only.Decode)
	}
	for range r.List(1) {
		if t, known := r.target(n); known && !t.IsZero() {
			excluded = append(excluded, t)
		}
	}
	h.Excluded = excluded
	for i, to := range [...]*[]*engine.Instance{&h.Within.Prefill, &h.Within.Decode, &h.Within.Whole} {
		if flags&(askWithinPrefill<<i) == 0 {
			continue
		}
		list := h.within[i][:0]
		if list == nil {
			list = []*engine.Instance{} // nil would allow every instance
		}
		for range r.List(1) {
			if instance := n.Instance(uint32(r.UintUpTo(1<<32 - 1))); instance != nil {
				list = append(list, instance)
			}
		}
		h.within[i], *to = list, list
	}
}

func (h *heard) readKey(r *reader, flags uint64, chains []coordinator.Chain) {
	q := &h.Key.Conversation
	q.ID, q.First = string(r.Text()), flags&askFirst != 0
	if flags&askParent != 0 {
		if q.Parent = string(r.Text()); q.Parent == "" || flags&askLooked != 0 {
			r.Fail()
		}
	}
	chain := r.UintUpTo(foreignChain)
	if (chain == foreignChain) != (flags&askChain != 0) {
		r.Fail()
	}
	h.room(0)
	if chain == foreignChain {
		h.blocks[0] = r.hashes(h.blocks[0][:0])
		q.Chain = h.blocks[0]
	}
	n := r.List(3)
	if n > mostChains {
		r.Fail()
		n = 0
	}
	for i := range n {
		h.room(i + 1)
		form := kvindex.Form{Block: int(r.UintUpTo(mostBlock)), Text: r.UintUpTo(1) != 0}
		h.blocks[i+1] = r.hashes(h.blocks[i+1][:0])
		chains = append(chains, coordinator.Chain{Form: form, Blocks: h.blocks[i+1]})
	}
	switch {
	case chain == noChain || chain == foreignChain:
	case chain > uint64(n):
		r.Fail()
	default:
		q.Chain = chains[chain-1].Blocks
	}
	h.Key.Chains = chains
}

// readEnds reads the ends of a prompt. Their positions lie within the chain.
func (h *heard) readEnds(r *reader) {
	q := &h.Key.Conversation
	n := r.List(9)
	if n == 0 {
		return
	}
	blocks := uint64(len(q.Chain))
	q.EndsFrom = int(r.UintUpTo(blocks))
	ends, at := h.ends[:0], uint64(0)
	for range n {
		at += r.UintUpTo(blocks - at)
		hash := r.Bytes(8)
		if r.Failed() {
			return
		}
		ends = append(ends, conversation.End{Blocks: int32(at), Hash: kvindex.Hash(binary.LittleEndian.Uint64(hash))})
	}
	h.ends, q.Ends = ends, ends
}

// room extends blocks for chain i.
func (h *heard) room(i int) {
	if i == len(h.blocks) {
		h.blocks = append(h.blocks, nil)
	}
}

// mostKept bounds the memory that is kept for the next Ask, in blocks of a chain. For the
// memory of an answer the bound is eight times as many bytes.
const mostKept = 8 << 10

// drop releases large memory and all references to the request.
func (h *heard) drop() {
	for i := range h.blocks {
		if cap(h.blocks[i]) > mostKept {
			h.blocks[i] = nil
		}
	}
	if cap(h.ends) > mostKept {
		h.ends = nil
	}
	if cap(h.out) > 8*mostKept {
		h.out = nil
	}
	clear(h.Excluded)
	for _, list := range h.within {
		clear(list)
	}
	clear(h.Key.Chains)
	h.Ask = coordinator.Ask{Excluded: h.Excluded[:0], Key: coordinator.Key{Chains: h.Key.Chains[:0]}}
}

// appendAdoption appends a lease that another coordinator made.
func appendAdoption(dst []byte, lease uint64, a *coordinator.Adoption, n Numbers, owed []byte) []byte {
	dst = wire.AppendUint(dst, lease)
	dst, _ = appendTarget(dst, a.Prefill, n)
	dst, _ = appendTarget(dst, a.Decode, n)
	dst = wire.AppendUint(dst, a.ID)
	dst = wire.AppendInt(wire.AppendInt(wire.AppendInt(dst, a.Prompt), a.Queued), a.Tokens)
	return append(dst, owed...)
}

func readAdoption(r *reader, n Numbers) (lease uint64, a coordinator.Adoption, owed []byte) {
	lease = r.Uint()
	a.Prefill, _ = r.target(n)
	a.Decode, _ = r.target(n)
	a.ID = r.Uint()
	a.Prompt, a.Queued, a.Tokens = r.Int(), r.Int(), r.Int()
	return lease, a, r.Rest()
}

// The functions below limit values to the range that the peer accepts. Otherwise the peer
// would end this connection, and each later connection for the same reason.

// mostMicros is the longest accepted duration, in µs.
const mostMicros = int64(24 * time.Hour / time.Microsecond)

func appendDuration(dst []byte, d time.Duration) []byte {
	return wire.AppendUint(dst, uint64(min(max(0, d.Microseconds()), mostMicros)))
}

func (r *reader) duration() time.Duration {
	return time.Duration(r.UintUpTo(uint64(mostMicros))) * time.Microsecond
}

// mostBlock is the largest accepted block. Engines report the size.
const mostBlock = 1<<31 - 1

func appendBlock(dst []byte, block int) []byte {
	return wire.AppendUint(dst, min(max(0, block), mostBlock))
}
