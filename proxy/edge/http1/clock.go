package http1

import (
	"net/http"
	"time"
)

// Bounds of the time between two ticks.
const (
	tickLeast = 5 * time.Millisecond
	tickMost  = time.Second
)

// What a connection waits for is one number, conn.waits, so that the clock and the connection's
// goroutine agree without a lock: 0 while a handler runs; the tick at which the waiting began and
// what for, see waitMark; or waitCut. Only the goroutine leaves 0. Whoever sets waitCut ends the read.
const (
	waitIdle = 1  // for the first byte of a request
	waitHead = 2  // for the rest of its head
	waitCut  = -1 // the connection must end
	waitBits = 2
)

func waitMark(tick int64, what int64) int64 { return tick<<waitBits | what }

// past is a deadline that ends a read at once.
var past = time.Unix(1, 0)

// run advances the coarse clock and cuts the connections whose client exceeds a limit, until done is
// closed. A connection notes a tick when a wait begins, so the limits cost no timers. It ends at most
// two ticks late. A tick is an eighth of the shorter limit, but at most a second.
func (s *Server) run() {
	period := min(max(min(s.HeadTime, s.IdleTime)/8, tickLeast), tickMost)
	ticks := func(limit time.Duration) int64 { return int64((limit+period-1)/period) + 1 }
	heads, idles := ticks(s.HeadTime), ticks(s.IdleTime)
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for {
		select {
		case <-s.done:
			return
		case now := <-ticker.C:
			s.setDate(now)
		}
		now := s.tick.Add(1)
		s.cut(waitMark(now-heads, 0), waitMark(now-idles, 0))
	}
}

// cut ends the connections that have waited for a head or a request since these marks or earlier.
func (s *Server) cut(head, idle int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		switch v := c.waits.Load(); {
		case v <= 0:
		case v&waitHead != 0 && v <= head|waitHead, v&waitIdle != 0 && v <= idle|waitIdle:
			c.cutWait(v)
		}
	}
}

// cutWait ends a connection that still waits as in v.
func (c *conn) cutWait(v int64) {
	if c.waits.CompareAndSwap(v, waitCut) {
		_ = c.nc.SetReadDeadline(past) // fails on a closed connection
	}
}

// rest begins the wait for the next request. It returns false if the server serves none.
func (c *conn) rest(post bool) bool {
	if c.lineEnds = 0; post {
		c.lineEnds = 4 // net/http ignores as many
	}
	s := c.server
	if s.State != nil {
		s.State(c.nc, http.StateIdle)
	}
	what := int64(waitIdle)
	if c.r < c.w {
		what = waitHead
	}
	c.waits.Store(waitMark(s.tick.Load(), what))
	return !s.stopping.Load() // after the store, see Shutdown
}

// begun notes that bytes of a head have come.
func (c *conn) begun() {
	if v := c.waits.Load(); v > 0 && v&waitIdle != 0 {
		c.waits.CompareAndSwap(v, waitMark(c.server.tick.Load(), waitHead))
	}
}

// busy notes that a handler runs. It returns false if the connection must end.
func (c *conn) busy() bool {
	s := c.server
	if c.waits.Swap(0) == waitCut || s.stopping.Load() {
		return false
	}
	if s.State != nil {
		s.State(c.nc, http.StateActive)
	}
	return true
}

// setDate makes the Date line of the next second.
func (s *Server) setDate(now time.Time) {
	d := now.UTC().AppendFormat(append(make([]byte, 0, 64), "Date: "...), http.TimeFormat)
	line := string(append(d, "\r\n"...))
	s.date.Store(&line)
}
