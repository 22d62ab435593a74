package core

import "time"

// Pin moves a sequence's blocks to a pinned set under key. They stay until
// unpin, or until lease passes without a renewal (0: forever). The sequence
// keeps its slot until release. A previous set under the same key is released
// first. An engine that has ended pins nothing: release frees the blocks.
func (r *Rank) Pin(s *Sequence, key string, lease time.Duration) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if r.Engine.Ctx.Err() != nil {
		return
	}
	r.dropPin(key)
	p := &pin{key: key, blocks: s.Blocks}
	s.Blocks = nil
	for _, id := range p.blocks {
		r.Cache.Blocks[id].Pins++
	}
	r.Cache.Pins[key] = p
	if lease > 0 {
		p.ends = time.Now().Add(lease)
		p.timer = time.AfterFunc(lease, func() { r.expire(p) })
	}
}

// expire releases a pinned set whose lease has ended.
func (r *Rank) expire(p *pin) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if r.Cache.Pins[p.key] != p {
		return
	}
	if rest := time.Until(p.ends); rest > 0 {
		p.timer.Reset(rest)
		return
	}
	r.dropPin(p.key)
	r.Cache.expired[p.key] = true
	r.Engine.Stats.LeasesExpired.Add(1)
	r.Engine.Cfg.Log.Warn("releasing expired KV blocks", "request", p.key)
	r.pump()
}

// Renew extends a pinned set's lease to at least d from now, as a heartbeat does, and
// reports whether such a set exists.
func (r *Rank) Renew(key string, d time.Duration) bool {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	p := r.Cache.Pins[key]
	if p == nil {
		return false
	}
	if ends := time.Now().Add(d); p.timer != nil && ends.After(p.ends) {
		p.ends = ends
	}
	return true
}

// Unpin releases a pinned set and reports whether there was one.
func (r *Rank) Unpin(key string) bool {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	ok := r.dropPin(key)
	r.pump()
	return ok
}

// Pinned returns the blocks of a pinned set, nil if there is none.
func (r *Rank) Pinned(key string) []BlockID {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if p := r.Cache.Pins[key]; p != nil {
		return p.blocks
	}
	return nil
}

// EverPinned reports whether there is a pinned set, or one whose lease has ended.
func (r *Rank) EverPinned(key string) bool {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	return r.Cache.Pins[key] != nil || r.Cache.expired[key]
}

// dropPin removes a pinned set; mu is held.
func (r *Rank) dropPin(key string) bool {
	p := r.Cache.Pins[key]
	if p == nil {
		return false
	}
	delete(r.Cache.Pins, key)
	if p.timer != nil {
		p.timer.Stop()
	}
	for _, id := range p.blocks {
		r.Cache.Blocks[id].Pins--
	}
	r.Cache.Drop(p.blocks)
	return true
}

// UnpinAll releases every pinned set, at the engine's end.
func (r *Rank) UnpinAll() {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	for key := range r.Cache.Pins {
		r.dropPin(key)
	}
}

// ReadPinned returns the content of blocks for a peer's read over the side
// channel. It never rejects a read, as RDMA does not: without a pinned set
// under key the memory counts as reused and the bytes are noise.
func (r *Rank) ReadPinned(key string, ids []BlockID) []byte {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	live := r.Cache.Pins[key] != nil
	if !live {
		r.Engine.Stats.StaleReads.Add(1)
		r.Engine.Cfg.Log.Warn("potentially invalid KV blocks: read without a lease", "request", key)
	}
	r.Engine.Stats.Transfers.Add(1)
	return r.Cache.Read(ids, live)
}

// Content returns the bytes of blocks that the caller holds (a sequence's own),
// for a protocol that writes them to a peer.
func (r *Rank) Content(ids []BlockID) []byte {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	r.Engine.Stats.Transfers.Add(1)
	return r.Cache.Read(ids, true)
}

// Store writes transferred bytes into blocks that the caller holds.
func (r *Rank) Store(ids []BlockID, data []byte) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	r.Cache.Write(ids, data)
}
