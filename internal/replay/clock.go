package replay

import "time"

// clock is virtual time with its future events in order. Of events at the same
// time the first added comes first.
type clock struct {
	now    time.Duration
	added  uint64
	events []event // a binary heap
}

type event struct {
	at    time.Duration
	order uint64
	do    func()
}

func (e *event) before(f *event) bool { return e.at < f.at || e.at == f.at && e.order < f.order }

// after adds an event that happens d from now.
func (c *clock) after(d time.Duration, do func()) { c.at(c.now+d, do) }

// at adds an event that happens at a time that is not before now.
func (c *clock) at(t time.Duration, do func()) {
	c.added++
	c.events = append(c.events, event{at: t, order: c.added, do: do})
	for i := len(c.events) - 1; i > 0; {
		up := (i - 1) / 2
		if !c.events[i].before(&c.events[up]) {
			break
		}
		c.events[i], c.events[up] = c.events[up], c.events[i]
		i = up
	}
}

// next runs the next event. It returns false when there is none.
func (c *clock) next() bool {
	if len(c.events) == 0 {
		return false
	}
	e := c.events[0]
	last := len(c.events) - 1
	c.events[0] = c.events[last]
	c.events[last] = event{}
	c.events = c.events[:last]
	for i := 0; ; {
		least := i
		for _, down := range [2]int{2*i + 1, 2*i + 2} {
			if down < last && c.events[down].before(&c.events[least]) {
				least = down
			}
		}
		if least == i {
			break
		}
		c.events[i], c.events[least] = c.events[least], c.events[i]
		i = least
	}
	c.now = e.at
	e.do()
	return true
}
