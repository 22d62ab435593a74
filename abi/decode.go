package abi

import "math"

// DecodeHeader reads the header of a frame into h and returns the frame's hook.
// ok is false when b does not begin with a whole frame of version 1 or 2.
func DecodeHeader(b []byte, h *Header) (hook Hook, ok bool) {
	if len(b) < HeaderSize || get32(b, offMagic) != Magic || get16(b, offVersion)-1 >= Version {
		return HookNone, false
	}
	if size := get32(b, offHeader); size < HeaderSize || uint64(size)+uint64(get32(b, offFacts)) > uint64(len(b)) ||
		uint64(get32(b, offTotal)) > uint64(len(b)) {
		return HookNone, false
	}
	h.Policy = get32(b, offPolicy)
	h.Sequence = get64(b, offSequence)
	h.Random = get64(b, offRandom)
	h.UnixMilli = int64(get64(b, offUnixMilli))
	h.Seed = get32(b, offSeed)
	h.Extended = get16(b, offVersion) > 1
	hook = Hook(get16(b, offHook))
	h.Traits = h.Extended && hasTraits(hook, int(get32(b, offFacts)))
	return hook, true
}

// PolicyOf returns the index of the policy that a decoded frame is for.
func PolicyOf(b []byte) uint32 { return get32(b, offPolicy) }

// DecodePlan reads a plan frame into f. When ok is false, b is not a plan frame
// or breaks the contract, and f must not be used. f is zero, or an earlier call has filled
// it. This and the other Decode functions do not allocate, except that the first frame with
// headers allocates their list in f. The texts in f share the memory of b.
func DecodePlan(b []byte, f *PlanFacts) (ok bool) {
	facts, ok := factsOf(b, HookPlan, planSize)
	if !ok || len(facts) < planSize || !decodeRequest(b, facts, &f.Request, planSize, planSize+identitySize) {
		return false
	}
	f.PrefillTargets = int32(get32(facts, planPrefill))
	f.DecodeTargets = int32(get32(facts, planDecode))
	f.BothTargets = int32(get32(facts, planBoth))
	f.PrefillCached = int64(get64(facts, planPrefillCached))
	f.BothCached = int64(get64(facts, planBothCached))
	f.PrefillQueued = int64(get64(facts, planPrefillQueued))
	f.BothQueued = int64(get64(facts, planBothQueued))
	f.PrefillMicros = getFloat(facts, planPrefillMicros)
	f.BothMicros = getFloat(facts, planBothMicros)
	f.TransferMicros = getFloat(facts, planTransferMicros)
	f.HandoverMicros = getFloat(facts, planHandoverMicros)
	return true
}

// DecodePlace reads a place frame into f. The candidates are the frame's own
// rows where the layout is that of version 1. Otherwise DecodePlace copies them
// to spare, which grows when needed and can be reused in the next call. The
// details are the frame's own rows too; rows of a later version are copied to
// new memory.
func DecodePlace(b []byte, f *PlaceFacts, spare *[]Candidate) (ok bool) {
	facts, ok := factsOf(b, HookPlace, placeSize)
	return ok && decodePlace(b, facts, f, placeSize+identitySize+moreSize, spare)
}

// decodePlace reads the facts of a place or a score frame. traits is the offset of the traits.
func decodePlace(b, facts []byte, f *PlaceFacts, traits int, spare *[]Candidate) (ok bool) {
	if len(b) < HeaderSize || len(facts) < placeSize || !decodeRequest(b, facts, &f.Request, placeSize, traits) {
		return false
	}
	f.Flow = Flow(facts[placeFlow])
	f.Fixed = int32(get32(facts, placeFixed))
	f.Adapters = get32(facts, reqFlags)&flagAdapters != 0
	f.Sequence = get64(b, offSequence)
	f.Random = get64(b, offRandom)
	f.Scored, f.Scale = false, 0
	from, n, stride := int(get32(facts, placeRows)), int(get32(facts, placeRows+4)), int(get32(facts, placeRows+8))
	switch {
	case n == 0:
		f.Candidates = nil
	case stride == RowSize && from+n*RowSize <= len(b) && littleEndian && aligned(b, from):
		f.Candidates = rowsView(b, from, n)
	case stride < RowSize || n > (len(b)-from)/stride:
		return false
	default:
		*spare = decodeRows(b[from:], n, stride, (*spare)[:0])
		f.Candidates = *spare
	}
	f.Details, f.Predictions = nil, nil
	if get16(b, offVersion) > 1 {
		if f.Details, ok = decodeDetails(b, facts, n); !ok {
			return false
		}
		if f.Predictions, ok = decodePredictions(b, facts, n); !ok {
			return false
		}
	}
	if f.Pairs = f.Pairs[:0]; get32(facts, placePairs+4) != 0 && !decodePairs(b, facts, f) {
		return false
	}
	return f.Fixed >= -1 && int(f.Fixed) < n
}

func decodePairs(b, facts []byte, f *PlaceFacts) (ok bool) {
	from, n, stride := int(get32(facts, placePairs)), int(get32(facts, placePairs+4)), int(get32(facts, placePairs+8))
	if stride < pairSize || n > (len(b)-from)/stride {
		return false
	}
	for i := range n {
		row := b[from+i*stride:]
		f.Pairs = append(f.Pairs, Pair{
			Prefill: int32(get32(row, pairPrefill)),
			Decode:  int32(get32(row, pairDecode)),
			State:   PairState(row[pairState]),

			TransferMicros: getFloat(row, pairTransfer),
		})
	}
	return true
}

// DecodeMint reads a mint frame into f.
func DecodeMint(b []byte, f *MintFacts) (ok bool) {
	facts, ok := factsOf(b, HookMint, mintSize)
	if !ok {
		return false
	}
	f.UnixMilli = int64(get64(facts, mintUnixMilli))
	f.Counter = uint16(get32(facts, mintCounter))
	f.Node = facts[mintNode]
	f.Worker = facts[mintWorker]
	return true
}

// DecodeLeg reads a leg frame into f.
func DecodeLeg(b []byte, f *LegFacts) (ok bool) {
	facts, ok := factsOf(b, HookLeg, legSize)
	if !ok || len(facts) < legSize || !decodeRequest(b, facts, &f.Request, legSize, legSize+identitySize) {
		return false
	}
	f.Event = LegEvent(facts[legEvent])
	f.Phase = Phase(facts[legPhase])
	f.Flow = Flow(facts[legFlow])
	f.Attempt = get32(facts, legAttempt)
	f.Left = get32(facts, legLeft)
	f.Status = get32(facts, legStatus)
	f.Instance = get32(facts, legInstance)
	f.Rank = int32(get32(facts, legRank))
	f.Partner = get32(facts, legPartner)
	f.PartRank = int32(get32(facts, legPartRank))
	f.ID = get64(facts, legID)
	f.Elapsed = int64(get64(facts, legElapsed))
	if f.Engine, ok = textOf(b, facts, legEngine); !ok {
		return false
	}
	f.Reason, ok = textOf(b, facts, legReason)
	return ok
}

// DecodeFinish reads a finish frame into f.
func DecodeFinish(b []byte, f *FinishFacts) (ok bool) {
	facts, ok := factsOf(b, HookFinish, finSize)
	if !ok || len(facts) < finSize || !decodeRequest(b, facts, &f.Request, finSize, finSize+identitySize) {
		return false
	}
	f.Outcome = Outcome(facts[finOutcome])
	f.Flow = Flow(facts[finFlow])
	f.Failed = Phase(facts[finFailed])
	f.Status = get32(facts, finStatus)
	f.Prefill = get32(facts, finPrefill)
	f.PrefillRank = int32(get32(facts, finPrefillRank))
	f.Decode = get32(facts, finDecode)
	f.DecodeRank = int32(get32(facts, finDecodeRank))
	f.ID = get64(facts, finID)
	f.Placed = int64(get64(facts, finPlaced))
	f.FirstByte = int64(get64(facts, finFirstByte))
	f.Total = int64(get64(facts, finTotal))
	f.PromptTokens = int64(get64(facts, finPromptTokens))
	f.CachedTokens = int64(get64(facts, finCachedTokens))
	f.OutputTokens = int64(get64(facts, finOutputTokens))
	f.Attempts = get32(facts, finAttempts)
	f.Reason, ok = textOf(b, facts, finReason)
	return ok
}

// factsOf returns the facts of a frame of this hook. ok is false when they are
// shorter than atLeast bytes, the size in version 1, or than those of their version.
func factsOf(b []byte, hook Hook, atLeast int) (facts []byte, ok bool) {
	if len(b) < HeaderSize {
		return nil, false
	}
	if word := get64(b, offMagic); word != Magic|1<<32|uint64(hook)<<48 {
		if word != Magic|2<<32|uint64(hook)<<48 {
			return nil, false
		}
		if hook != HookMint && hook != HookRetain && hook != HookScore && hook != HookEvict {
			atLeast += identitySize
		}
		if hook == HookPlace {
			atLeast += moreSize
		}
	}
	header, size := int(get32(b, offHeader)), int(get32(b, offFacts))
	if header < HeaderSize || size < atLeast || header+size > len(b) {
		return nil, false
	}
	return b[header : header+size], true
}

// hasTraits reports whether facts of that size in a frame of version 2 have the traits.
func hasTraits(hook Hook, size int) bool {
	least := identitySize + traitsSize
	switch hook {
	case HookPlan:
		least += planSize
	case HookPlace, HookScore:
		least += placeSize + moreSize
	case HookLeg:
		least += legSize
	case HookFinish:
		least += finSize
	default:
		return false
	}
	return size >= least
}

// decodeRequest reads the request's facts. The identity and the traits of version 2 are
// at these offsets of the facts. The headers of r reuse its memory.
func decodeRequest(b, facts []byte, r *RequestFacts, identity, traits int) (ok bool) {
	if len(facts) < reqSize || len(b) < HeaderSize { // so the compiler leaves out the check of each field
		return false
	}
	if r.extended {
		r.Identity, r.Headers, r.extended = Identity{}, r.Headers[:0], false
		// For guests, Go compiles an assignment of Traits{} to memory.fill, which is slow. So each
		// field is assigned.
		r.Salt, r.Remaining, r.Adapter = 0, 0, ""
		r.Tools, r.Images, r.Audio = false, false, false
	}
	if get16(b, offVersion) > 1 {
		r.extended = true
		r.Identity = Identity{get64(facts, identity+identityClient), get32(facts, identity+identityTenant), get32(facts, identity+identityClass)}
		if len(facts) >= traits+traitsSize && !r.Traits.decode(b, facts, traits) {
			return false
		}
		if at := traits + traitsSize; len(facts) >= at+headersSize {
			if r.Headers, ok = decodeHeaders(b, facts, at, r.Headers); !ok {
				return false
			}
		}
	}
	r.PromptTokens = int64(get64(facts, reqPromptTokens))
	r.MaxTokens = int64(get64(facts, reqMaxTokens))
	r.N = int64(get64(facts, reqN))
	flags := get32(facts, reqFlags)
	r.Stream = flags&flagStream != 0
	r.PairBroken = flags&flagPairBroken != 0
	r.Shared = get32(facts, reqShared)
	r.Turn = int32(get32(facts, reqTurn))
	if r.Model, ok = textOf(b, facts, reqModel); !ok {
		return false
	}
	r.Conversation, r.Prompt = "", ""
	if get32(facts, reqConversation+4)|get32(facts, reqPrompt+4) == 0 { // most policies request neither text
		return true
	}
	if r.Conversation, ok = textOf(b, facts, reqConversation); !ok {
		return false
	}
	r.Prompt, ok = textOf(b, facts, reqPrompt)
	return ok
}

// textOf returns the text whose position the facts give at the offset. It
// shares the frame's memory.
func textOf(b, facts []byte, at int) (s string, ok bool) {
	from, size := int(get32(facts, at)), int(get32(facts, at+4))
	if size == 0 {
		return "", true
	}
	if from+size > len(b) {
		return "", false
	}
	return textView(b[from : from+size]), true
}

// decodeRows appends n rows of that stride, field by field.
func decodeRows(b []byte, n, stride int, rows []Candidate) []Candidate {
	for i := range n {
		rows = append(rows, decodeRow(b[i*stride:]))
	}
	return rows
}

func decodeRow(row []byte) Candidate {
	return Candidate{
		Instance:   get32(row, rowInstance),
		Rank:       int32(get32(row, rowRank)),
		Group:      get32(row, rowGroup),
		Roles:      Role(row[rowRoles]),
		Trial:      row[rowTrial] != 0,
		Pair:       PairState(row[rowPair]),
		Home:       Role(row[rowHome]),
		Requests:   int32(get32(row, rowRequests)),
		Score:      getFloat(row, rowScore),
		Tokens:     int64(get64(row, rowTokens)),
		Queued:     int64(get64(row, rowQueued)),
		BlocksGPU:  get32(row, rowBlocksGPU),
		BlocksCPU:  get32(row, rowBlocksCPU),
		BlocksDisk: get32(row, rowBlocksDisk),

		BlockTokens: get32(row, rowBlockTokens),
		Usage:       getFloat(row, rowUsage),
		TokenMicros: getFloat(row, rowTokenMicros),

		RecentTokens:   getFloat(row, rowRecentTokens),
		RecentRequests: getFloat(row, rowRecentCount),
		Busy:           getFloat(row, rowBusy),
		Adapter:        AdapterState(row[rowAdapter]),
		Media:          row[rowMedia],
		MediaSent:      row[rowMediaSent],
	}
}

func getFloat(b []byte, at int) float32 { return math.Float32frombits(get32(b, at)) }
