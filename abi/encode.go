package abi

import (
	"math"
	"unsafe"
)

// FrameSize returns the size of the facts' frame in bytes, so that a caller can
// fit it into a guest's scratch buffer. l is the layout of the frame's Header.
func (f *PlanFacts) FrameSize(l *Layout) int {
	return HeaderSize + planSize + f.Request.frameSize(l)
}

// FrameSize returns the size of the facts' frame.
func (f *PlaceFacts) FrameSize(l *Layout) int {
	size := HeaderSize + placeSize + len(f.Candidates)*RowSize + len(f.Pairs)*pairSize + f.Request.frameSize(l)
	if l.Extended {
		size += moreSize + len(f.Details)*DetailSize + len(f.Predictions)*PredictionSize
	}
	return size
}

// MintFrameSize is the size of a mint frame, the same in both versions.
const MintFrameSize = HeaderSize + mintSize

// FrameSize returns the size of the facts' frame.
func (f *LegFacts) FrameSize(l *Layout) int {
	return HeaderSize + legSize + len(f.Engine) + len(f.Reason) + f.Request.frameSize(l)
}

// FrameSize returns the size of the facts' frame.
func (f *FinishFacts) FrameSize(l *Layout) int {
	return HeaderSize + finSize + len(f.Reason) + f.Request.frameSize(l)
}

// frameSize returns the size of the request's texts, and of all that version 2 added for the
// request.
func (f *RequestFacts) frameSize(l *Layout) int {
	size := len(f.Model) + len(f.Conversation) + len(f.Prompt)
	if l.Extended {
		size += l.added()
		if l.Traits {
			size += len(f.Adapter)
		}
		if l.Headers != nil {
			size += f.headerBytes(l.Headers)
		}
	}
	return size
}

// added returns the size of the request's facts that version 2 added. Version 1 has none of them.
func (l *Layout) added() int {
	size := identitySize
	if l.Traits || l.Headers != nil {
		size += traitsSize
	}
	if l.Headers != nil {
		size += headersSize
	}
	return size
}

// AppendPlan appends a frame of the plan hook to dst and returns the extended
// slice. This and the other Append functions allocate only when dst is too
// small; dst may be the guest's memory itself. The frame must begin at an
// address that is a multiple of 8.
func AppendPlan(dst []byte, h *Header, f *PlanFacts) []byte {
	w := begin(dst, HookPlan, h, planSize, f.FrameSize(&h.Layout))
	if h.Headers != nil {
		w.headers(planSize+identitySize+traitsSize, h.Headers, &f.Request)
	}
	w.request(&f.Request)
	put32(w.facts, planPrefill, uint32(f.PrefillTargets))
	put32(w.facts, planDecode, uint32(f.DecodeTargets))
	put32(w.facts, planBoth, uint32(f.BothTargets))
	if f.PlanCosts != (PlanCosts{}) { // otherwise the frame has only zeros there
		put64(w.facts, planPrefillCached, uint64(f.PrefillCached))
		put64(w.facts, planBothCached, uint64(f.BothCached))
		put64(w.facts, planPrefillQueued, uint64(f.PrefillQueued))
		put64(w.facts, planBothQueued, uint64(f.BothQueued))
		putFloat(w.facts, planPrefillMicros, f.PrefillMicros)
		putFloat(w.facts, planBothMicros, f.BothMicros)
		putFloat(w.facts, planTransferMicros, f.TransferMicros)
		putFloat(w.facts, planHandoverMicros, f.HandoverMicros)
	}
	if h.Extended {
		w.added(planSize, planSize+identitySize, h, &f.Request)
	}
	return w.dst
}

// AppendPlace appends a frame of the place hook. The sequence and the random
// number come from the facts, not from the header.
func AppendPlace(dst []byte, h *Header, f *PlaceFacts) []byte {
	w := begin(dst, HookPlace, h, placeSize, f.FrameSize(&h.Layout))
	w.placeFacts(f)
	if h.Extended {
		if h.Headers != nil {
			w.headers(placeSize+identitySize+moreSize+traitsSize, h.Headers, &f.Request)
		}
		w.added(placeSize, placeSize+identitySize+moreSize, h, &f.Request)
	}
	w.request(&f.Request)
	w.adapters(f)
	return w.dst
}

// placeFacts writes the facts about the candidates, and their tables.
func (w *writer) placeFacts(f *PlaceFacts) {
	put64(w.frame, offSequence, f.Sequence)
	put64(w.frame, offRandom, f.Random)
	put32(w.facts, placeFlow, uint32(f.Flow))
	put32(w.facts, placeFixed, uint32(f.Fixed))
	w.section(placeRows, len(f.Candidates), RowSize)
	w.dst = AppendRows(w.dst, f.Candidates)
	w.section(placePairs, len(f.Pairs), pairSize)
	for i := range f.Pairs {
		w.pair(&f.Pairs[i])
	}
	if get16(w.frame, offVersion) == 1 {
		return
	}
	w.section(placeSize+identitySize+moreDetails, len(f.Details), DetailSize)
	w.dst = appendDetails(w.dst, f.Details)
	if len(f.Predictions) != 0 {
		put32(w.facts, placeSize+identitySize+morePredictions, uint32(len(w.dst)-w.base))
		w.dst = appendPredictions(w.dst, f.Predictions)
	}
}

// adapters sets the flag of facts about LoRA adapters. The flags of the request are written.
func (w *writer) adapters(f *PlaceFacts) {
	if f.Adapters {
		put32(w.facts, reqFlags, get32(w.facts, reqFlags)|flagAdapters)
	}
}

// AppendMint appends a frame of the mint hook.
func AppendMint(dst []byte, h *Header, f *MintFacts) []byte {
	w := begin(dst, HookMint, h, mintSize, MintFrameSize)
	put64(w.facts, mintUnixMilli, uint64(f.UnixMilli))
	put32(w.facts, mintCounter, uint32(f.Counter))
	w.facts[mintNode] = f.Node
	w.facts[mintWorker] = f.Worker
	return w.dst
}

// AppendLeg appends a frame of the leg hook.
func AppendLeg(dst []byte, h *Header, f *LegFacts) []byte {
	w := begin(dst, HookLeg, h, legSize, f.FrameSize(&h.Layout))
	if h.Headers != nil {
		w.headers(legSize+identitySize+traitsSize, h.Headers, &f.Request)
	}
	w.facts[legEvent] = byte(f.Event)
	w.facts[legPhase] = byte(f.Phase)
	w.facts[legFlow] = byte(f.Flow)
	put32(w.facts, legAttempt, f.Attempt)
	put32(w.facts, legLeft, f.Left)
	put32(w.facts, legStatus, f.Status)
	put32(w.facts, legInstance, f.Instance)
	put32(w.facts, legRank, uint32(f.Rank))
	put32(w.facts, legPartner, f.Partner)
	put32(w.facts, legPartRank, uint32(f.PartRank))
	put64(w.facts, legID, f.ID)
	put64(w.facts, legElapsed, uint64(f.Elapsed))
	if h.Extended {
		w.added(legSize, legSize+identitySize, h, &f.Request)
	}
	w.text(legEngine, f.Engine)
	w.text(legReason, f.Reason)
	w.request(&f.Request)
	return w.dst
}

// AppendFinish appends a frame of the finish hook.
func AppendFinish(dst []byte, h *Header, f *FinishFacts) []byte {
	w := begin(dst, HookFinish, h, finSize, f.FrameSize(&h.Layout))
	if h.Headers != nil {
		w.headers(finSize+identitySize+traitsSize, h.Headers, &f.Request)
	}
	w.facts[finOutcome] = byte(f.Outcome)
	w.facts[finFlow] = byte(f.Flow)
	w.facts[finFailed] = byte(f.Failed)
	put32(w.facts, finStatus, f.Status)
	put32(w.facts, finPrefill, f.Prefill)
	put32(w.facts, finPrefillRank, uint32(f.PrefillRank))
	put32(w.facts, finDecode, f.Decode)
	put32(w.facts, finDecodeRank, uint32(f.DecodeRank))
	put64(w.facts, finID, f.ID)
	put64(w.facts, finPlaced, uint64(f.Placed))
	put64(w.facts, finFirstByte, uint64(f.FirstByte))
	put64(w.facts, finTotal, uint64(f.Total))
	put64(w.facts, finPromptTokens, uint64(f.PromptTokens))
	put64(w.facts, finCachedTokens, uint64(f.CachedTokens))
	put64(w.facts, finOutputTokens, uint64(f.OutputTokens))
	put32(w.facts, finAttempts, f.Attempts)
	if h.Extended {
		w.added(finSize, finSize+identitySize, h, &f.Request)
	}
	w.text(finReason, f.Reason)
	w.request(&f.Request)
	return w.dst
}

// writer writes one frame. dst has room for the whole frame, so frame and
// facts, which are parts of it, do not move.
type writer struct {
	dst, frame, facts []byte
	base              int // where the frame begins in dst
}

// begin makes room for total bytes and writes the header. facts is the size of the facts in
// version 1.
func begin(dst []byte, hook Hook, h *Header, facts, total int) writer {
	version := uint64(1)
	if h.Extended || hook == HookScore {
		version = 2
		switch hook {
		case HookMint, HookRetain, HookScore, HookEvict:
		case HookPlace:
			facts += moreSize + h.added()
		default:
			facts += h.added()
		}
	}
	base := len(dst)
	if cap(dst)-base < total {
		grown := make([]byte, base, base+total)
		copy(grown, dst)
		dst = grown
	}
	dst = dst[:base+HeaderSize+facts]
	frame := dst[base:]
	clear(frame)
	put64(frame, offMagic, Magic|version<<32|uint64(hook)<<48) // also offVersion and offHook
	put32(frame, offHeader, HeaderSize)
	put32(frame, offTotal, uint32(total))
	put32(frame, offPolicy, h.Policy)
	put64(frame, offSequence, h.Sequence)
	put64(frame, offRandom, h.Random)
	put64(frame, offUnixMilli, uint64(h.UnixMilli))
	put32(frame, offSeed, h.Seed)
	put32(frame, offFacts, uint32(facts))
	return writer{dst: dst, frame: frame, facts: frame[HeaderSize:], base: base}
}

// request writes the request's facts and appends its texts.
func (w *writer) request(r *RequestFacts) {
	put64(w.facts, reqPromptTokens, uint64(r.PromptTokens))
	put64(w.facts, reqMaxTokens, uint64(r.MaxTokens))
	put64(w.facts, reqN, uint64(r.N))
	var flags uint32
	if r.Stream {
		flags |= flagStream
	}
	if r.PairBroken {
		flags |= flagPairBroken
	}
	put32(w.facts, reqFlags, flags)
	put32(w.facts, reqShared, r.Shared)
	put32(w.facts, reqTurn, uint32(r.Turn))
	w.text(reqModel, r.Model)
	w.text(reqConversation, r.Conversation)
	w.text(reqPrompt, r.Prompt)
}

// added writes the request's facts of version 2. identity and traits are their offsets in
// the facts.
func (w *writer) added(identity, traits int, h *Header, r *RequestFacts) {
	put64(w.facts, identity+identityClient, r.Client)
	put32(w.facts, identity+identityTenant, r.Tenant)
	put32(w.facts, identity+identityClass, r.Class)
	if h.Traits {
		put64(w.facts, traits+traitsSalt, r.Salt)
		put64(w.facts, traits+traitsRemaining, uint64(r.Remaining))
		put32(w.facts, traits+traitsFlags, r.Traits.flags())
		put32(w.facts, traits+traitsTokenMicros, r.TokenMicros)
		w.text(traits+traitsAdapter, r.Adapter)
	}
}

// text appends s and stores its position at the given offset of the facts.
func (w *writer) text(at int, s string) {
	put32(w.facts, at, uint32(len(w.dst)-w.base))
	put32(w.facts, at+4, uint32(len(s)))
	w.dst = append(w.dst, s...)
}

// section stores at the given offset of the facts that count rows follow.
func (w *writer) section(at, count, stride int) {
	put32(w.facts, at, uint32(len(w.dst)-w.base))
	put32(w.facts, at+4, uint32(count))
	put32(w.facts, at+8, uint32(stride))
}

func (w *writer) pair(p *Pair) {
	at := len(w.dst)
	w.dst = w.dst[:at+pairSize]
	row := w.dst[at:]
	put32(row, pairPrefill, uint32(p.Prefill))
	put32(row, pairDecode, uint32(p.Decode))
	put32(row, pairState, uint32(p.State))
	putFloat(row, pairTransfer, p.TransferMicros)
}

// AppendRows appends rows in the layout of a frame, RowSize bytes each.
func AppendRows(dst []byte, rows []Candidate) []byte {
	if !littleEndian {
		return appendFields(dst, rows)
	}
	if len(rows) == 0 {
		return dst
	}
	return append(dst, unsafe.Slice((*byte)(unsafe.Pointer(&rows[0])), len(rows)*RowSize)...)
}

// appendFields appends the rows field by field.
func appendFields(dst []byte, rows []Candidate) []byte {
	for i := range rows {
		c := &rows[i]
		at := len(dst)
		dst = append(dst, make([]byte, RowSize)...)
		row := dst[at:]
		put32(row, rowInstance, c.Instance)
		put32(row, rowRank, uint32(c.Rank))
		put32(row, rowGroup, c.Group)
		row[rowRoles] = byte(c.Roles)
		row[rowTrial] = bit(c.Trial)
		row[rowPair] = byte(c.Pair)
		row[rowHome] = byte(c.Home)
		put32(row, rowRequests, uint32(c.Requests))
		putFloat(row, rowScore, c.Score)
		put64(row, rowTokens, uint64(c.Tokens))
		put64(row, rowQueued, uint64(c.Queued))
		put32(row, rowBlocksGPU, c.BlocksGPU)
		put32(row, rowBlocksCPU, c.BlocksCPU)
		put32(row, rowBlocksDisk, c.BlocksDisk)
		put32(row, rowBlockTokens, c.BlockTokens)
		putFloat(row, rowUsage, c.Usage)
		putFloat(row, rowTokenMicros, c.TokenMicros)
		putFloat(row, rowRecentTokens, c.RecentTokens)
		putFloat(row, rowRecentCount, c.RecentRequests)
		putFloat(row, rowBusy, c.Busy)
		row[rowAdapter] = byte(c.Adapter)
		row[rowMedia], row[rowMediaSent] = c.Media, c.MediaSent
	}
	return dst
}

func bit(b bool) byte {
	if b {
		return 1
	}
	return 0
}

func putFloat(b []byte, at int, v float32) { put32(b, at, math.Float32bits(v)) }
