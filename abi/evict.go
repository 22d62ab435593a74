package abi

// EvictFacts are the facts of a request that waits for its place among the running requests, and of
// running requests of lower classes. The evict policy may end one of them, so that the waiting
// request runs.
type EvictFacts struct {
	Saturated     bool // the request waits because the engines of its model are saturated, not for a place
	Priority      int32
	Class, Tenant uint32 // LabelID of the names; 0: none
	PromptTokens  int64
	Remaining     int64 // ms until the deadline of the first token; 0: none

	// Running are the running requests that the policy may end, those of the lowest priority first,
	// and of these the ones that got their places last. There is at least one, and MaxEvictable at most.
	Running []Evictable
}

// MaxEvictable bounds EvictFacts.Running.
const MaxEvictable = 32

// Evictable is a running request that the evict policy may end.
type Evictable struct {
	Priority      int32
	Class, Tenant uint32 // LabelID of the names; 0: none
	// Phase is PhaseNone before the request has an engine, Prefill until its answer begins, then Decode.
	Phase           Phase
	Prefill, Decode uint32 // instances; 0: none
	AgeMicros       int64  // since the request got its place
	PromptTokens    int64
	Sent            int64 // events of the answer that have been sent
}

// EvictNone is the answer of the evict policy that ends no request.
const EvictNone = -1

// PackEvict returns the row as pdproxy_v1_on_evict returns it.
func PackEvict(row int32) uint64 { return uint64(int64(row) + 1) }

// UnpackEvict is the inverse of PackEvict. ok is false if the answer is no row of the frame.
func UnpackEvict(v uint64, f *EvictFacts) (row int32, ok bool) {
	if v > uint64(len(f.Running)) {
		return EvictNone, false
	}
	return int32(v) - 1, true
}

// Offsets of the facts of an evict frame, which has no request and is the same in both versions.
const (
	evictFlags        = 0
	evictPriority     = 4
	evictClass        = 8
	evictTenant       = 12
	evictPromptTokens = 16
	evictRemaining    = 24
	evictRunning      = 32 // offset, count, stride
	evictSize         = 48

	runningPriority     = 0
	runningClass        = 4
	runningTenant       = 8
	runningPhase        = 12
	runningPrefill      = 16
	runningDecode       = 20
	runningAge          = 24
	runningPromptTokens = 32
	runningSent         = 40
	runningSize         = 48

	flagSaturated = 1 << 0
)

// FrameSize returns the size of the facts' frame, the same in both versions.
func (f *EvictFacts) FrameSize() int { return HeaderSize + evictSize + len(f.Running)*runningSize }

// AppendEvict appends a frame of the evict hook.
func AppendEvict(dst []byte, h *Header, f *EvictFacts) []byte {
	w := begin(dst, HookEvict, h, evictSize, f.FrameSize())
	if f.Saturated {
		put32(w.facts, evictFlags, flagSaturated)
	}
	put32(w.facts, evictPriority, uint32(f.Priority))
	put32(w.facts, evictClass, f.Class)
	put32(w.facts, evictTenant, f.Tenant)
	put64(w.facts, evictPromptTokens, uint64(f.PromptTokens))
	put64(w.facts, evictRemaining, uint64(f.Remaining))
	w.section(evictRunning, len(f.Running), runningSize)
	for i := range f.Running {
		w.running(&f.Running[i])
	}
	return w.dst
}

func (w *writer) running(r *Evictable) {
	at := len(w.dst)
	w.dst = w.dst[:at+runningSize]
	row := w.dst[at:]
	put32(row, runningPriority, uint32(r.Priority))
	put32(row, runningClass, r.Class)
	put32(row, runningTenant, r.Tenant)
	put32(row, runningPhase, uint32(r.Phase))
	put32(row, runningPrefill, r.Prefill)
	put32(row, runningDecode, r.Decode)
	put64(row, runningAge, uint64(r.AgeMicros))
	put64(row, runningPromptTokens, uint64(r.PromptTokens))
	put64(row, runningSent, uint64(r.Sent))
}

// DecodeEvict reads an evict frame into f, and reuses the memory of f.Running.
func DecodeEvict(b []byte, f *EvictFacts) (ok bool) {
	facts, ok := factsOf(b, HookEvict, evictSize)
	if !ok {
		return false
	}
	*f = EvictFacts{
		Saturated: get32(facts, evictFlags)&flagSaturated != 0, Priority: int32(get32(facts, evictPriority)),
		Class: get32(facts, evictClass), Tenant: get32(facts, evictTenant),
		PromptTokens: int64(get64(facts, evictPromptTokens)), Remaining: int64(get64(facts, evictRemaining)),
		Running: f.Running[:0],
	}
	from, count, stride := int(get32(facts, evictRunning)), int(get32(facts, evictRunning+4)), int(get32(facts, evictRunning+8))
	if count > MaxEvictable || stride < runningSize || from > len(b) || count*stride > len(b)-from {
		return false
	}
	for row := b[from:]; count > 0; count-- {
		f.Running = append(f.Running, Evictable{
			Priority: int32(get32(row, runningPriority)), Class: get32(row, runningClass), Tenant: get32(row, runningTenant),
			Phase: Phase(get32(row, runningPhase)), Prefill: get32(row, runningPrefill), Decode: get32(row, runningDecode),
			AgeMicros: int64(get64(row, runningAge)), PromptTokens: int64(get64(row, runningPromptTokens)), Sent: int64(get64(row, runningSent)),
		})
		row = row[stride:]
	}
	return true
}
