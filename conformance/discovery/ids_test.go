package discovery

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/coordinator/idstore"
	"github.com/pdproxy/pdproxy/proxy/etcd"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// noon is a time within id-time.
var noon = time.Date(2026, 3, 4, 12, 0, 0, 0, time.UTC)

// ids is the store of a coordinator, with a separate connection.
func (s *store) ids(name string) *idstore.Etcd {
	e := idstore.NewEtcd(etcd.Client([]string{s.URL()}), idstore.Prefix, name)
	s.t.Cleanup(func() { _ = e.Close(context.WithoutCancel(s.t.Context())) }) // some tests close it earlier
	return e
}

// reserve reserves a block of one second, which must succeed.
func reserve(t *testing.T, e *idstore.Etcd) disaggid.Block {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	b, err := e.Reserve(ctx, noon, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// onlyNodes makes these node numbers free and no others.
func (s *store) onlyNodes(t *testing.T, free ...int) {
	t.Helper()
	there := make(map[int]bool)
	for _, n := range free {
		there[n] = true
	}
	for n := range 256 {
		if !there[n] {
			if _, err := s.Client().Put(t.Context(), idstore.Prefix+"nodes/"+strconv.Itoa(n), "another"); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// expire frees a node number, as the end of its lease does.
func (s *store) expire(t *testing.T, node uint8) {
	t.Helper()
	if d, err := s.Client().Delete(t.Context(), fmt.Sprintf("%snodes/%d", idstore.Prefix, node)); err != nil || d.Deleted != 1 {
		t.Fatalf("node %d was not reserved: %v", node, err)
	}
}

// TestCoordinatorsHaveNodesOfTheirOwn: each coordinator has its own node. Its
// blocks continue where its last one ended, also in the process that succeeds
// it.
func TestCoordinatorsHaveNodesOfTheirOwn(t *testing.T) {
	s := startStore(t)
	s.onlyNodes(t, 3, 200)
	a, b, c := s.ids("a"), s.ids("b"), s.ids("c")
	first, other := reserve(t, a), reserve(t, b)
	if first.Node == other.Node || int(first.Node)+int(other.Node) != 203 || first.Lines != 64 {
		t.Errorf("%+v and %+v", first, other)
	}
	if again := reserve(t, a); again.Node != first.Node || again.From != first.Until {
		t.Errorf("%+v after %+v", again, first)
	}
	if _, err := c.Reserve(t.Context(), noon, time.Second); err == nil || !strings.Contains(err.Error(), "every node number") {
		t.Errorf("a third of two: %v", err)
	}
	if err := b.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if third := reserve(t, c); third.Node != other.Node || third.From != other.Until {
		t.Errorf("%+v after %+v", third, other)
	}
	for _, e := range []*idstore.Etcd{a, b, c} {
		if err := e.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	left, err := s.Client().Get(t.Context(), idstore.Prefix+"nodes/200")
	if err != nil || left.Count != 0 {
		t.Errorf("%d keys remain: %v", left.Count, err)
	}
}

// TestLostNodeIsFenced: a coordinator that has lost its node without noticing
// reserves nothing on it. Its earlier reservations are before all of the next
// coordinator's.
func TestLostNodeIsFenced(t *testing.T) {
	s := startStore(t)
	s.onlyNodes(t, 77)
	old, next := s.ids("old"), s.ids("next")
	first := reserve(t, old)
	s.expire(t, 77)
	second := reserve(t, next)
	if second.Node != 77 || second.From != first.Until {
		t.Errorf("%+v after %+v", second, first)
	}
	if b, err := old.Reserve(t.Context(), noon, time.Second); err == nil {
		t.Errorf("%+v without a node", b)
	}
	if err := next.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if third := reserve(t, old); third.Node != 77 || third.From != second.Until {
		t.Errorf("%+v after %+v", third, second)
	}
	if _, err := s.Client().Put(t.Context(), idstore.Prefix+"marks/77", "soon"); err != nil {
		t.Fatal(err)
	}
	if b, err := old.Reserve(t.Context(), noon, time.Second); err == nil {
		t.Errorf("%+v of no mark", b)
	}
}

// TestIDsWhileEtcdIsAway: without etcd a coordinator continues with its reservations.
// When etcd is available again, the coordinator reserves more ids on its node, even if
// etcd has lost its data.
func TestIDsWhileEtcdIsAway(t *testing.T) {
	for name, lose := range map[string]bool{"as it was": false, "empty": true} {
		t.Run(name, func(t *testing.T) {
			s := startStore(t)
			e := s.ids("a")
			k := idstore.NewKeeper(e, time.Second, slog.New(slog.DiscardHandler))
			if err := k.Tend(t.Context(), noon); err != nil {
				t.Fatal(err)
			}
			s.Kill()
			var last disaggid.Range
			for holder := range disaggid.Holder(63) { // one line is its own
				r, ok := k.Grant(disaggid.Ask{Holder: holder})
				if !ok {
					t.Fatal("Grant refused a range although ids are reserved")
				}
				last = r
			}
			short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			if err := k.Tend(short, noon); err == nil {
				t.Error("Tend reserved ids although the store does not answer")
			}
			if lose {
				s.Empty()
			}
			s.Start()
			testbed.Eventually(t, "ids are reserved again", func() bool { return k.Tend(t.Context(), noon) == nil })
			r, ok := k.Grant(disaggid.Ask{Holder: 64})
			if !ok || r.Node != last.Node || r.From < last.Until {
				t.Errorf("%+v after %+v", r, last)
			}
			if !lose {
				return
			}
			s.expire(t, r.Node)
			s.onlyNodes(t, int(r.Node))
			if _, err := s.Client().Delete(t.Context(), fmt.Sprintf("%smarks/%d", idstore.Prefix, r.Node)); err != nil {
				t.Fatal(err)
			}
			if b := reserve(t, s.ids("b")); b.From < noon.Add(24*time.Hour).UnixMilli() || b.Node != r.Node {
				t.Errorf("a node whose mark is lost begins at %+v", b)
			}
		})
	}
}
