package kvindex

// Translate appends to dst our hashes of the blocks at the beginning of a prompt
// that engine names by the engines' own hashes, up to the first that no one of
// the targets has told of: the targets must hash alike. No tokens are needed.
func (x *Index) Translate(dst []Hash, engine []uint64, targets []Target) []Hash {
	known := make([]*target, 0, len(targets))
	for _, t := range targets {
		if tg := x.at(t); tg != nil {
			known = append(known, tg)
		}
	}
	from := len(dst)
	for range known { // each round takes at least one block further
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

// translate appends ours of the first engine hashes, as many as the target knows
// without a gap.
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
