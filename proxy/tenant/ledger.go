package tenant

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

const (
	// MaxTenants is the largest number of tenants with limits.
	MaxTenants = 4096
	// maxProcesses is the largest number of processes that share a file: 64 workers,
	// and the predecessors that still end their requests.
	maxProcesses = 256
)

// record is the state of one tenant. All processes of the host may map it. A process changes
// the pair that is not current and then switches current with one store, so that a process
// that is killed leaves the old state or the new one.
type record struct {
	key     Key
	current uint64
	pairs   [2]pair
	_       [8]byte // to 128 bytes
}

// pair is the two budgets of a tenant.
type pair struct {
	requests, tokens bucket
	version          Version
}

// at returns the time when the budgets were right, in µs since the Unix epoch.
func (p *pair) at() int64 { return max(p.requests.at, p.tokens.at) }

// table is the content of the file after its head.
type table struct {
	records [MaxTenants]record
	// running counts the running requests of a tenant in each process. Only the process
	// that has the number adds to its counts. Another process sets the counts of a process
	// that has ended to 0.
	running [MaxTenants][maxProcesses]uint32
	changes uint64 // number of the last change of a record
	epoch   uint64 // of the last coordinator that counted here; 0: none
}

// Ledger is the Budgets of the processes of one host. The zero Ledger is not valid; use
// NewLedger.
type Ledger struct {
	dir *privatedir.Dir // nil: only this process uses the state
	log *slog.Logger
	now func() time.Time

	mu    sync.Mutex
	table *table      // nil before the first use; guarded by mu
	file  *stateFile  // nil: table is memory of this process; guarded by mu
	index map[Key]int // where the records were found last; guarded by mu
}

// NewLedger returns a ledger with its state in a file of dir, which it opens at the first
// use. If dir is nil or the file cannot be used, the state is in the memory of the process.
// now is the clock; nil: time.Now.
func NewLedger(dir *privatedir.Dir, log *slog.Logger, now func() time.Time) *Ledger {
	if now == nil {
		now = time.Now
	}
	return &Ledger{dir: dir, log: log, now: now, index: make(map[Key]int)}
}

// Close unmaps the file. The ledger must not be used afterwards.
func (l *Ledger) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.file.close()
	l.file, l.table = nil, new(table)
}

// Take implements Budgets.
func (l *Ledger) Take(_ context.Context, t *Tenant, tokens int64) (a Answer) {
	defer l.lock()()
	at, now := l.find(t.key), l.now().UnixMicro()
	next := l.drained(at, now, t.Limits)
	a.Reserved = min(max(0, tokens), t.Limits.Tokens)
	wait := int64(0)
	switch {
	case t.Limits.Exchanges > 0 && l.runningOf(at, t.Limits.Exchanges) >= t.Limits.Exchanges:
		a.Refused = Exchanges
	case t.Limits.Requests > 0 && next.requests.lacks(1, t.Limits.Requests) > 0:
		a.Refused, wait = Requests, next.requests.lacks(1, t.Limits.Requests)
	case t.Limits.Tokens > 0 && next.tokens.lacks(a.Reserved, t.Limits.Tokens) > 0:
		a.Refused, wait = Tokens, next.tokens.lacks(a.Reserved, t.Limits.Tokens)
	default:
		next.requests.add(1, t.Limits.Requests)
		next.tokens.add(a.Reserved, t.Limits.Tokens)
		l.table.running[at][l.process()]++
	}
	l.store(at, next) // also the time of a refusal, because the clock may have been set back
	if a.Refused != Admitted {
		a.Reserved = 0
	}
	a.Retry = time.Duration(wait) * time.Microsecond
	a.Requests, a.Tokens = next.requests.level(t.Limits.Requests), next.tokens.level(t.Limits.Tokens)
	a.State = State{Key: t.key, Version: l.pair(at).version, Requests: next.requests.used, Tokens: next.tokens.used}
	return a
}

// Settle implements Budgets.
func (l *Ledger) Settle(t *Tenant, s Spent) {
	defer l.lock()()
	at := l.find(t.key)
	if n := &l.table.running[at][l.process()]; *n > 0 {
		*n--
	}
	l.correct(at, t.Limits, s)
}

// correct adds the difference between what a request has reserved and used.
func (l *Ledger) correct(at int, limits Limits, s Spent) {
	next := l.drained(at, l.now().UnixMicro(), limits)
	if s.Undone {
		next.requests.add(-1, limits.Requests)
	}
	next.tokens.add(s.Used-s.Reserved, limits.Tokens)
	l.store(at, next)
}

// Charge adds requests and tokens that another process has admitted without asking, and n
// running requests.
func (l *Ledger) Charge(t *Tenant, requests, tokens int64, n int) {
	defer l.lock()()
	at := l.find(t.key)
	next := l.drained(at, l.now().UnixMicro(), t.Limits)
	next.requests.add(requests, t.Limits.Requests)
	next.tokens.add(tokens, t.Limits.Tokens)
	l.table.running[at][l.process()] += uint32(n)
	l.store(at, next)
}

// Running returns the number of running requests of a tenant.
func (l *Ledger) Running(t *Tenant) int {
	defer l.lock()()
	return l.sum(l.find(t.key))
}

// lock locks the state against this process and all others, and returns the function that
// unlocks it.
func (l *Ledger) lock() (unlock func()) {
	l.mu.Lock()
	if l.table == nil {
		l.open()
	}
	l.file.lock()
	return func() {
		l.file.unlock()
		l.mu.Unlock()
	}
}

// open opens the file, or makes the memory. The caller holds mu.
func (l *Ledger) open() {
	if l.dir != nil {
		var err error
		if l.file, l.table, err = openState(l.dir); err == nil {
			return
		}
		l.log.Error("the budgets of tenants are counted in this process alone, and a restart forgets them", "error", err)
	}
	l.table = new(table)
}

// process returns the number of this process.
func (l *Ledger) process() int {
	if l.file == nil {
		return 0
	}
	return l.file.process
}

// find returns the place of a tenant's record, and makes the record if there is none. The
// caller has locked the state.
func (l *Ledger) find(k Key) int {
	if at, known := l.index[k]; known && l.table.records[at].key == k {
		return at
	}
	free := -1
	for at := range l.table.records {
		r := &l.table.records[at]
		switch {
		case r.key == k:
			l.index[k] = at
			return at
		case free < 0 && r.key == (Key{}):
			free = at
		}
	}
	if free < 0 {
		free = l.oldest()
	}
	r := &l.table.records[free]
	clear(l.table.running[free][:])
	r.key = Key{}
	r.pairs = [2]pair{}
	r.key = k
	l.index[k] = free
	return free
}

// oldest returns the record of the tenant that was used least recently and has no running
// request. The caller has locked the state.
func (l *Ledger) oldest() int {
	best, since := 0, int64(1<<63-1)
	for at := range l.table.records {
		if used := l.pair(at).requests.at; used < since && l.sum(at) == 0 {
			best, since = at, used
		}
	}
	return best
}

func (l *Ledger) pair(at int) *pair {
	r := &l.table.records[at]
	return &r.pairs[atomic.LoadUint64(&r.current)&1]
}

// drained returns the budgets of a record at a time.
func (l *Ledger) drained(at int, now int64, limits Limits) pair {
	p := *l.pair(at)
	p.requests.drain(now, limits.Requests)
	p.tokens.drain(now, limits.Tokens)
	return p
}

// store replaces the budgets of a record by newer ones.
func (l *Ledger) store(at int, p pair) {
	l.table.changes++
	p.version = Version{max(l.pair(at).version.Epoch, l.table.epoch), l.table.changes}
	l.replace(at, p)
}

// replace replaces the budgets of a record.
func (l *Ledger) replace(at int, p pair) {
	r := &l.table.records[at]
	next := 1 - atomic.LoadUint64(&r.current)&1
	r.pairs[next] = p
	atomic.StoreUint64(&r.current, next)
}

// sum returns the number of running requests of a record.
func (l *Ledger) sum(at int) (n int) {
	for _, count := range l.table.running[at] {
		n += int(count)
	}
	return n
}

// runningOf returns the number of running requests of a record. If it is at least the limit,
// requests of processes that have ended do not count.
func (l *Ledger) runningOf(at, limit int) int {
	n := l.sum(at)
	if n < limit || l.file == nil {
		return n
	}
	for process := range l.table.running[at] {
		if count := &l.table.running[at][process]; *count > 0 && process != l.file.process && !l.file.lives(process) {
			*count = 0
		}
	}
	return l.sum(at)
}
