package budget

import (
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"
)

// DefaultMemory is the limit in bytes of a Host without an explicit limit.
const DefaultMemory = 64 << 20

// MaxCalls is the number of HTTP calls of one plugin that may run at the same
// time.
const MaxCalls = 1024

// The limit of a plugin's log: logBurst bytes at once, then logRate bytes per
// second. A line costs lineCost bytes, for its time, level and names, in addition to its
// text as written.
const (
	logBurst = 4 << 20
	logRate  = 1 << 20
	lineCost = 256
)

// The reasons of refusals.
const (
	RefusedMemory = "host_memory" // the host holds too much memory for the plugin
	RefusedCalls  = "calls"       // too many HTTP calls are running
	RefusedLog    = "log"         // the plugin logs too much
)

// Host limits the resources that the host spends on one plugin outside of the
// plugin's own memory. All versions, instances and streams of the plugin share
// one Host. It is safe for concurrent use.
type Host struct {
	limit, held, calls atomic.Int64
	refused            func(reason string)

	mu     sync.Mutex
	logged time.Time // of the last line; guarded by mu
	spent  int64     // used bytes of the log's burst; guarded by mu
}

// NewHost returns a Host with a limit in bytes; 0 means DefaultMemory. It calls
// refused, which may be nil, for each refusal.
func NewHost(limit int64, refused func(reason string)) *Host {
	h := &Host{refused: refused}
	h.SetLimit(limit)
	return h
}

// SetLimit changes the limit in bytes; 0 means DefaultMemory. Bytes that are
// already held stay.
func (h *Host) SetLimit(limit int64) {
	if limit <= 0 {
		limit = DefaultMemory
	}
	h.limit.Store(limit)
}

// Take counts n bytes before the host holds them. It returns false and counts
// nothing when they would exceed the limit. Each successful Take needs a Give.
func (h *Host) Take(n int64) bool {
	for {
		held := h.held.Load()
		if n > h.limit.Load()-held {
			h.Refuse(RefusedMemory)
			return false
		}
		if h.held.CompareAndSwap(held, held+n) {
			return true
		}
	}
}

// Give subtracts n bytes that the host no longer holds.
func (h *Host) Give(n int64) { h.held.Add(-n) }

// Held returns the number of bytes that the host holds.
func (h *Host) Held() int64 { return h.held.Load() }

// BeginCall counts an HTTP call. It returns false when MaxCalls calls are
// running. Each successful BeginCall needs an EndCall.
func (h *Host) BeginCall() bool {
	if h.calls.Add(1) > MaxCalls {
		h.calls.Add(-1)
		h.Refuse(RefusedCalls)
		return false
	}
	return true
}

// EndCall ends an HTTP call.
func (h *Host) EndCall() { h.calls.Add(-1) }

// Log counts a log line with that text at that time. It returns false when the line must
// be dropped.
func (h *Host) Log(now time.Time, text string) bool {
	cost := int64(written(text)) + lineCost
	h.mu.Lock()
	passed := max(0, min(now.Sub(h.logged), logBurst/logRate*time.Second))
	h.logged = now
	h.spent = max(0, h.spent-int64(passed)*logRate/int64(time.Second))
	fits := h.spent+cost <= logBurst
	if fits {
		h.spent += cost
	}
	h.mu.Unlock()
	if !fits {
		h.Refuse(RefusedLog)
	}
	return fits
}

// written returns the most bytes that text takes in a log, in the text form and in the
// JSON form of log/slog. Both write characters that are not printable as escapes, of up to
// six bytes for one.
func written(text string) (n int) {
	for rest := text; len(rest) > 0; {
		r, size := utf8.DecodeRuneInString(rest)
		rest = rest[size:]
		switch {
		case r == utf8.RuneError && size == 1:
			n += len(`\ufffd`)
		case r == '"', r == '\\', r == '\n', r == '\r', r == '\t':
			n += len(`\n`)
		case strconv.IsPrint(r):
			n += size
		case r < 0x10000:
			n += len(`\u0000`)
		default:
			n += len(`\U00010000`)
		}
	}
	return n
}

// Refuse counts a refusal for that reason.
func (h *Host) Refuse(reason string) {
	if h.refused != nil {
		h.refused(reason)
	}
}
