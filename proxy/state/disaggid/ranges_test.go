package disaggid

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// start is the beginning of id-time. The tests reserve from there on.
var start = time.UnixMilli(Epoch)

func drain(s *Source) (ids []uint64) {
	for {
		f, ok := s.Next()
		if !ok {
			return ids
		}
		ids = append(ids, Pack(f))
	}
}

// grant gives the source the requested range, encoded as on the wire.
func grant(t *testing.T, g *Ranges, s *Source) {
	t.Helper()
	ask, few := s.Ask()
	if !few {
		t.Fatal("Ask requests no range from an empty source")
	}
	read := AskOf(ask.Message())
	if read != ask {
		t.Fatalf("%v read as %v", ask, read)
	}
	g.Grant(read)
	if err := s.ExtendBy(g.AppendTable(nil)); err != nil {
		t.Fatal(err)
	}
}

func TestSourceUsesItsRangesUp(t *testing.T) {
	s := NewSource()
	if _, ok := s.Next(); ok {
		t.Error("an id of no range")
	}
	a, b := Range{Node: 3, Worker: 1, From: Epoch + 10, Until: Epoch + 12}, Range{Node: 4, Worker: 63, From: Epoch + 2, Until: Epoch + 3}
	for range 3 { // a grant may arrive repeatedly
		s.Extend(a)
	}
	if _, few := s.Ask(); few {
		t.Error("Ask requests a range although a whole range is left")
	}
	for range 1024 {
		next(t, s)
	}
	if ask, few := s.Ask(); !few || ask.Taken != 1 {
		t.Errorf("Ask with half of the range left: %v, %v", ask, few)
	}
	s.Extend(b)
	s.Extend(a)
	if got := len(drain(s)); got != 2048 {
		t.Errorf("got %d ids of both ranges, want 2048", got)
	}
	s.Extend(a)
	s.Extend(b)
	if n := len(drain(s)); n != 0 {
		t.Errorf("%d ids were issued twice", n)
	}
	s.Extend(Range{Node: 3, Worker: 1, From: Epoch + 11, Until: Epoch + 13}) // only a part of the range is new
	if f, ok := s.Next(); !ok || f.UnixMilli != Epoch+12 || f.Counter != 0 {
		t.Errorf("s.Next() = %+v", f)
	}
}

func TestGrants(t *testing.T) {
	g := NewRanges(2 * time.Millisecond)
	if g.Lacks(start) != 2*time.Millisecond {
		t.Error("Lacks of empty ranges is not the maximum")
	}
	if _, ok := g.Grant(Ask{Holder: 1}); ok {
		t.Error("a grant of nothing")
	}
	g.Add(Block{Node: 7, First: 5, Lines: 2, From: Epoch, Until: Epoch + 2})
	want := Range{Node: 7, Worker: 5, From: Epoch, Until: Epoch + 2}
	for range 2 { // the request repeats until the grant has arrived
		if r, ok := g.Grant(Ask{Holder: 1}); r != want || !ok {
			t.Errorf("g.Grant = %+v, want %+v", r, want)
		}
	}
	if g.Lacks(start) == 0 {
		t.Error("Lacks = 0 although one of two lines has no ids")
	}
	g.Add(Block{Node: 7, First: 5, Lines: 2, From: Epoch + 2, Until: Epoch + 4})
	if g.Lacks(start) != 0 {
		t.Error("three of four are not enough")
	}
	want.Worker = 6
	if r, _ := g.Grant(Ask{Holder: 1, Taken: 1}); r != want {
		t.Errorf("g.Grant = %+v, want %+v", r, want)
	}
	want.Worker, want.From, want.Until = 5, Epoch+2, Epoch+4
	if r, _ := g.Grant(Ask{Holder: 2}); r != want {
		t.Errorf("g.Grant = %+v, want %+v", r, want)
	}
	// Another process got some of the id-time in between. The rest before it is not used.
	g.Add(Block{Node: 7, First: 5, Lines: 2, From: Epoch + 6, Until: Epoch + 7})
	want = Range{Node: 7, Worker: 5, From: Epoch + 6, Until: Epoch + 7}
	if r, _ := g.Grant(Ask{Holder: 3}); r != want {
		t.Errorf("g.Grant = %+v, want %+v", r, want)
	}
	table := g.AppendTable(nil)
	for holder, there := range map[Holder]bool{1: true, 2: true, 3: true, 4: false} {
		if _, ok, err := FindRange(table, holder); ok != there || err != nil {
			t.Errorf("holder %d: %v, %v", holder, ok, err)
		}
	}
	if _, _, err := FindRange(table[1:], 1); err == nil {
		t.Error("half a row was read")
	}
}

// TestFreshRanges: nothing is granted from a block that is six hours old if there is
// another block. A source leaves an old range when it gets a new one.
func TestFreshRanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(start))
		g, s := NewRanges(Width), NewSource()
		reserve := func() {
			now := Clock(time.Now())
			g.Add(Block{Lines: 64, From: now, Until: now + g.Lacks(time.Now()).Milliseconds()})
		}
		reserve()
		grant(t, g, s)
		next(t, s)
		time.Sleep(Fresh - time.Second)
		if _, few := s.Ask(); few || g.Lacks(time.Now()) != 0 {
			t.Error("a new range is not fresh")
		}
		time.Sleep(time.Second)
		if g.Lacks(time.Now()) != Width {
			t.Error("the block is fresh")
		}
		if f, ok := s.Next(); !ok || f.UnixMilli != Epoch { // the old range is used while there is no other
			t.Errorf("s.Next() = %+v", f)
		}
		reserve()
		grant(t, g, s)
		if f, _ := s.Next(); f.UnixMilli != time.Now().UnixMilli() || f.Counter != 0 {
			t.Errorf("s.Next() = %+v", f)
		}
		if _, few := s.Ask(); few || g.Lacks(time.Now()) != 0 {
			t.Error("the new ones are not fresh")
		}
		if n := g.Lacks(start); n != 0 { // a block does not become old if the clock is set back
			t.Errorf("%v is lacking", n)
		}
	})
}

// TestGrantsForgetTheOldest: the table of grants is bounded.
func TestGrantsForgetTheOldest(t *testing.T) {
	g := NewRanges(time.Millisecond)
	g.Add(Block{Lines: 64, From: Epoch, Until: Epoch + 100})
	for h := range Holder(maxRows + 1) {
		g.Grant(Ask{Holder: h})
	}
	table := g.AppendTable(nil)
	if len(table) > maxRows*40 {
		t.Errorf("got %d bytes", len(table))
	}
	if _, there, _ := FindRange(table, 0); there {
		t.Error("the first is there")
	}
	if _, there, _ := FindRange(table, maxRows); !there {
		t.Error("the last is not")
	}
}

// TestTwoIssuersInTurn: a source requests ranges from two issuers in turn, as it does
// while two coordinators alternate. Each request gets a range, and no id is granted
// twice.
func TestTwoIssuersInTurn(t *testing.T) {
	var issuers []*Ranges
	for n := range uint8(2) {
		g := NewRanges(time.Millisecond)
		g.Add(Block{Node: n, Lines: 64, From: Epoch, Until: Epoch + 8})
		issuers = append(issuers, g)
	}
	s := NewSource()
	var ids []uint64
	for i := range 20 {
		grant(t, issuers[i%2], s)
		if err := s.ExtendBy(issuers[(i+1)%2].AppendTable(nil)); err != nil { // an old table
			t.Fatal(err)
		}
		fresh := drain(s)
		if len(fresh) != 1024 {
			t.Fatalf("grant %d has %d ids", i, len(fresh))
		}
		ids = append(ids, fresh...)
	}
	slices.Sort(ids)
	if n := len(slices.Compact(ids)); n != 20*1024 {
		t.Errorf("got %d different ids", n)
	}
}

// TestExtendHammer: many goroutines take ids from a source while others extend it.
func TestExtendHammer(t *testing.T) {
	g, s := NewRanges(time.Millisecond), NewSource()
	g.Add(Block{Lines: 64, From: Epoch, Until: Epoch + 2})
	var (
		mu  sync.Mutex
		ids []uint64
		wg  sync.WaitGroup
	)
	for range 4 {
		wg.Go(func() {
			var mine []uint64
			for range 64 {
				if ask, few := s.Ask(); few {
					if r, ok := g.Grant(ask); ok {
						s.Extend(r)
					}
				}
				for range 200 {
					if f, ok := s.Next(); ok {
						mine = append(mine, Pack(f))
					}
				}
			}
			mu.Lock()
			defer mu.Unlock()
			ids = append(ids, mine...)
		})
	}
	wg.Wait()
	n := len(ids)
	slices.Sort(ids)
	if u := len(slices.Compact(ids)); u != n || n < 20000 {
		t.Errorf("%d ids, %d of them distinct", n, u)
	}
}

// TestEndOfIDTime: after the end of id-time there is no id of another line and no id from
// the beginning.
func TestEndOfIDTime(t *testing.T) {
	s := NewSource()
	s.Extend(Range{Node: 255, Worker: 63, From: End - 1, Until: End})
	ids := drain(s)
	if len(ids) != 1024 || !slices.IsSorted(ids) || !InRange(ids[1023]) {
		t.Errorf("%d ids, up to %d", len(ids), ids[len(ids)-1])
	}
	for _, at := range []time.Time{{}, time.UnixMilli(0), time.UnixMilli(End), time.UnixMilli(1<<63 - 1)} {
		if c := Clock(at); c != Epoch {
			t.Errorf("Clock(%v) = %d", at, c)
		}
	}
	if now := time.UnixMilli(Epoch + 5); Clock(now) != Epoch+5 {
		t.Error("a clock that can be right is not believed")
	}
}

// TestGrantedRangesAreChecked: a source accepts a range from a peer only if it is within
// id-time and on a valid line.
func TestGrantedRangesAreChecked(t *testing.T) {
	for _, tt := range []struct {
		name string
		r    Range
		ok   bool
	}{
		{"all of id-time", Range{Node: 255, Worker: maxWorker, From: Epoch, Until: End}, true},
		{"before the epoch", Range{From: Epoch - 1, Until: End}, false},
		{"beyond the end", Range{From: Epoch, Until: End + 1}, false},
		{"empty", Range{From: Epoch + 1, Until: Epoch + 1}, false},
		{"backwards", Range{From: Epoch + 1, Until: Epoch}, false},
		{"no such line", Range{Worker: maxWorker + 1, From: Epoch, Until: End}, false},
	} {
		table := fleetpb.Append(nil, &fleetpb.IDRanges{Ranges: []*fleetpb.IDRange{
			{Holder: 7, Node: uint32(tt.r.Node), Worker: uint32(tt.r.Worker), FromMs: tt.r.From, UntilMs: tt.r.Until},
		}})
		if r, found, err := FindRange(table, 7); !found || r != tt.r || (err == nil) != tt.ok {
			t.Errorf("%s: FindRange(table, 7) = %+v, %v, %v", tt.name, r, found, err)
		}
	}
}

func FuzzTable(f *testing.F) {
	g := NewRanges(time.Millisecond)
	g.Add(Block{Node: 1, Lines: 64, From: Epoch, Until: Epoch + 8})
	for range 3 {
		g.Grant(Ask{Holder: Holder(rand.Uint64())})
	}
	table := g.AppendTable(nil)
	for _, r := range g.rows {
		f.Add(uint64(r.ask.Holder), table)
		f.Add(uint64(r.ask.Holder), table[:len(table)-1])
	}
	f.Add(uint64(0), []byte{})
	f.Fuzz(func(t *testing.T, holder uint64, table []byte) {
		r, ok, err := FindRange(table, Holder(holder))
		if !ok || err != nil {
			return
		}
		s := NewSource()
		s.Extend(r)
		first, there := s.Next()
		if !there || !InRange(Pack(first)) || first.Worker > maxWorker || first.UnixMilli < Epoch || first.UnixMilli >= End {
			t.Errorf("range %+v, facts %+v", r, first)
		}
	})
}
