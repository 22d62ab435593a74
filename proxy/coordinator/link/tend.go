package link

import (
	"time"
)

// tend ends late calls, writes waiting messages and watches the peer until the connection
// ends. It never waits for the peer.
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

// look makes tend look after what waits; c.mu is held.
func (c *Conn) look() {
	c.vain = 0
	if !c.active {
		c.active = true
		c.stir <- struct{}{} // never blocks: tend receives it before it clears active
	}
}

// lookAfter ends late calls and writes what waits. False: there was no work for a while,
// and it need not be called again.
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

// beat sends a sign of life if no other frame was sent. False: nothing can be written, so
// the rest of the peer's frames should be read now.
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

// tick notes a beat and whether it is late.
func (c *Conn) tick() {
	now := time.Since(c.began)
	if now-time.Duration(c.ticked.Load()) > Silence*Beat {
		c.resumed.Store(int64(now))
	}
	c.ticked.Store(int64(now))
}

// stopped reports whether this process was just stopped for so long that a live peer has
// given up the connection, perhaps without a farewell.
func (c *Conn) stopped() bool {
	now := time.Since(c.began)
	resumed := time.Duration(c.resumed.Load())
	return now-time.Duration(c.ticked.Load()) > Silence*Beat || resumed != 0 && now-resumed <= Silence*Beat
}
