package fleet

import (
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
	return dst
}

func micros(d time.Duration) uint64 {
	return min(uint64(max(0, d.Microseconds())), mostReset)
}

// readBudget reads the output of appendBudget.
func readBudget(b []byte) (a tenant.Answer, workers int, err error) {
	r := newReader(b)
	a.Refused = tenant.Reason(r.UintUpTo(uint64(tenant.Tokens)))
	workers = int(r.UintUpTo(math.MaxInt32))
	reset := func() time.Duration { return time.Duration(r.UintUpTo(mostReset)) * time.Microsecond }
	amount := func() int64 { return int64(r.UintUpTo(tenant.MaxPerMinute)) }
	a.Reserved, a.Retry = amount(), reset()
	a.Requests = tenant.Level{Limit: amount(), Remaining: amount(), Reset: reset()}
	a.Tokens = tenant.Level{Limit: amount(), Remaining: amount(), Reset: reset()}
	if !r.Done() {
		return tenant.Answer{}, 1, link.Garbage("the answer about a budget")
	}
	return a, workers, nil
}
