package tokens

import (
	"sync"
	"time"
)

// These are the pauses in which an instance gets no requests in one form, and the numbers
// of consecutive failures of each kind before a pause. absentPause is long, because only
// another version of the engine can have a missing endpoint. faultPause is short. It
// exists because an engine that answers late delays each request by the time-out.
const (
	absentPause  = 5 * time.Minute
	faultPause   = 10 * time.Second
	faultsMost   = 3
	refusalPause = time.Minute
	refusalsMost = 8
)

// pauses records the forms in which instances are not asked at present. The zero value
// is ready for use.
type pauses struct {
	mu    sync.Mutex
	table map[pauseKey]pause // guarded by mu
}

type pauseKey struct {
	instance string
	way      way
}

type pause struct {
	until            time.Time
	faults, refusals uint8 // consecutive
}

func (p *pauses) paused(instance string, w way, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return now.Before(p.table[pauseKey{instance, w}].until)
}

// note records the result of a tokenize request.
func (p *pauses) note(instance string, w way, r Reason, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := pauseKey{instance, w}
	if r == OK {
		delete(p.table, key)
		return
	}
	e := p.table[key]
	switch r {
	case Unsupported:
		e.until = now.Add(absentPause)
	case TimedOut, Failed, BadAnswer:
		if e.faults++; e.faults >= faultsMost {
			// One more fault after the pause begins the next pause.
			e.faults, e.until = faultsMost-1, now.Add(faultPause)
		}
	case Refused:
		if e.refusals++; e.refusals >= refusalsMost {
			e.refusals, e.until = refusalsMost-1, now.Add(refusalPause)
		}
	default:
		return
	}
	if p.table == nil {
		p.table = make(map[pauseKey]pause)
	}
	p.table[key] = e
}

func (p *pauses) forget(instance string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key := range p.table {
		if key.instance == instance {
			delete(p.table, key)
		}
	}
}
