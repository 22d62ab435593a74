package gaps

import "container/list"

// lru has the values of the keys that were used last. The key 0 has no value.
type lru[V any] struct {
	most  int
	items map[uint64]*list.Element // of *item[V]
	order list.List                // the most recently used first
}

type item[V any] struct {
	key   uint64
	value V
}

func newLRU[V any](most int) lru[V] {
	return lru[V]{most: most, items: make(map[uint64]*list.Element)}
}

// find returns the value of a key; nil: there is none.
func (l *lru[V]) find(key uint64) *V {
	e := l.items[key]
	if e == nil {
		return nil
	}
	return &e.Value.(*item[V]).value
}

// use returns the value of a key, which is now the most recently used one. A new value is zero.
func (l *lru[V]) use(key uint64) *V {
	e := l.items[key]
	switch {
	case e != nil:
		l.order.MoveToFront(e)
	case l.order.Len() == l.most:
		e = l.order.Back()
		delete(l.items, e.Value.(*item[V]).key)
		e.Value = &item[V]{key: key}
		l.order.MoveToFront(e)
		l.items[key] = e
	default:
		e = l.order.PushFront(&item[V]{key: key})
		l.items[key] = e
	}
	return &e.Value.(*item[V]).value
}
