package link

import (
	"time"
)

// tend ends late calls, writes waiting messages and checks that the peer sends, until the
// connection ends. tend never waits for the peer.
func (c *Conn) tend() {
	beats, looks := time.NewTicker(Beat), time.NewTicker(Linger)
	defer beats.Stop()
	defer looks.Stop()
	looks.Stop()
	var heard uint64
	silent := 0
	for {
		select {
		case <-c.ended:
			return
		case <-c.stir:
			looks.Reset(Linger)
		case <-looks.C:
			if !c.lookAfter() {
				looks.Stop()
			}
		case <-beats.C:
			c.tick()
			told := c.beat()
			if n := c.reads.Load(); n != heard && told {
				heard, silent = n, 0
			} else if silent++; silent >= Silence {
				c.Close(ErrSilent)
			}
		}
	}
}

// look makes tend run lookAfter every Linger. The caller holds c.mu.
func (c *Conn) look() {
	c.vain = 0
	if !c.active {
		c.active = true
		c.stir <- struct{}{} // never blocks: tend receives it before it clears active
	}
}

// lookAfter ends late calls and writes waiting frames. It also returns the reading to
// Run's goroutine if no caller has read since the last run. False: there was no work for
// some time, and tend can stop the calls of lookAfter.
func (c *Conn) lookAfter() bool {
	c.mu.Lock()
	c.looks++
	for number, p := range c.calls {
		if p.until != 0 && p.until <= c.looks {
			delete(c.calls, number)
			p.err = ErrLate
			p.done <- struct{}{}
		}
	}
	if p := c.leader; p != nil && (p.until <= c.looks || p.ctx.Err() != nil) {
		c.kicked = true
		c.nc.SetReadDeadline(time.Unix(1, 0))
	}
	if n := c.reads.Load(); n == c.seen && c.reader == ofNobody {
		c.handBack()
	} else {
		c.seen = n
	}
	if c.vain++; c.vain > restful && len(c.calls) == 0 && len(c.out) == 0 && c.reader == ofRun {
		c.active, c.timed = false, false
	}
	goesOn := c.active
	c.flush()
	return goesOn
}

// beat sends a heartbeat if no other frame was written since the last beat. False: the
// connection cannot write any more, so even a peer that sends gets no more than Silence
// beats.
func (c *Conn) beat() bool {
	c.mu.Lock()
	if c.lost != nil {
		c.mu.Unlock()
		return false
	}
	if c.err == nil && !c.wrote {
		c.out = appendFrame(c.out, beat, 0, 0, nil)
	}
	c.wrote = false
	c.flush()
	return true
}

// tick stores the time of a beat, and stores separately if the beat is late.
func (c *Conn) tick() {
	now := time.Since(c.began)
	if now-time.Duration(c.ticked.Load()) > Silence*Beat {
		c.resumed.Store(int64(now))
	}
	c.ticked.Store(int64(now))
}

// stopped reports whether this process was recently suspended for more than Silence
// beats. In that time a running peer may have closed the connection without a bye frame.
func (c *Conn) stopped() bool {
	now := time.Since(c.began)
	resumed := time.Duration(c.resumed.Load())
	return now-time.Duration(c.ticked.Load()) > Silence*Beat || resumed != 0 && now-resumed <= Silence*Beat
}
