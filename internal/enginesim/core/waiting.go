package enginesim

// awaitKV counts the blocks of a sequence as pinned: they are reserved for KV
// that a peer will send. receivedKV ends this before the blocks are used or
// freed.
func (r *rank) awaitKV(s *sequence) { r.countPins(s, 1) }

func (r *rank) receivedKV(s *sequence) { r.countPins(s, -1) }

func (r *rank) countPins(s *sequence, by int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range s.blocks {
		r.cache.blocks[id].pins += by
	}
}
