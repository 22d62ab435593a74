package fleet

import (
	"math"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/state/mediacache"
)

// maxChains bounds the forms of a prompt.
const maxChains = 64

// maxAskRecords bounds the records of a Place: chains, headers, and a few others.
const maxAskRecords = maxChains + abi.MaxAllHeaders + 16

// maxRemaining bounds a deadline on the wire, in milliseconds: one year. The bound keeps the
// product below the range of a duration.
const maxRemaining = 365 * 24 * 3600 * 1000

// appendPlace appends a PlacementRequest with the number of its lease. m is memory for it. False: the
// coordinator does not have an instance that the PlacementRequest requires.
func appendPlace(dst []byte, m *fleetpb.Place, lease uint64, a *coordinator.PlacementRequest, n Numbers) (_ []byte, ok bool) {
	defer resetPlace(m)
	if !putTargets(m, a, n) {
		return dst, false
	}
	r, q := &a.Request, &a.Key.Conversation
	m.Lease, m.Model = lease, a.Model
	m.PromptTokens, m.MaxTokens, m.Choices = r.PromptTokens, r.MaxTokens, r.N
	m.Stream, m.PairBroken, m.TwoLegs, m.Aggregate = r.Stream, r.PairBroken, a.Two, uint32(a.Aggregate)
	m.Prompt = r.Prompt
	m.Client, m.Tenant, m.Class = r.Client, r.Tenant, r.Class
	m.Tools, m.Images, m.Audio, m.Salt, m.Adapter = r.Tools, r.Images, r.Audio, r.Salt, r.Adapter
	m.RemainingMs, m.TokenLimitUs = a.Remaining(time.Now()), r.TokenMicros
	for i := range r.Headers[:min(len(r.Headers), abi.MaxAllHeaders)] {
		l, h := &r.Headers[i], more(&m.Headers)
		h.Name, h.Cut = l.Name[:min(len(l.Name), abi.MaxHeaderName)], l.Cut
		h.Value = l.Value[:min(len(l.Value), abi.MaxHeaderValue)]
	}
	m.Conversation, m.First = q.ID, q.First
	for i := range a.Key.Chains[:min(len(a.Key.Chains), maxChains)] {
		from, c := &a.Key.Chains[i], more(&m.Chains)
		c.Block, c.Text, c.Hashes = blockOf(from.Form.Block), from.Form.Text, numbers(from.Blocks)
		if b := from.Blocks; m.Chain == 0 && len(b) > 0 && len(b) == len(q.Chain) && &b[0] == &q.Chain[0] {
			m.Chain = uint32(i) + 1
		}
	}
	if m.Chain == 0 {
		m.OwnChain = numbers(q.Chain)
	}
	for _, hash := range a.Key.Media {
		m.Media = append(m.Media, uint64(hash))
	}
	if a.Lookup.Done {
		m.Turn = a.Lookup.Turn.Message()
	} else {
		m.Parent = q.Parent
		putEnds(m, q)
	}
	return fleetpb.AppendFast(dst, m), true
}

// resetPlace resets m without the memory of the PlacementRequest that it referred to.
func resetPlace(m *fleetpb.Place) {
	for _, c := range m.Chains {
		c.Hashes = nil
	}
	m.OwnChain = nil
	m.ResetVT()
}

// more extends a list of messages by a message that is empty.
func more[M any](list *[]*M) *M {
	l := *list
	if n := len(l); n < cap(l) {
		if l = l[:n+1]; l[n] == nil {
			l[n] = new(M)
		}
	} else {
		l = append(l, new(M))
	}
	*list = l
	return l[len(l)-1]
}

// putEnds sets the ends of a prompt.
func putEnds(m *fleetpb.Place, q *conversation.Query) {
	blocks, before := len(q.Chain), 0
	if len(q.Ends) > 0 {
		m.EndsFrom = uint32(min(max(q.EndsFrom, 0), blocks))
	}
	for _, e := range q.Ends {
		at := min(max(int(e.Blocks), before), blocks)
		m.EndBlocks, m.EndHashes = append(m.EndBlocks, uint32(at-before)), append(m.EndHashes, uint64(e.Hash))
		before = at
	}
}

// putTargets sets the targets of a PlacementRequest. Unknown targets are left out of Excluded and Same;
// without an unknown required target the result is false.
func putTargets(m *fleetpb.Place, a *coordinator.PlacementRequest, n Numbers) (ok bool) {
	var known, decode bool
	if m.Prefill, ok = putTarget(a.Prefill, n); ok && m.Prefill != 0 {
		m.Id = a.ID
	}
	if m.OnlyPrefill, known = putTarget(a.Only.Prefill, n); !known {
		ok = false
	}
	if m.OnlyDecode, decode = putTarget(a.Only.Decode, n); !ok || !decode {
		return false
	}
	m.SamePrefill, known = putTarget(a.Same.Prefill, n)
	if m.SameDecode, decode = putTarget(a.Same.Decode, n); !known || !decode {
		m.SamePrefill, m.SameDecode = 0, 0
	}
	for _, t := range a.Excluded {
		if target, _ := putTarget(t, n); target != 0 {
			m.Excluded = append(m.Excluded, target)
		}
	}
	m.WithinPrefill = putInstances(a.Within.Prefill, n)
	m.WithinDecode = putInstances(a.Within.Decode, n)
	m.WithinWhole = putInstances(a.Within.Whole, n)
	return true
}

func putInstances(list []*engine.Instance, n Numbers) *fleetpb.Instances {
	if list == nil {
		return nil
	}
	m := fleetpb.InstancesFromVTPool()
	for _, i := range list {
		if number, ok := n.Number(i); ok && number != 0 {
			m.Numbers = append(m.Numbers, number)
		}
	}
	return m
}

// heard is a PlacementRequest that was read from the wire, and its memory.
type heard struct {
	coordinator.PlacementRequest
	lease  uint64
	lost   bool // a required target is unknown here
	ends   []conversation.End
	within [3][]*engine.Instance
	place  fleetpb.Place
	placed fleetpb.Placed
	cached fleetpb.Computed
	out    []byte
}

// read reads the output of appendPlace. The chains alias h.place, and nothing aliases payload.
func (h *heard) read(payload []byte, n Numbers, known names) error {
	m := &h.place
	err := fleetpb.UnmarshalView(payload, m, maxAskRecords)
	if err != nil || len(m.Chains) > maxChains || len(m.Headers) > abi.MaxAllHeaders {
		m.ResetVT()
		return link.Garbage("a request for a placement")
	}
	h.lost = false
	h.lease, h.Model = m.Lease, known.of(m.Model)
	q := &h.Request
	q.PromptTokens, q.MaxTokens, q.N = m.PromptTokens, m.MaxTokens, m.Choices
	q.Stream, q.PairBroken, h.Two = m.Stream, m.PairBroken, m.TwoLegs
	h.Aggregate = abi.Role(m.Aggregate) & abi.RoleBoth
	q.Prompt = strings.Clone(m.Prompt)
	q.Client, q.Tenant, q.Class = m.Client, m.Tenant, m.Class
	q.Tools, q.Images, q.Audio, q.Salt, q.Adapter = m.Tools, m.Images, m.Audio, m.Salt, known.of(m.Adapter)
	q.TokenMicros = m.TokenLimitUs
	if left := m.RemainingMs; left != 0 {
		left = min(max(left, -maxRemaining), maxRemaining)
		h.Deadline = time.Now().Add(time.Duration(left) * time.Millisecond)
	}
	h.readHeaders(known)
	h.readTargets(n)
	h.readKey()
	if m.Turn != nil {
		h.Found(conversation.ReadTurn(m.Turn))
	}
	return nil
}

func (h *heard) readHeaders(known names) {
	if len(h.place.Headers) == 0 {
		return
	}
	list := make([]abi.RequestHeader, len(h.place.Headers))
	for i, l := range h.place.Headers {
		list[i] = abi.RequestHeader{
			Present: true, Cut: l.Cut, Name: known.of(l.Name[:min(len(l.Name), abi.MaxHeaderName)]),
			Value: strings.Clone(l.Value[:min(len(l.Value), abi.MaxHeaderValue)]),
		}
	}
	h.Request.Headers = list
}

func (h *heard) readTargets(n Numbers) {
	m := &h.place
	insist := func(target uint64, to *engine.Target) {
		t, known := getTarget(target, n)
		*to, h.lost = t, h.lost || !known
	}
	insist(m.Prefill, &h.Prefill)
	if m.Prefill != 0 {
		h.ID = m.Id
	}
	insist(m.OnlyPrefill, &h.Only.Prefill)
	insist(m.OnlyDecode, &h.Only.Decode)
	prefill, one := getTarget(m.SamePrefill, n)
	if decode, two := getTarget(m.SameDecode, n); one && two && !decode.IsZero() {
		h.Same = coordinator.Pair{Prefill: prefill, Decode: decode}
	}
	for _, v := range m.Excluded {
		if t, known := getTarget(v, n); known && !t.IsZero() {
			h.Excluded = append(h.Excluded, t)
		}
	}
	h.Within.Prefill = h.readWithin(0, m.WithinPrefill, n)
	h.Within.Decode = h.readWithin(1, m.WithinDecode, n)
	h.Within.Whole = h.readWithin(2, m.WithinWhole, n)
}

func (h *heard) readWithin(at int, m *fleetpb.Instances, n Numbers) []*engine.Instance {
	if m == nil {
		return nil
	}
	list := h.within[at][:0]
	if list == nil {
		list = []*engine.Instance{} // nil would allow every instance
	}
	for _, number := range m.Numbers {
		if i := n.Instance(number); i != nil {
			list = append(list, i)
		}
	}
	h.within[at] = list
	return list
}

func (h *heard) readKey() {
	m, q := &h.place, &h.Key.Conversation
	q.ID, q.Parent, q.First = strings.Clone(m.Conversation), strings.Clone(m.Parent), m.First
	for _, c := range m.Chains {
		form := kvindex.Form{Block: int(min(c.Block, maxBlock)), Text: c.Text}
		h.Key.Chains = append(h.Key.Chains, coordinator.Chain{Form: form, Blocks: hashes(c.Hashes)})
	}
	if m.Chain > 0 && int(m.Chain) <= len(h.Key.Chains) {
		q.Chain = h.Key.Chains[m.Chain-1].Blocks
	} else if len(m.OwnChain) > 0 {
		q.Chain = hashes(m.OwnChain)
	}
	for _, hash := range m.Media[:min(len(m.Media), mediacache.MaxMedia)] {
		h.Key.Media = append(h.Key.Media, mediacache.Hash(hash))
	}
	if m.Turn == nil {
		h.readEnds()
	}
}

// readEnds reads the ends of a prompt. Their positions lie within the chain.
func (h *heard) readEnds() {
	m, q := &h.place, &h.Key.Conversation
	count := min(len(m.EndBlocks), len(m.EndHashes))
	if count == 0 {
		return
	}
	blocks := uint64(len(q.Chain))
	q.EndsFrom = int(min(uint64(m.EndsFrom), blocks))
	ends, at := h.ends[:0], uint64(0)
	for i := range count {
		at = min(at+uint64(m.EndBlocks[i]), blocks)
		ends = append(ends, conversation.End{Blocks: int32(min(at, math.MaxInt32)), Hash: kvindex.Hash(m.EndHashes[i])})
	}
	h.ends, q.Ends = ends, ends
}

// maxKept bounds the memory that is kept for the next PlacementRequest, in blocks of a chain. For the
// memory of an answer the bound is eight times as many bytes.
const maxKept = 8 << 10

// drop releases large memory and all references to the request.
func (h *heard) drop() {
	if cap(h.ends) > maxKept {
		h.ends = nil
	}
	if cap(h.out) > 8*maxKept {
		h.out = nil
	}
	m := &h.place
	for _, c := range m.Chains {
		c.Hashes = kept(c.Hashes)
	}
	m.OwnChain, m.EndHashes, m.EndBlocks, m.Excluded, m.Media = kept(m.OwnChain), kept(m.EndHashes), kept(m.EndBlocks), kept(m.Excluded), kept(m.Media)
	m.ResetVT()
	h.placed.ResetVT()
	clear(h.Excluded)
	for i, list := range h.within {
		clear(list)
		h.within[i] = kept(list)
	}
	clear(h.Key.Chains)
	h.PlacementRequest = coordinator.PlacementRequest{Excluded: kept(h.Excluded)[:0], Key: coordinator.Key{Chains: h.Key.Chains[:0], Media: h.Key.Media[:0]}}
}

// kept returns the memory of a list that is not too large to be kept.
func kept[E any](list []E) []E {
	if cap(list) > maxKept {
		return nil
	}
	return list
}

// adoption returns the message of a lease that another coordinator made.
func adoption(lease uint64, a *coordinator.Adoption, n Numbers, cleanup []byte) *fleetpb.Adoption {
	prefill, _ := putTarget(a.Prefill, n)
	decode, _ := putTarget(a.Decode, n)
	return &fleetpb.Adoption{
		Lease: lease, Prefill: prefill, Decode: decode, Id: a.ID, Prompt: a.Prompt, Queued: a.Queued, Tokens: a.Tokens, Cleanup: cleanup,
	}
}

func readAdoption(m *fleetpb.Adoption, n Numbers) (a coordinator.Adoption) {
	a.Prefill, _ = getTarget(m.Prefill, n)
	a.Decode, _ = getTarget(m.Decode, n)
	a.ID, a.Prompt, a.Queued, a.Tokens = m.Id, m.Prompt, m.Queued, m.Tokens
	return a
}
