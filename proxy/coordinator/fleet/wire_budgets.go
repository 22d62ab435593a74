package fleet

import (
	"errors"
	"math"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// maxTenantName bounds the name of a tenant, in bytes.
const maxTenantName = 1024

// putTenant returns the name and the limits of a tenant.
func putTenant(t *tenant.Tenant) *fleetpb.Tenant {
	l := t.Limits
	return &fleetpb.Tenant{
		Name: t.Name[:min(len(t.Name), maxTenantName)], Requests: uint64(l.Requests), Tokens: uint64(l.Tokens), Exchanges: uint64(l.Exchanges),
	}
}

// getTenant returns the tenant of a message, or nil if the message has none.
func getTenant(m *fleetpb.Tenant) *tenant.Tenant {
	if m == nil || len(m.Name) > maxTenantName {
		return nil
	}
	return tenant.New(tenant.Tenant{Name: m.Name, Limits: tenant.Limits{
		Requests: amount(m.Requests), Tokens: amount(m.Tokens), Exchanges: int(min(m.Exchanges, math.MaxInt32)),
	}})
}

// amount returns an amount of requests or tokens.
func amount(v uint64) int64 { return int64(min(v, tenant.MaxPerMinute)) }

// maxReset is the longest time of a Level or of Answer.Retry, in µs.
const maxReset = uint64(time.Hour / time.Microsecond)

func resetMicros(d time.Duration) uint64 { return min(microsOf(d), maxReset) }

func resetOf(micros uint64) time.Duration { return durationOf(min(micros, maxReset)) }

// putBudget returns the answer to KIND_BUDGET, with the number of workers.
func putBudget(a *tenant.Answer, workers int) *fleetpb.BudgetAnswer {
	level := func(l tenant.Level) *fleetpb.Level {
		return &fleetpb.Level{Limit: uint64(l.Limit), Remaining: uint64(l.Remaining), ResetUs: resetMicros(l.Reset)}
	}
	return &fleetpb.BudgetAnswer{
		Settled: true, Refused: uint32(a.Refused), Workers: uint32(workers), Reserved: uint64(a.Reserved), RetryUs: resetMicros(a.Retry),
		Requests: level(a.Requests), Tokens: level(a.Tokens), State: putState(&a.State),
	}
}

var errUnsettled = errors.New("the coordinator does not know yet what the former one has given")

// readBudget reads the output of putBudget. An unknown reason of a refusal is no answer: the
// worker then gives its share.
func readBudget(b []byte) (a tenant.Answer, workers int, err error) {
	var m fleetpb.BudgetAnswer
	if err := decode(b, &m, "the answer about a budget"); err != nil {
		return a, 1, err
	}
	if !m.Settled || m.Refused > uint32(tenant.Tokens) {
		return a, 1, errUnsettled
	}
	level := func(l *fleetpb.Level) tenant.Level {
		return tenant.Level{Limit: amount(l.GetLimit()), Remaining: amount(l.GetRemaining()), Reset: resetOf(l.GetResetUs())}
	}
	a = tenant.Answer{
		Refused: tenant.Reason(m.Refused), Reserved: amount(m.Reserved), Retry: resetOf(m.RetryUs),
		Requests: level(m.Requests), Tokens: level(m.Tokens),
	}
	if m.State != nil {
		a.State = getState(m.State)
	}
	return a, int(min(max(m.Workers, 1), math.MaxInt32)), nil
}

// maxChange bounds the number of a change, so that no count after it overflows.
const maxChange = 1 << 62

func putState(s *tenant.State) *fleetpb.BudgetState {
	return &fleetpb.BudgetState{
		Key: s.Key[:], Epoch: s.Version.Epoch, Change: s.Version.Change,
		Requests: uint64(s.Requests), Tokens: uint64(s.Tokens), AgeUs: resetMicros(s.Age),
	}
}

func getState(m *fleetpb.BudgetState) (s tenant.State) {
	copy(s.Key[:], m.Key)
	s.Version = tenant.Version{Epoch: m.Epoch, Change: min(m.Change, maxChange)}
	s.Requests, s.Tokens = int64(min(m.Requests, uint64(tenant.MaxUsed))), int64(min(m.Tokens, uint64(tenant.MaxUsed)))
	s.Age = resetOf(m.AgeUs)
	return s
}

func putStates(states []tenant.State) []*fleetpb.BudgetState {
	list := make([]*fleetpb.BudgetState, len(states))
	for i := range states {
		list[i] = putState(&states[i])
	}
	return list
}

// getStates returns the states of a message.
func getStates(list []*fleetpb.BudgetState) ([]tenant.State, error) {
	if len(list) > tenant.MaxTenants {
		return nil, link.Garbage("states of budgets")
	}
	states := make([]tenant.State, len(list))
	for i, m := range list {
		if len(m.Key) != len(tenant.Key{}) {
			return nil, link.Garbage("states of budgets")
		}
		states[i] = getState(m)
	}
	return states, nil
}

// published is the content of KIND_BUDGETS.
type published struct {
	whole   bool     // the states are all, not only those that have changed
	epoch   uint64   // of the coordinator
	workers []uint64 // processes that share the budgets
	states  []tenant.State
}

func (p *published) append(dst []byte) []byte {
	return fleetpb.Append(dst, &fleetpb.PublishedBudgets{Whole: p.whole, Epoch: p.epoch, Workers: p.workers, States: putStates(p.states)})
}

func (p *published) read(b []byte) (err error) {
	var m fleetpb.PublishedBudgets
	if err := decode(b, &m, "states of budgets"); err != nil {
		return err
	}
	p.whole, p.epoch, p.workers = m.Whole, m.Epoch, m.Workers
	p.states, err = getStates(m.States)
	return err
}
