package core

// AwaitKV counts the blocks of a sequence as pinned: they are reserved for KV
// that a peer will send. ReceivedKV ends this before the blocks are used or
// freed.
func (r *Rank) AwaitKV(s *Sequence) { r.countPins(s, 1) }

func (r *Rank) ReceivedKV(s *Sequence) { r.countPins(s, -1) }

func (r *Rank) countPins(s *Sequence, by int) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	for _, id := range s.Blocks {
		r.Cache.Blocks[id].Pins += by
	}
}
