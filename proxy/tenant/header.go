package tenant

import (
	"math"
	"net/http"
	"strconv"
	"time"
)

// SetHeader sets the lines that describe the budgets, in OpenAI's form. Budgets that the
// tenant does not have get no lines. A refused request also gets Retry-After, in seconds.
func (a *Answer) SetHeader(h http.Header) {
	a.Requests.setHeader(h, "Requests")
	a.Tokens.setHeader(h, "Tokens")
	if a.Refused != Admitted {
		h.Set("Retry-After", strconv.FormatInt(a.RetrySeconds(), 10))
	}
}

// RetrySeconds returns Retry in whole seconds, at least 1.
func (a *Answer) RetrySeconds() int64 {
	return max(1, int64(math.Ceil(a.Retry.Seconds())))
}

func (l Level) setHeader(h http.Header, kind string) {
	if l.Limit == 0 {
		return
	}
	h.Set("X-Ratelimit-Limit-"+kind, strconv.FormatInt(l.Limit, 10))
	h.Set("X-Ratelimit-Remaining-"+kind, strconv.FormatInt(l.Remaining, 10))
	h.Set("X-Ratelimit-Reset-"+kind, Duration(l.Reset))
}

// Duration writes a time as OpenAI does: 12ms, 1s, 1.5s, 6m0s. It rounds up to a whole ms.
func Duration(d time.Duration) string {
	if d <= 0 {
		return "0s"
	}
	return (d + time.Millisecond - 1).Truncate(time.Millisecond).String()
}
