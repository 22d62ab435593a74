package main

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/internal/loadgen"
)

const (
	holdDials = 64               // streams that are opened at the same time
	holdLimit = 90 * time.Second // to open all
	holdQuiet = 4 * time.Second  // before the first reading: pdproxy gives memory back after a quiet second
)

// holding is a load of slow streams that stay open until it ends.
type holding struct {
	*load
	body  []byte
	limit time.Time // for the first event of each
	ended atomic.Bool
	open  atomic.Int64
	came  atomic.Int64 // events after the first of each stream

	mu    sync.Mutex
	conns []*rawClient // guarded by mu
	tally tally        // guarded by mu
}

// hold opens Conns streams and returns the growth of the proxy's RSS, which
// does not include the kernel's socket buffers, and the CPU time per event while
// all streams are open.
func (l *load) hold() (*result, error) {
	time.Sleep(holdQuiet)
	before, err := usageOf(l.PIDs)
	if err != nil {
		return nil, err
	}
	start := time.Now()
	h := &holding{load: l, body: requestBody(l.Body, l.Events, l.Period), limit: start.Add(holdLimit)}
	streams := h.openAll()
	seconds := time.Since(start).Seconds()
	opened, err := usageOf(l.PIDs)
	came := h.came.Load()
	if err == nil {
		time.Sleep(l.For)
	}
	after, failed := usageOf(l.PIDs)
	open, events := int(h.open.Load()), int(h.came.Load()-came)
	h.end()
	streams.Wait()
	if err := errors.Join(err, failed); err != nil {
		return nil, err
	}
	r := h.tally.result()
	r.Seconds, r.Open = seconds, open
	r.RSS = float64(after.RSS) / (1 << 20)
	r.StreamRSS = per(float64(after.RSS-before.RSS)/(1<<10), open)
	r.CPUEvent = per(after.minus(opened).CPU.Seconds()*1e6, events)
	return r, nil
}

// openAll returns when every stream has had its first event or failed. The
// streams continue in group.
func (h *holding) openAll() *sync.WaitGroup {
	var streams, opening sync.WaitGroup
	slots := make(chan struct{}, holdDials)
	for range h.Conns {
		slots <- struct{}{}
		opening.Add(1)
		streams.Go(func() {
			opened := sync.OnceFunc(func() { <-slots; opening.Done() })
			defer opened()
			if err := h.stream(opened); err != nil && !h.ended.Load() {
				h.fail(err)
			}
		})
	}
	opening.Wait()
	return &streams
}

// stream reads one stream and calls opened at its first event.
func (h *holding) stream(opened func()) error {
	c, err := dialRaw(h.Addr, h.Header, h.body, 1<<10)
	if err != nil {
		return err
	}
	h.mu.Lock()
	h.conns = append(h.conns, c)
	h.mu.Unlock()
	if err := c.conn.SetDeadline(h.limit); err != nil {
		return err
	}
	body, err := c.call()
	if err != nil {
		return err
	}
	first := true
	defer func() {
		if !first {
			h.open.Add(-1)
		}
	}()
	return loadgen.ReadEvents(body, make([]byte, 512), func(data []byte) (bool, error) {
		if _, ok := readStamp(data, time.Now()); !ok {
			return false, nil
		}
		if !first {
			h.came.Add(1)
			return false, nil
		}
		first = false
		h.open.Add(1)
		opened()
		return false, c.conn.SetDeadline(time.Time{})
	})
}

func (h *holding) fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tally.fail(err)
}

func (h *holding) end() {
	h.ended.Store(true)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.conns {
		c.close()
	}
}
