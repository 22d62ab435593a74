package buffer

import (
	"errors"
	"testing"
)

// TestClientsForget: a client has an entry in Clients only while one of its shares holds more
// than the free part.
func TestClientsForget(t *testing.T) {
	var clients Clients
	budget := new(Budget)
	budget.SetLimit(8 * freeShare)
	share := func() *Share {
		s := new(Share)
		s.Open(budget, &clients, "a")
		return s
	}
	small, large, refused := share(), share(), share()
	steps := []struct {
		name    string
		do      func() error
		err     error
		entries int
	}{
		{"a small request", func() error { return small.Take(freeShare) }, nil, 0},
		{"a large request", func() error { return large.Take(3 * freeShare) }, nil, 1},
		{"a request above the client's half", func() error { return refused.Take(2 * freeShare) }, ErrShare, 1},
		{"the large request becomes small", func() error { large.Release(2 * freeShare); return nil }, nil, 0},
		{"a large request again", func() error { return refused.Take(2 * freeShare) }, nil, 1},
		{"all end", func() error {
			small.Release(freeShare)
			large.Release(freeShare)
			refused.Release(2 * freeShare)
			return nil
		}, nil, 0},
	}
	for _, s := range steps {
		if err := s.do(); !errors.Is(err, s.err) {
			t.Fatalf("%s: got the error %v, want %v", s.name, err, s.err)
		}
		if n := len(clients.held); n != s.entries {
			t.Fatalf("%s: Clients has %d entries, want %d", s.name, n, s.entries)
		}
	}
	if n := budget.Used(); n != 0 {
		t.Errorf("the budget counts %d bytes at the end, want 0", n)
	}
}
