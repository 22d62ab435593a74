package discovery

import (
	"context"
	"log/slog"
	"math/bits"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator/idstore"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// The events of the fleet while it issues its ids, for any number of ids.
const (
	idWorkers   = 64
	idRounds    = 640 // at least; a round is the time between two heartbeats
	idFailovers = 20
	idSteps     = 40 // of the clock, 10 s back
	idRestarts  = 320
)

// TestIDsOfAFleetAreUnique: 64 workers and their coordinators issue ids.
// Coordinators die or wrongly continue to lead, clocks are set back, workers
// restart, and grants are lost, late or duplicated. Every id is compared with
// all others. PDPROXY_IDS is their number.
func TestIDsOfAFleetAreUnique(t *testing.T) {
	total := 2_000_000
	if n := os.Getenv("PDPROXY_IDS"); n != "" {
		var err error
		if total, err = strconv.Atoi(n); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("file", func(t *testing.T) {
		dir := privatedirtest.Open(t)
		f := newIDFleet(t, total, func() idStore {
			return idStore{Store: idstore.NewFile(dir, disaggid.Block{Node: 9, Lines: 64}), lose: func() {}, end: func() {}}
		})
		f.run(t)
	})
	t.Run("etcd", func(t *testing.T) {
		s := startStore(t)
		s.onlyNodes(t, 0, 1, 2, 255) // so that each is used by many
		f := newIDFleet(t, total, func() idStore {
			e := s.ids("c")
			held := noted{e, new(int)}
			return idStore{
				Store: held,
				lose:  func() { s.expire(t, uint8(*held.node)) },
				end: func() {
					if err := e.Close(context.WithoutCancel(t.Context())); err != nil {
						t.Error(err)
					}
				},
			}
		})
		f.run(t)
	})
}

// noted is an etcd store with a known node number.
type noted struct {
	*idstore.Etcd
	node *int
}

func (n noted) Reserve(ctx context.Context, now time.Time, width time.Duration) (disaggid.Block, error) {
	b, err := n.Etcd.Reserve(ctx, now, width)
	if err == nil {
		*n.node = int(b.Node)
	}
	return b, err
}

// idStore is the store of one coordinator, with its failures.
type idStore struct {
	idstore.Store
	lose func() // its node, and it does not notice
	end  func() // its process ends
}

// idCoordinator is a coordinator that leads or wrongly assumes that it does.
type idCoordinator struct {
	keeper *idstore.Keeper
	store  idStore
	ends   int // the round in which a coordinator that does not lead ends
}

// idFleet is the fleet. A seed determines the order of all events, except the
// ids that are issued concurrently within a round.
type idFleet struct {
	t       *testing.T
	rnd     *rand.Rand
	total   int
	each    int // ids of a worker in a round
	width   time.Duration
	open    func() idStore
	now     time.Time
	leader  *idCoordinator // nil: there is no leader
	lost    int            // the round since which there is no leader
	deposed []*idCoordinator
	workers []*disaggid.Source
	tables  [][]byte // published tables
	seen    idSet
	counts  struct{ failovers, steps, restarts, deposedGrants, dry int }
}

func newIDFleet(t *testing.T, total int, open func() idStore) *idFleet {
	each := max(1, total/idRounds/idWorkers)
	f := &idFleet{
		t: t, rnd: rand.New(rand.NewPCG(1, 2)), total: total, each: each, open: open, now: noon,
		width: time.Duration(1+8*each/disaggid.IDs) * time.Millisecond,
		seen:  idSet{lines: make(map[uint64]*[16]uint64)},
	}
	for range idWorkers {
		f.workers = append(f.workers, disaggid.NewSource())
	}
	return f
}

// run issues ids until there are enough.
func (f *idFleet) run(t *testing.T) {
	f.lead()
	for round := 0; round < idRounds || f.seen.count < f.total; round++ {
		f.now = f.now.Add(time.Duration(f.rnd.IntN(20)) * time.Millisecond)
		f.trouble(round)
		f.tend()
		for w := range f.workers {
			f.ask(w)
		}
		f.issue()
		if t.Failed() {
			return
		}
	}
	c := f.counts
	t.Logf("%d ids, %d of them distinct; %d failovers, %d clock steps, %d worker restarts, %d grants by coordinators that no longer lead, %d times a worker without ids",
		f.seen.count, f.seen.distinct(), c.failovers, c.steps, c.restarts, c.deposedGrants, c.dry)
	if d := f.seen.distinct(); d != f.seen.count {
		t.Errorf("%d ids were issued twice", f.seen.count-d)
	}
	if c.failovers < idFailovers || c.steps < idSteps || c.restarts < idRestarts || c.deposedGrants == 0 {
		t.Error("too few failovers, clock steps or restarts for this test")
	}
	if c.dry*1000 > idRounds*idWorkers {
		t.Error("workers use up their ranges before the next ranges arrive")
	}
	for _, d := range append(f.deposed, f.leader) {
		if d != nil {
			d.store.end()
		}
	}
}

// lead starts a new coordinator and makes it the leader.
func (f *idFleet) lead() {
	s := f.open()
	f.leader = &idCoordinator{keeper: idstore.NewKeeper(s, f.width, slog.New(slog.DiscardHandler)), store: s}
}

// trouble makes the unusual events of a round happen.
func (f *idFleet) trouble(round int) {
	if f.leader == nil && (f.rnd.IntN(2) == 0 || round > f.lost+1) {
		f.lead()
	}
	if round%(idRounds/(idFailovers+1)) == 0 && round > 0 && f.leader != nil {
		f.counts.failovers++
		old := f.leader
		f.leader, f.lost = nil, round
		switch f.rnd.IntN(3) {
		case 0: // killed; in etcd its node remains taken for a while
			f.deposed = append(f.deposed, old)
			old.keeper, old.ends = nil, round+5
		case 1: // it continues, and has lost its node
			old.store.lose()
			fallthrough
		default: // it continues with its full state
			f.deposed = append(f.deposed, old)
			old.ends = round + 20
		}
		if f.rnd.IntN(2) == 0 {
			f.lead()
		}
	}
	if round%(idRounds/idSteps) == 0 {
		f.counts.steps++
		f.now = f.now.Add(-10 * time.Second)
	}
	if round%50 == 25 {
		f.now = f.now.Add(disaggid.Fresh) // all reservations are old then
	}
	if round%(idRounds/idRestarts) == 0 {
		f.counts.restarts++
		f.workers[f.rnd.IntN(idWorkers)] = disaggid.NewSource()
	}
	for i := 0; i < len(f.deposed); i++ {
		if d := f.deposed[i]; d.ends <= round {
			d.store.end()
			f.deposed = append(f.deposed[:i], f.deposed[i+1:]...)
			i--
		}
	}
}

// tend lets the live coordinators reserve blocks.
func (f *idFleet) tend() {
	for _, k := range f.keepers() {
		if err := k.Tend(f.t.Context(), f.now); err != nil {
			f.t.Error(err)
		}
	}
}

// keepers returns the live coordinators; the leader is the last.
func (f *idFleet) keepers() (all []*idstore.Keeper) {
	for _, d := range f.deposed {
		if d.keeper != nil {
			all = append(all, d.keeper)
		}
	}
	if f.leader != nil {
		all = append(all, f.leader.keeper)
	}
	return all
}

// ask lets a worker request a range, if it needs one, from the coordinator that
// it takes for the leader, unless the message is lost.
func (f *idFleet) ask(w int) {
	s := f.workers[w]
	if len(f.tables) > 0 && f.rnd.IntN(20) == 0 { // an old table arrives again
		f.extend(s, f.tables[f.rnd.IntN(len(f.tables))])
	}
	keepers := f.keepers()
	ask, few := s.Ask()
	if !few || len(keepers) == 0 {
		return
	}
	at := len(keepers) - 1
	if f.rnd.IntN(4) == 0 {
		at = f.rnd.IntN(len(keepers))
	}
	k := keepers[at]
	read := disaggid.AskOf(ask.Message())
	if _, ok := k.Grant(read); !ok && k.Tend(f.t.Context(), f.now) == nil {
		k.Grant(read)
	}
	if f.leader == nil || k != f.leader.keeper {
		f.counts.deposedGrants++
	}
	table := k.Table()
	if f.tables = append(f.tables, table); len(f.tables) > 100 {
		f.tables = f.tables[1:]
	}
	if f.rnd.IntN(5) > 0 {
		f.extend(s, table)
	}
}

func (f *idFleet) extend(s *disaggid.Source, table []byte) {
	if err := s.ExtendBy(table); err != nil {
		f.t.Error(err)
	}
}

// issue takes ids from all sources at once, and from each with two goroutines.
func (f *idFleet) issue() {
	sources := f.workers
	for _, k := range f.keepers() {
		sources = append(sources[:len(sources):len(sources)], k.Source())
	}
	ids := make([][]uint64, 2*len(sources))
	var wg sync.WaitGroup
	for i := range ids {
		n := f.each / 2
		if i%2 == 0 {
			n = f.each - n
		}
		wg.Go(func() {
			for range n {
				facts, ok := sources[i/2].Next()
				if !ok {
					return
				}
				ids[i] = append(ids[i], disaggid.Pack(facts))
			}
		})
	}
	wg.Wait()
	for i := range ids {
		if ask, _ := sources[i/2].Ask(); len(ids[i]) == 0 && i%2 == 0 && ask.Taken > 0 {
			f.counts.dry++
		}
		for _, id := range ids[i] {
			if !f.seen.add(id) {
				f.t.Errorf("id %d was issued twice", id)
				return
			}
		}
	}
}

// idSet has a bit for each id of every millisecond in which a line has issued
// an id.
type idSet struct {
	lines map[uint64]*[16]uint64
	count int
}

// add returns false for an id that is already in the set, or is invalid.
func (s *idSet) add(id uint64) bool {
	s.count++
	n := id - abi.MinDisaggID
	line := s.lines[n/disaggid.IDs]
	if line == nil {
		line = new([16]uint64)
		s.lines[n/disaggid.IDs] = line
	}
	word, bit := n%disaggid.IDs/64, uint64(1)<<(n%64)
	fresh := line[word]&bit == 0 && disaggid.InRange(id)
	line[word] |= bit
	return fresh
}

// distinct returns the number of ids in the set.
func (s *idSet) distinct() (n int) {
	for _, line := range s.lines {
		for _, word := range line {
			n += bits.OnesCount64(word)
		}
	}
	return n
}
