package fleet

import (
	"encoding/binary"
	"errors"
	"math"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/tenant"
	"github.com/pdproxy/pdproxy/proxy/wire"
)

// longestTenant bounds the name of a tenant, in bytes.
const longestTenant = 1024

// appendTenant appends the name and the limits of a tenant.
func appendTenant(dst []byte, t *tenant.Tenant) []byte {
	dst = wire.AppendText(dst, t.Name[:min(len(t.Name), longestTenant)])
	l := t.Limits
	return wire.AppendUint(wire.AppendUint(wire.AppendUint(dst, uint64(l.Requests)), uint64(l.Tokens)), l.Exchanges)
}

// tenant reads the output of appendTenant. The result is not nil.
func (r *reader) tenant() *tenant.Tenant {
	name := r.Text()
	if len(name) > longestTenant {
		r.Fail()
		name = nil
	}
	return tenant.New(tenant.Tenant{Name: string(name), Limits: tenant.Limits{
		Requests: int64(r.UintUpTo(tenant.MaxPerMinute)), Tokens: int64(r.UintUpTo(tenant.MaxPerMinute)), Exchanges: int(r.UintUpTo(math.MaxInt32)),
	}})
}

// mostReset is the longest accepted time of a Level or of Answer.Retry, in µs.
const mostReset = uint64(time.Hour / time.Microsecond)

// appendBudget appends the answer to kindBudget, with the number of workers.
func appendBudget(dst []byte, a *tenant.Answer, workers int) []byte {
	dst = wire.AppendUint(append(dst, byte(a.Refused)), workers)
	dst = wire.AppendUint(wire.AppendUint(dst, uint64(a.Reserved)), micros(a.Retry))
	for _, l := range [...]tenant.Level{a.Requests, a.Tokens} {
		dst = wire.AppendUint(wire.AppendUint(wire.AppendUint(dst, uint64(l.Limit)), uint64(l.Remaining)), micros(l.Reset))
	}
	return appendAmounts(dst, a.State)
}

// unsettled is the answer to kindBudget of a coordinator that does not know yet what the former
// one has given.
const unsettled = byte(tenant.Tokens) + 1

var errUnsettled = errors.New("the coordinator does not know yet what the former one has given")

// appendAmounts appends a state without its key and age.
func appendAmounts(dst []byte, s tenant.State) []byte {
	dst = wire.AppendUint(wire.AppendUint(dst, s.Version.Epoch), s.Version.Change)
	return wire.AppendUint(wire.AppendUint(dst, uint64(s.Requests)), uint64(s.Tokens))
}

// mostChange bounds the number of a change, so that no count after it overflows.
const mostChange = 1 << 62

// amounts reads the output of appendAmounts.
func (r *reader) amounts() (s tenant.State) {
	s.Version = tenant.Version{Epoch: r.Uint(), Change: r.UintUpTo(mostChange)}
	s.Requests, s.Tokens = int64(r.UintUpTo(uint64(tenant.MostUsed))), int64(r.UintUpTo(uint64(tenant.MostUsed)))
	return s
}

func appendStates(dst []byte, states []tenant.State) []byte {
	dst = wire.AppendUint(dst, len(states))
	for _, s := range states {
		dst = wire.AppendUint(appendAmounts(append(dst, s.Key[:]...), s), micros(s.Age))
	}
	return dst
}

// leastState is the least size of a state in bytes.
const leastState = len(tenant.Key{}) + 5

// states reads the output of appendStates.
func (r *reader) states() []tenant.State {
	n := r.List(leastState)
	if n > tenant.MostTenants {
		r.Fail()
		return nil
	}
	states := make([]tenant.State, 0, n)
	for range n {
		key := r.Bytes(uint64(len(tenant.Key{})))
		s := r.amounts()
		s.Age = time.Duration(r.UintUpTo(mostReset)) * time.Microsecond
		copy(s.Key[:], key)
		states = append(states, s)
	}
	return states
}

// published is the content of kindBudgets.
type published struct {
	whole   bool     // the states are all, not only those that have changed
	epoch   uint64   // of the coordinator
	workers []uint64 // processes that share the budgets
	states  []tenant.State
}

func (p *published) append(dst []byte) []byte {
	whole := byte(0)
	if p.whole {
		whole = 1
	}
	dst = wire.AppendUint(wire.AppendUint(append(dst, whole), p.epoch), len(p.workers))
	for _, process := range p.workers {
		dst = binary.LittleEndian.AppendUint64(dst, process)
	}
	return appendStates(dst, p.states)
}

func (p *published) read(b []byte) error {
	r := newReader(b)
	p.whole, p.epoch = r.UintUpTo(1) != 0, r.Uint()
	for b := r.Bytes(uint64(r.List(8)) * 8); len(b) >= 8; b = b[8:] {
		p.workers = append(p.workers, binary.LittleEndian.Uint64(b))
	}
	p.states = r.states()
	if !r.Done() {
		return link.Garbage("states of budgets")
	}
	return nil
}

func micros(d time.Duration) uint64 {
	return min(uint64(max(0, d.Microseconds())), mostReset)
}

// readBudget reads the output of appendBudget.
func readBudget(b []byte) (a tenant.Answer, workers int, err error) {
	if len(b) == 1 && b[0] == unsettled {
		return a, 1, errUnsettled
	}
	r := newReader(b)
	a.Refused = tenant.Reason(r.UintUpTo(uint64(tenant.Tokens)))
	workers = int(r.UintUpTo(math.MaxInt32))
	reset := func() time.Duration { return time.Duration(r.UintUpTo(mostReset)) * time.Microsecond }
	amount := func() int64 { return int64(r.UintUpTo(tenant.MaxPerMinute)) }
	a.Reserved, a.Retry = amount(), reset()
	a.Requests = tenant.Level{Limit: amount(), Remaining: amount(), Reset: reset()}
	a.Tokens = tenant.Level{Limit: amount(), Remaining: amount(), Reset: reset()}
	a.State = r.amounts()
	if !r.Done() {
		return tenant.Answer{}, 1, link.Garbage("the answer about a budget")
	}
	return a, workers, nil
}
