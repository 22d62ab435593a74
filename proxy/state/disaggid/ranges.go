package disaggid

import (
	"slices"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// Width is the id-time of a reserved block and of a granted range: 614 million ids of
// each line. A worker requests the next range when half is left; this half lasts for 8
// hours at 10,000 ids a second. A process that dies loses the unused rest of its range.
// So a larger width would be worse: already with this width, a process that starts every
// five seconds would use up all id-time until 2042 in 47 days.
const Width = 10 * time.Minute

// Fresh is the time after which a range, or a block for grants, is replaced if another
// one is available. So the id-times of all ids in flight differ by at most some hours.
// Engines that derive several numbers from one id need this (SGLang's rooms).
const Fresh = 6 * time.Hour

// Block is id-time that an issuer may grant: from From until before Until, on the lines
// of a node with the worker numbers First to First+Lines-1. Before a block is used, the
// mark below which id-time is reserved is raised to Until, so that no two blocks share an
// id.
type Block struct {
	Node         uint8
	First, Lines uint8 // at most 64 in all
	From, Until  int64 // Unix ms
}

// maxRows bounds the number of holders in the table. The table has more rows than a node
// has lines, so that no holder is dropped while it waits for its grant.
const maxRows = 4 << workerBits

// Ranges splits reserved blocks into ranges for Sources. It needs no memory of the grants
// of earlier issuers, because their blocks were different. Safe for concurrent use.
type Ranges struct {
	width time.Duration

	mu    sync.Mutex
	block Block                // guarded by mu
	began int64                // guarded by mu; where the block begins that was added last
	next  [maxWorker + 1]int64 // start of the ungranted id-time of each line; guarded by mu
	rows  []row                // guarded by mu; those granted last are last
}

// row is the last grant of one holder.
type row struct {
	ask Ask
	r   Range
}

// NewRanges returns an issuer of ranges of the given width, without a block.
func NewRanges(width time.Duration) *Ranges { return &Ranges{width: width} }

// Add adds a reserved block. The ungranted id-time of the previous block is still granted
// only if the new block follows the previous one without a gap.
func (g *Ranges) Add(b Block) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.began = b.From
	if o := g.block; o.Node == b.Node && o.First == b.First && o.Lines == b.Lines && o.Until == b.From {
		g.block.Until = b.Until
		return
	}
	g.block = b
	for l := range b.Lines {
		g.next[l] = b.From
	}
}

// Lacks returns the width of the block that must be reserved now; 0 while the last block
// is fresh and half of its ranges are left.
func (g *Ranges) Lacks(now time.Time) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	var left int64
	for l := range g.block.Lines {
		left += g.block.Until - g.next[l]
	}
	if 2*left > int64(g.block.Lines)*g.width.Milliseconds() && Clock(now)-g.began < Fresh.Milliseconds() {
		return 0
	}
	return g.width
}

// Grant returns the next range for the holder. If the holder repeats its last request, the
// answer has not arrived, and Grant returns the same range again. False: nothing is left.
func (g *Ranges) Grant(a Ask) (Range, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	at := slices.IndexFunc(g.rows, func(r row) bool { return r.ask.Holder == a.Holder })
	if at >= 0 && g.rows[at].ask == a {
		return g.rows[at].r, true
	}
	line := uint8(0) // the line with the most id-time left
	for l := range g.block.Lines {
		if g.next[l] < g.next[line] {
			line = l
		}
	}
	r := Range{
		Node: g.block.Node, Worker: g.block.First + line,
		From: g.next[line], Until: min(g.next[line]+g.width.Milliseconds(), g.block.Until),
	}
	if r.From == r.Until {
		return Range{}, false
	}
	g.next[line] = r.Until
	switch {
	case at >= 0:
		g.rows = slices.Delete(g.rows, at, at+1)
	case len(g.rows) == maxRows:
		g.rows = slices.Delete(g.rows, 0, 1)
	}
	g.rows = append(g.rows, row{a, r})
	return r, true
}

// AppendTable appends the last grant of each holder, for Source.ExtendBy. All holders can
// get the same bytes.
func (g *Ranges) AppendTable(b []byte) []byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	m := new(fleetpb.IDRanges)
	for _, r := range g.rows {
		m.Ranges = append(m.Ranges, &fleetpb.IDRange{
			Holder: uint64(r.ask.Holder), Node: uint32(r.r.Node), Worker: uint32(r.r.Worker), FromMs: r.r.From, UntilMs: r.r.Until,
		})
	}
	return fleetpb.Append(b, m)
}
