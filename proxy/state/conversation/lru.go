package conversation

// lru has several lists of numbers in the order of use. A list is a ring that begins and
// ends at its head; the heads are the first numbers.
type lru struct{ links []link }

type link struct{ older, newer uint32 }

func newLRU(heads int) lru {
	l := lru{links: make([]link, heads)}
	for i := range l.links {
		l.links[i] = link{uint32(i), uint32(i)}
	}
	return l
}

// push puts n into a list as the newest.
func (l *lru) push(head, n uint32) {
	newest := l.links[head].older
	l.links[n] = link{older: newest, newer: head}
	l.links[newest].newer = n
	l.links[head].older = n
}

// drop removes n from its list.
func (l *lru) drop(n uint32) {
	k := l.links[n]
	l.links[k.older].newer = k.newer
	l.links[k.newer].older = k.older
}

// oldest returns the least recently used number. For an empty list it returns the head.
func (l *lru) oldest(head uint32) uint32 { return l.links[head].newer }

// grow adds an element to a slice of at most most elements: it doubles the room up to
// that.
func grow[T any](s []T, most int) []T {
	if len(s) == cap(s) {
		s = append(make([]T, 0, min(max(2*len(s), 64), most)), s...)
	}
	return s[:len(s)+1]
}
