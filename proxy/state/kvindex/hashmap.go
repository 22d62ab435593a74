package kvindex

import "math/bits"

// mixer spreads the bits of a foreign hash.
const mixer = 0x9e3779b97f4a7c15

// hashMap maps an engine's block hashes to the index's hashes. The low bits of a value,
// which a Hash does not use, hold the tiers as 1<<Tier; a pair without tiers is not in
// the map. It consists of parts with open addressing, in buckets of one cache line.
// Each part grows by a quarter independently, so that memory never doubles. The zero
// value is empty. Not safe for concurrent use.
type hashMap struct {
	parts []hashPart // nil or mapParts
	n     int
}

const (
	mapParts = 64
	line     = 4 // pairs in a bucket
)

type pair struct{ key, value uint64 }

// hashPart is one part. As in table, a pair that does not fit into its own bucket is in
// the next bucket with room.
type hashPart struct {
	pairs []pair
	used  int
}

// spot returns the part of a key and, if the part has buckets, the key's bucket.
func (m *hashMap) spot(key uint64) (*hashPart, int) {
	p := &m.parts[scatter(key)>>(64-6)]
	return p, p.home(key)
}

// scatter spreads a key's bits well: some engines and tests use counters as hashes.
func scatter(key uint64) uint64 {
	hi, lo := bits.Mul64(key^0xa0761d6478bd642f, mixer)
	return (hi ^ lo) * mixer
}

// home returns the preferred bucket of a key.
func (p *hashPart) home(key uint64) int {
	return int(scatter(key) >> 6 & (1<<32 - 1) * uint64(len(p.pairs)/line) >> 32)
}

// get returns the value of a key, or 0.
func (m *hashMap) get(key uint64) uint64 {
	if m.n == 0 {
		return 0
	}
	p, b := m.spot(key)
	if i := p.find(key, b); i >= 0 {
		return p.pairs[i].value
	}
	return 0
}

// set sets the value of a key; value must not be 0.
func (m *hashMap) set(key, value uint64) {
	if m.parts == nil {
		m.parts = make([]hashPart, mapParts)
	}
	p, b := m.spot(key)
	if i := p.find(key, b); i >= 0 {
		p.pairs[i].value = value
		return
	}
	if p.used >= len(p.pairs)/8*7 {
		p.grow()
	}
	p.add(pair{key, value})
	p.used++
	m.n++
}

// remove drops a key.
func (m *hashMap) remove(key uint64) {
	if m.n == 0 {
		return
	}
	p, b := m.spot(key)
	if i := p.find(key, b); i >= 0 {
		p.erase(i)
		p.used--
		m.n--
	}
}

// bytes returns the memory of the map.
func (m *hashMap) bytes() int {
	n := 32 * len(m.parts)
	for i := range m.parts {
		n += 16 * cap(m.parts[i].pairs)
	}
	return n
}

// find returns the index of a key whose own bucket is b, or -1.
func (p *hashPart) find(key uint64, b int) int {
	n := len(p.pairs)
	for i, turns := b*line, n/line; turns > 0; turns-- {
		full := true
		for k := range line {
			if p.pairs[i+k].value == 0 {
				full = false
			} else if p.pairs[i+k].key == key {
				return i + k
			}
		}
		if !full {
			break
		}
		if i += line; i == n {
			i = 0
		}
	}
	return -1
}

// add puts a pair into the part, which has room.
func (p *hashPart) add(e pair) {
	for i := p.home(e.key) * line; ; {
		for k := range line {
			if p.pairs[i+k].value == 0 {
				p.pairs[i+k] = e
				return
			}
		}
		if i += line; i == len(p.pairs) {
			i = 0
		}
	}
}

// grow makes room for a quarter more.
func (p *hashPart) grow() {
	old := p.pairs
	n := (len(old) + len(old)/4 + 2*line) / line * line
	p.pairs = append([]pair(nil), make([]pair, n)...)
	p.pairs = p.pairs[:cap(p.pairs)/line*line]
	clear(p.pairs[n:])
	for _, e := range old {
		if e.value != 0 {
			p.add(e)
		}
	}
}

// erase empties a slot and moves pairs of later buckets up, because a search ends at
// the first bucket with a free slot.
func (p *hashPart) erase(hole int) {
	for p.full(hole / line) {
		from := p.displaced(hole / line)
		if from < 0 {
			break
		}
		p.pairs[hole] = p.pairs[from]
		hole = from
	}
	p.pairs[hole] = pair{}
}

// full reports whether a bucket has no free slot.
func (p *hashPart) full(b int) bool {
	for _, e := range p.pairs[b*line : (b+1)*line] {
		if e.value == 0 {
			return false
		}
	}
	return true
}

// displaced returns the index of a pair in a bucket after b that belongs into b or
// before it; -1 if there is none.
func (p *hashPart) displaced(b int) int {
	n := len(p.pairs) / line
	for far := 1; far < n; far++ {
		at := (b + far) % n
		full := true
		for k := range line {
			e := p.pairs[at*line+k]
			if e.value == 0 {
				full = false
			} else if (at-p.home(e.key)+n)%n >= far {
				return at*line + k
			}
		}
		if !full {
			break
		}
	}
	return -1
}
