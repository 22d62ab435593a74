package kvindex

// Translate appends the index's hashes of the first blocks of a prompt. engine holds
// the engines' own hashes of these blocks. It stops at the first block that none of the
// targets has reported. The targets must use the same hash function. No tokens are
// needed.
func (x *Index) Translate(dst []Hash, engine []uint64, targets []Target) []Hash {
	known := make([]*target, 0, len(targets))
	for _, t := range targets {
		if tg := x.at(t); tg != nil {
			known = append(known, tg)
		}
	}
	from := len(dst)
	for range known { // each round adds at least one block
		start := len(dst)
		for _, tg := range known {
			dst = tg.translate(dst, engine[len(dst)-from:])
		}
		if len(dst) == start {
			break
		}
	}
	return dst
}

// translate appends the index's hashes of the first engine hashes, up to the first one
// that the target does not know.
func (t *target) translate(dst []Hash, engine []uint64) []Hash {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range engine {
		h := Hash(t.engine.get(e) & hashMask)
		if h == 0 {
			break
		}
		dst = append(dst, h)
	}
	return dst
}
