package conversation

import (
	"testing"
	"time"
)

// TestShelfCollision: a list with the same hash but another scope or other ids does not
// get the value.
func TestShelfCollision(t *testing.T) {
	now := time.Now()
	for name, asked := range map[string]struct {
		scope string
		ids   []uint32
		ok    bool
	}{
		"another scope": {"b", []uint32{1, 2}, false},
		"other ids":     {"a", []uint32{1, 3}, false},
		"its own":       {"a", []uint32{1, 2}, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := NewShelf[int](4, 16)
			s.Put(OnShelf[int]{Scope: "a", IDs: []uint32{1, 2}, Until: now.Add(time.Minute), Expires: now.Add(time.Minute), Value: 7}, now)
			e := s.full.Front().Value.(*onShelf[int])
			delete(s.byHash, e.hash)
			e.hash = hashScope(asked.scope)
			for _, id := range asked.ids {
				e.hash = hashID(e.hash, id)
			}
			s.byHash[e.hash] = append(s.byHash[e.hash], e)
			if o, hasValue, ok := s.Take(asked.scope, asked.ids, now); ok != asked.ok || hasValue != ok || ok && o.Value != 7 {
				t.Errorf("got %d, %v", o.Value, ok)
			}
		})
	}
}
