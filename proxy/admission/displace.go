package admission

import (
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Displacement lets a new request of a higher class into a full queue. The waiting request of the lowest
// class that would get its place last is refused in the place of the new one. So the flood of one tenant
// loses its own requests, and no request is refused for one of its own class. Each class keeps the part
// of the queue that its weight gives, so that the shares of the classes hold.

// DisplacedError refuses a waiting request whose place in the queue a request of a higher class needs.
// It matches the error that the other request would have got.
type DisplacedError struct {
	For     string // class of the other request
	refusal *openai.Error
}

// Error names the reason.
func (e *DisplacedError) Error() string { return e.refusal.Error() }

// Unwrap returns the error for the client.
func (e *DisplacedError) Unwrap() error { return e.refusal }

// room returns the refusal of t if the queue, or the part of the queue that the client of t may use, is
// full. If another request gets the refusal, room returns that one instead: refuse then removes it, after
// t has its place. The caller holds mu.
func (q *Queue) room(t *ticket, l config.Limits) (instead *ticket, err error) {
	p := &t.place
	client, refusal := "", ErrQueueFull
	if p.capped && q.clients[p.client].waiting >= l.QueueShare() {
		client = p.client // only a request of the same client makes room
	}
	if q.order.waiting < l.Queue {
		if client == "" {
			return nil, nil
		}
		refusal = ErrClientLimit
	}
	if instead = q.order.last(p.class, client); instead == nil {
		return nil, refusal
	}
	instead.refusal = &DisplacedError{For: p.class.Name, refusal: refusal}
	return instead, nil
}

// refuse removes t, whose refusal is set, from the queue. The caller holds mu and calls rest afterwards.
func (q *Queue) refuse(t *ticket) {
	q.drop(t)
	close(t.decided)
}

// last returns the waiting request that is refused for a new one of class higher: of the lowest class with
// more than its part of the queue, the one that would get its place last. client "": of all clients. nil:
// there is none.
func (f *fair) last(higher *class, client string) (last *ticket) {
	weights := 0.0
	for _, c := range f.classes {
		if c.waiting > 0 || c == higher {
			weights += c.Weight
		}
	}
	var lowest *class
	for _, c := range f.classes {
		part := float64(f.waiting) * c.Weight / weights
		if c.Priority >= higher.Priority || c.waiting <= int(part) || lowest != nil && lowest.Priority <= c.Priority {
			continue
		}
		if t := c.last(client); t != nil {
			lowest, last = c, t
		}
	}
	return last
}

// last returns the waiting request of the class that would get its place last. client "": of all clients.
func (c *class) last(client string) (last *ticket) {
	latest := 0.0
	for _, t := range c.flows {
		w := t.youngest(client)
		if w == nil {
			continue
		}
		turn := max(t.served, c.now) + float64(t.booked-w.place.booked)/t.weight
		if last == nil || turn > latest || turn == latest && w.number > last.number {
			last, latest = w, turn
		}
	}
	return last
}

// youngest returns the waiting request of the client that came last. client "": of all clients.
func (t *flow) youngest(client string) (youngest *ticket) {
	for n := range t.lines {
		waiting := t.lines[n].waiting
		for i := len(waiting) - 1; i >= 0; i-- {
			if w := waiting[i]; client == "" || w.place.client == client {
				if youngest == nil || w.number > youngest.number {
					youngest = w
				}
				break
			}
		}
	}
	return youngest
}
