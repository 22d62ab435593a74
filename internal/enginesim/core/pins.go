package enginesim

import "time"

// pin moves a sequence's blocks to a pinned set under key. They stay until
// unpin, or until lease passes without a renewal (0: forever). The sequence
// keeps its slot until release. A previous set under the same key is released
// first. An engine that has ended pins nothing: release frees the blocks.
func (r *rank) pin(s *sequence, key string, lease time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.e.ctx.Err() != nil {
		return
	}
	r.dropPin(key)
	p := &pin{key: key, blocks: s.blocks}
	s.blocks = nil
	for _, id := range p.blocks {
		r.cache.blocks[id].pins++
	}
	r.cache.pins[key] = p
	if lease > 0 {
		p.ends = time.Now().Add(lease)
		p.timer = time.AfterFunc(lease, func() { r.expire(p) })
	}
}

// expire releases a pinned set whose lease has ended.
func (r *rank) expire(p *pin) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cache.pins[p.key] != p {
		return
	}
	if rest := time.Until(p.ends); rest > 0 {
		p.timer.Reset(rest)
		return
	}
	r.dropPin(p.key)
	r.cache.expired[p.key] = true
	r.e.stats.leasesExpired.Add(1)
	r.e.cfg.Log.Warn("releasing expired KV blocks", "request", p.key)
	r.pump()
}

// renew extends a pinned set's lease to at least d from now, as a heartbeat does, and
// reports whether such a set exists.
func (r *rank) renew(key string, d time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.cache.pins[key]
	if p == nil {
		return false
	}
	if ends := time.Now().Add(d); p.timer != nil && ends.After(p.ends) {
		p.ends = ends
	}
	return true
}

// unpin releases a pinned set and reports whether there was one.
func (r *rank) unpin(key string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	ok := r.dropPin(key)
	r.pump()
	return ok
}

// pinned returns the blocks of a pinned set, nil if there is none.
func (r *rank) pinned(key string) []blockID {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.cache.pins[key]; p != nil {
		return p.blocks
	}
	return nil
}

// everPinned reports whether there is a pinned set, or one whose lease has ended.
func (r *rank) everPinned(key string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.cache.pins[key] != nil || r.cache.expired[key]
}

// dropPin removes a pinned set; mu is held.
func (r *rank) dropPin(key string) bool {
	p := r.cache.pins[key]
	if p == nil {
		return false
	}
	delete(r.cache.pins, key)
	if p.timer != nil {
		p.timer.Stop()
	}
	for _, id := range p.blocks {
		r.cache.blocks[id].pins--
	}
	r.cache.drop(p.blocks)
	return true
}

// unpinAll releases every pinned set, at the engine's end.
func (r *rank) unpinAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key := range r.cache.pins {
		r.dropPin(key)
	}
}

// readPinned returns the content of blocks for a peer's read over the side
// channel. It never rejects a read, as RDMA does not: without a pinned set
// under key the memory counts as reused and the bytes are noise.
func (r *rank) readPinned(key string, ids []blockID) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	live := r.cache.pins[key] != nil
	if !live {
		r.e.stats.staleReads.Add(1)
		r.e.cfg.Log.Warn("potentially invalid KV blocks: read without a lease", "request", key)
	}
	r.e.stats.transfers.Add(1)
	return r.cache.read(ids, live)
}

// content returns the bytes of blocks that the caller holds (a sequence's own),
// for a protocol that writes them to a peer.
func (r *rank) content(ids []blockID) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.e.stats.transfers.Add(1)
	return r.cache.read(ids, true)
}

// store writes transferred bytes into blocks that the caller holds.
func (r *rank) store(ids []blockID, data []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cache.write(ids, data)
}
