package coordinator

import (
	"maps"
	"slices"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// The tests of package coordinator_test use these internals.
const (
	MaxWaiting    = maxWaiting
	BytesPerToken = bytesPerToken
	UsualAnswer   = usualAnswer
	LongAnswer    = longAnswer
	MaxSequence   = maxSequences
)

var Expected = expected

// SetIDs makes the coordinator take its ids from s.
func (l *Local) SetIDs(s *disaggid.Source) { l.mint = s }

// SetFallback sets the Decider that answers if the first Decider does not.
func (l *Local) SetFallback(d Decider) { l.fallback = d }

// HoldID adds an id to the set of ids in flight.
func (l *Local) HoldID(id uint64) bool { return l.leases.live.Add(id) }

// Waiting returns the number of comparisons that wait for Run.
func (l *Local) Waiting() int { return len(l.comparisons.queue) }

// SequenceTable is the table of sequences by model.
type SequenceTable = sequenceTable

// Of returns the sequence of a pool's model.
func (t *sequenceTable) Of(p *engine.Pool, s *engine.Snapshot) any { return t.of(p, s) }

// Add adds a sequence of a model.
func (t *sequenceTable) Add(model string) { (*t.models.Load())[model] = &sequence{} }

// Models lists the models of the table.
func (t *sequenceTable) Models() []string { return slices.Sorted(maps.Keys(*t.models.Load())) }
