package shared

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/pdproxy/pdproxy/abi/host"
)

func TestCompareAndSwap(t *testing.T) {
	var s Store
	sp := s.Open("vm")
	defer sp.Release()
	if _, _, status := sp.Get("k"); status != host.NotFound {
		t.Fatalf("absent key: %d", status)
	}
	if status := sp.Set("k", []byte("a"), 77); status != host.OK {
		t.Fatalf("a new key is made whatever the cas: %d", status)
	}
	value, first, status := sp.Get("k")
	if string(value) != "a" || first == 0 || status != host.OK {
		t.Fatalf("got %q %d %d", value, first, status)
	}
	if status := sp.Set("k", []byte("b"), first+1); status != host.CASMismatch {
		t.Fatalf("wrong cas: %d", status)
	}
	if status := sp.Set("k", []byte("b"), first); status != host.OK {
		t.Fatalf("right cas: %d", status)
	}
	if status := sp.Set("k", []byte("c"), first); status != host.CASMismatch {
		t.Fatalf("old cas: %d", status)
	}
	if status := sp.Set("k", []byte("d"), 0); status != host.OK {
		t.Fatalf("cas 0: %d", status)
	}
	if value, cas, _ := sp.Get("k"); string(value) != "d" || cas == first || cas == 0 {
		t.Fatalf("got %q %d", value, cas)
	}
}

func TestCASComesRoundWithoutZero(t *testing.T) {
	var s Store
	s.cas.Store(^uint32(0))
	if cas := s.nextCAS(); cas != 1 {
		t.Fatalf("got %d", cas)
	}
}

func TestConcurrentIncrementsAreExact(t *testing.T) {
	var s Store
	var wg sync.WaitGroup
	const users, rounds = 8, 200
	keep := s.Open("vm")
	defer keep.Release()
	keep.Set("n", make([]byte, 8), 0) // an absent key is written with any cas
	for range users {
		wg.Go(func() {
			sp := s.Open("vm")
			defer sp.Release()
			for range rounds {
				for {
					value, cas, _ := sp.Get("n")
					n := binary.LittleEndian.Uint64(value)
					if sp.Set("n", binary.LittleEndian.AppendUint64(nil, n+1), cas) == host.OK {
						break
					}
				}
			}
		})
	}
	wg.Wait()
	value, _, _ := keep.Get("n")
	if n := binary.LittleEndian.Uint64(value); n != users*rounds {
		t.Fatalf("got %d", n)
	}
}

func TestDataDiesWithTheLastUser(t *testing.T) {
	var s Store
	a, b := s.Open("vm"), s.Open("vm")
	other := s.Open("other")
	defer other.Release()
	a.Set("k", []byte("v"), 0)
	q := a.Register("q", a, func(uint32) {})
	if _, _, status := other.Get("k"); status != host.NotFound {
		t.Fatal("data crossed vm_ids")
	}
	a.Release()
	if _, _, status := b.Get("k"); status != host.OK {
		t.Fatal("the first user's end removed the data")
	}
	b.Release()
	c := s.Open("vm")
	defer c.Release()
	if _, _, status := c.Get("k"); status != host.NotFound {
		t.Fatal("the data exists after the last user's end")
	}
	if status := c.Enqueue(q, nil); status != host.NotFound {
		t.Fatalf("queue outlived the last user: %d", status)
	}
	if _, status := c.Resolve("vm", "q"); status != host.NotFound {
		t.Fatalf("the queue's name exists after the last user's end: %d", status)
	}
}

func TestSpaceIsBounded(t *testing.T) {
	var s Store
	sp := s.Open("")
	defer sp.Release()
	big := make([]byte, MaxData-1000)
	if status := sp.Set("big", big, 0); status != host.OK {
		t.Fatal(status)
	}
	if status := sp.Set("more", make([]byte, 1000), 0); status != host.InternalFailure {
		t.Fatalf("beyond the bound: %d", status)
	}
	if status := sp.Set("big", nil, 0); status != host.OK {
		t.Fatal(status)
	}
	if status := sp.Set("more", make([]byte, 1000), 0); status != host.OK {
		t.Fatalf("room was not given back: %d", status)
	}
	q := sp.Register("q", 1, func(uint32) {})
	for sp.Enqueue(q, big[:1<<20]) == host.OK {
	}
	if status := sp.Enqueue(q, big[:1<<20]); status != host.InternalFailure {
		t.Fatalf("full queue: %d", status)
	}
	sp.Dequeue(q)
	if status := sp.Enqueue(q, big[:1<<20]); status != host.OK {
		t.Fatalf("room was not given back: %d", status)
	}
	for i := 0; i < MaxQueues/MaxQueue+2; i++ { // all queues together have a limit, too
		q := sp.Register(fmt.Sprint("more", i), 1, func(uint32) {})
		for sp.Enqueue(q, big[:1<<20]) == host.OK {
		}
	}
	if queued := sp.queued.Load(); queued > MaxQueues || queued < MaxQueues-2<<20 {
		t.Fatalf("%d bytes in queues, the limit is %d", queued, MaxQueues)
	}
	if status := sp.Enqueue(q, big[:1<<20]); status != host.InternalFailure {
		t.Fatalf("all queues are full: %d", status)
	}
	for names := 0; sp.Queue(fmt.Sprint(names, string(big[:1<<16]))) != 0; names++ {
		if names > MaxQueues>>16 {
			t.Fatal("names of queues have no limit")
		}
	}
	for s.items(q) > 0 {
		sp.Dequeue(q)
	}
	if status := sp.Enqueue(q, big[:1<<20]); status != host.OK {
		t.Fatalf("memory was not returned: %d", status)
	}
}

// items returns the number of items in a queue.
func (s *Store) items(id uint32) int { return len(s.queues[id].items) }

func TestQueueKeepsOrderAndTellsTheLastRegistrar(t *testing.T) {
	var s Store
	sp := s.Open("vm")
	defer sp.Release()
	var told []string
	tell := func(who string) func(uint32) {
		return func(q uint32) { told = append(told, fmt.Sprint(who, q)) }
	}
	q := sp.Register("jobs", "a", tell("a"))
	if got, status := sp.Resolve("vm", "jobs"); got != q || status != host.OK {
		t.Fatalf("resolve: %d %d", got, status)
	}
	if _, status := sp.Resolve("vm", "nope"); status != host.NotFound {
		t.Fatal(status)
	}
	if _, status := sp.Dequeue(q); status != host.Empty {
		t.Fatal(status)
	}
	item := []byte("one")
	sp.Enqueue(q, item)
	item[0] = 'X' // a change of the guest's memory must not change the queue
	if again := sp.Register("jobs", "b", tell("b")); again != q {
		t.Fatalf("registering again gave %d, not %d", again, q)
	}
	sp.Enqueue(q, []byte("two"))
	sp.Forget("b")
	sp.Enqueue(q, []byte("three"))
	sp.Forget("a")
	if got := sp.Queue("jobs"); got != q {
		t.Errorf("the queue is %d, not %d", got, q)
	}
	sp.Enqueue(q, []byte("four"))
	want := []string{fmt.Sprint("a", q), fmt.Sprint("b", q), fmt.Sprint("a", q)}
	if !slices.Equal(told, want) {
		t.Fatalf("notifications %v, want %v", told, want)
	}
	for _, want := range []string{"one", "two", "three", "four"} {
		if value, status := sp.Dequeue(q); string(value) != want || status != host.OK {
			t.Fatalf("got %q %d, want %q", value, status, want)
		}
	}
	if status := sp.Enqueue(q+1, nil); status != host.NotFound {
		t.Fatal(status)
	}
	if _, status := sp.Dequeue(q + 1); status != host.NotFound {
		t.Fatal(status)
	}
}

// TestQueuesObeyTheirVMID: the id of a queue gives another vm_id nothing. A vm_id that knows the
// queue by vm_id and name may add items, as with Envoy, but cannot remove any.
func TestQueuesObeyTheirVMID(t *testing.T) {
	var s Store
	victim, thief, sender := s.Open("victim"), s.Open("thief"), s.Open("sender")
	defer victim.Release()
	defer thief.Release()
	ready := 0
	q := victim.Register("q", victim, func(uint32) { ready++ })
	victim.Enqueue(q, []byte("secret"))
	for id := range q + 10 {
		if value, status := thief.Dequeue(id); status != host.NotFound {
			t.Fatalf("dequeue %d: got %q, %d", id, value, status)
		}
		if status := thief.Enqueue(id, []byte("forged")); status != host.NotFound {
			t.Fatalf("enqueue %d: got %d", id, status)
		}
	}
	if ready != 1 {
		t.Fatalf("got %d callbacks", ready)
	}
	for _, vmID := range []string{"", "thief", "sender", "nobody"} {
		if _, status := thief.Resolve(vmID, "q"); status != host.NotFound {
			t.Fatalf("resolve in %q: got %d", vmID, status)
		}
	}
	if own := thief.Register("q", thief, func(uint32) {}); own == q {
		t.Fatal("one name in two vm_ids is one queue")
	}
	if got, status := sender.Resolve("victim", "q"); got != q || status != host.OK {
		t.Fatalf("resolve: %d %d", got, status)
	}
	if status := sender.Enqueue(q, []byte("sent")); status != host.OK || ready != 2 {
		t.Fatalf("enqueue after resolve: %d, %d callbacks", status, ready)
	}
	if _, status := sender.Dequeue(q); status != host.NotFound {
		t.Fatalf("dequeue after resolve: %d", status)
	}
	if status := thief.Enqueue(q, nil); status != host.NotFound {
		t.Fatalf("one vm_id's resolve opened the queue for another: %d", status)
	}
	sender.Release()
	again := s.Open("sender")
	defer again.Release()
	if status := again.Enqueue(q, nil); status != host.NotFound {
		t.Fatalf("the right to enqueue outlived the last user of the vm_id: %d", status)
	}
	for _, want := range []string{"secret", "sent"} {
		if value, status := victim.Dequeue(q); string(value) != want || status != host.OK {
			t.Fatalf("got %q %d, want %q", value, status, want)
		}
	}
}

func TestQueueUnderManyHands(t *testing.T) {
	var s Store
	sp := s.Open("vm")
	defer sp.Release()
	var mu sync.Mutex
	ready := 0
	q := sp.Register("q", "x", func(uint32) { mu.Lock(); ready++; mu.Unlock() })
	var wg sync.WaitGroup
	const hands, items = 4, 500
	for h := range hands {
		wg.Go(func() {
			for i := range items {
				sp.Enqueue(q, []byte{byte(h), byte(i >> 8), byte(i)})
			}
		})
	}
	wg.Wait()
	if ready != hands*items {
		t.Fatalf("got %d notifications", ready)
	}
	var last [hands][]byte
	for range hands * items {
		value, status := sp.Dequeue(q)
		if status != host.OK || bytes.Compare(value[1:], last[value[0]]) <= 0 && last[value[0]] != nil {
			t.Fatalf("got %v after %v (%d)", value, last[value[0]], status)
		}
		last[value[0]] = value[1:]
	}
}
