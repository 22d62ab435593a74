// Package tenant holds the budgets of tenants: requests and tokens per minute, and the
// number of requests that run at the same time.
//
// A Ledger counts in memory, or in a file that all processes of a host share. Amounts are
// integers, so that a budget is exact to one request.
//
// The decisions behind this package are in docs/design/tenants.md.
package tenant

import (
	"context"
	"crypto/sha256"
	"slices"
	"time"
)

// MaxPerMinute is the largest budget of requests or tokens per minute.
const MaxPerMinute = 10_000_000_000

// Tenant is a group of clients with common limits. It is immutable and safe for concurrent
// use. Only New makes one.
type Tenant struct {
	Name   string
	Class  string   // name of a priority class; "": none
	Weight float64  // share among the tenants that wait, above 0
	Models []string // names that its requests may have as the model; nil: all
	Limits Limits
	key    Key
}

// Limits are the limits of one tenant. 0 is no limit.
type Limits struct {
	Requests  int64 // per minute, at most MaxPerMinute
	Tokens    int64 // per minute, at most MaxPerMinute
	Exchanges int   // requests that run or wait at the same time
}

// New returns a tenant. It completes t: a Weight of 0 is 1.
func New(t Tenant) *Tenant {
	if t.Weight == 0 {
		t.Weight = 1
	}
	sum := sha256.Sum256([]byte(t.Name))
	t.key = Key(sum[:len(t.key)])
	return &t
}

// Key returns the key by which ledgers know the tenant.
func (t *Tenant) Key() Key { return t.key }

// With returns the tenant for a client of it that has another class, unless class is "", and
// may use only some of the models, unless models is nil. The budgets are those of t.
func (t *Tenant) With(class string, models []string) *Tenant {
	c := *t
	if class != "" {
		c.Class = class
	}
	switch {
	case models == nil:
	case t.Models == nil:
		c.Models = models
	default:
		c.Models = []string{}
		for _, m := range models {
			if t.Allows(m) {
				c.Models = append(c.Models, m)
			}
		}
	}
	return &c
}

// Share returns t with the limits of one of n processes that share its budgets. Limits are
// rounded down, so that the shares together are not more than the budgets, but a share of a limit
// is at least 1.
func (t *Tenant) Share(n int) *Tenant {
	c := *t
	c.Limits.Requests = shareOf(t.Limits.Requests, n)
	c.Limits.Tokens = shareOf(t.Limits.Tokens, n)
	c.Limits.Exchanges = int(shareOf(int64(t.Limits.Exchanges), n))
	return &c
}

// shareOf returns the n-th part of a limit. 0 is no limit.
func shareOf(limit int64, n int) int64 {
	if limit == 0 {
		return 0
	}
	return max(1, limit/int64(max(1, n)))
}

// Allows reports whether requests of the tenant may name the model. A nil Tenant may use
// every model.
func (t *Tenant) Allows(model string) bool {
	return t == nil || t.Models == nil || slices.Contains(t.Models, model)
}

// Reason is why a request is refused.
type Reason uint8

// The reasons.
const (
	Admitted  Reason = iota // the request is not refused
	Exchanges               // as many requests run as may
	Requests                // the requests of the minute are used
	Tokens                  // the tokens of the minute are used
)

// Level is the state of one budget. The zero value is that of a tenant without the budget.
type Level struct {
	Limit     int64         // per minute
	Remaining int64         // what a request could take now
	Reset     time.Duration // until the budget is whole again
}

// Answer is the answer to a request for a part of the budgets.
type Answer struct {
	Refused  Reason
	Number   uint64        // for Spent
	Reserved int64         // tokens
	Retry    time.Duration // after which a refused request may succeed; 0: unknown
	Requests Level
	Tokens   Level
	State    State // of the tenant after the request
}

// Spent is the use of a part of the budgets that Take has given.
type Spent struct {
	Number   uint64 // that Take has returned
	Reserved int64  // that Take has returned
	Used     int64  // tokens
	Undone   bool   // the request does not count; Used is 0
}

// Budgets gives tenants parts of their budgets. An implementation is safe for concurrent use.
type Budgets interface {
	// Take takes one request, one place and that many tokens from the budgets of t, or
	// nothing if one of them does not suffice. A request that needs more tokens than the
	// budget of a whole minute takes the whole budget. The caller calls Settle once for each
	// Answer that is Admitted.
	Take(ctx context.Context, t *Tenant, tokens int64) Answer
	// Settle ends a request of t: it frees the place and corrects the tokens.
	Settle(t *Tenant, s Spent)
}
