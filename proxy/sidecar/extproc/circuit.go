package extproc

import (
	"sync"
	"time"
)

// The circuit opens after opensAfter failures in a row. While it is open, one request is sent
// each probeEvery.
const (
	opensAfter = 5
	probeEvery = time.Second
)

// circuit keeps a picker that hangs or is away from costing every request its time-out. The zero
// value is closed. Safe for concurrent use.
type circuit struct {
	mu       sync.Mutex
	failures int       // in a row; guarded by mu
	probe    time.Time // of the next probe while the circuit is open; guarded by mu
}

// allow reports whether a request may be sent. The caller then calls succeeded, failed or
// unknown.
func (c *circuit) allow(now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failures < opensAfter {
		return true
	}
	if now.Before(c.probe) {
		return false
	}
	c.probe = now.Add(probeEvery) // the probe is this request
	return true
}

// succeeded notes that the picker has answered.
func (c *circuit) succeeded() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failures = 0
}

// failed notes that the picker has not answered.
func (c *circuit) failed(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failures < opensAfter {
		c.failures++
	}
	c.probe = now.Add(probeEvery)
}

// unknown notes that the client has left before the picker answered. If the request was the
// probe, the next request is the probe.
func (c *circuit) unknown() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failures >= opensAfter {
		c.probe = time.Time{}
	}
}
