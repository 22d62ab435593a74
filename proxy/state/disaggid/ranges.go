package disaggid

import (
	"encoding/binary"
	"slices"
	"sync"
	"time"
)

// Width is how much id-time an issuer reserves, and a holder is granted, at a
// time: 614 million ids of each line. A worker asks when half of that is left,
// which lasts for eight hours of 10,000 ids a second if nobody answers. Whoever
// dies takes the rest along, so that wider is not better: a process that starts
// every five seconds would use up the id-time there is, until 2042, in 47 days.
const Width = 10 * time.Minute

// Fresh is how long a range is used and a block granted from, if others can be
// had, however much is left of them. So the ids in flight lie within hours of each
// other, which those count on who make more numbers of one id (SGLang's rooms).
const Fresh = 6 * time.Hour

// Block is what an issuer may grant from: an id-time of From or later and before
// Until on Lines lines of a node, which begin with the worker number First.
// Whoever keeps the mark below which id-time has been reserved raises it to Until
// before the block is used, so that no two blocks share an id.
type Block struct {
	Node         uint8
	First, Lines uint8 // at most 64 in all
	From, Until  int64 // Unix ms
}

// maxRows is how many holders are remembered: more than a node has lines, so
// that none is forgotten while it waits for its grant.
const maxRows = 4 << workerBits

// Ranges splits what an issuer has reserved into ranges for those that mint. It
// does not know where its blocks come from, and needs no memory of what earlier
// issuers granted: their blocks were others. Safe for concurrent use.
type Ranges struct {
	width time.Duration

	mu    sync.Mutex
	block Block                // guarded by mu
	began int64                // guarded by mu; where the block begins that was added last
	next  [maxWorker + 1]int64 // guarded by mu; of each line, what is not granted yet
	rows  []row                // guarded by mu; those granted last are last
}

// row is what one holder was granted last.
type row struct {
	ask Ask
	r   Range
}

// NewRanges returns an issuer of ranges of the given width, with nothing to grant
// yet.
func NewRanges(width time.Duration) *Ranges { return &Ranges{width: width} }

// Add takes in a reserved block. Of an older one only what the new one follows
// without a gap goes on being granted.
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

// Lacks is the width of the block that is to be reserved now, 0 as long as the
// last one is fresh and half of the lines' ranges are left.
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

// Grant is the next range of the holder that asks, or the one that it was granted
// when it asked the same before: that has not arrived. False when nothing is left
// to be granted.
func (g *Ranges) Grant(a Ask) (Range, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	at := slices.IndexFunc(g.rows, func(r row) bool { return r.ask.Holder == a.Holder })
	if at >= 0 && g.rows[at].ask == a {
		return g.rows[at].r, true
	}
	line := uint8(0) // the one with the most left
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

// AppendTable appends what each holder was granted last, for Source.ExtendBy: the
// same bytes may go to all of them.
func (g *Ranges) AppendTable(b []byte) []byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, r := range g.rows {
		b = r.r.append(binary.LittleEndian.AppendUint64(b, uint64(r.ask.Holder)))
	}
	return b
}
