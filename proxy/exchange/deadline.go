package exchange

import (
	"context"
	"strconv"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// maxDeadline bounds the value of limits.deadline_header, in milliseconds.
const maxDeadline = 24 * 60 * 60 * 1000

// deadline returns the time at which the first token is due: that of limits.deadline_header, or
// else that of the request's class. Zero: none.
func (x *exchange) deadline(class config.PriorityClass) (time.Time, error) {
	limit := time.Duration(class.Deadline)
	if header := x.env.Config.Limits.DeadlineHeader; header != "" {
		if text := x.client.Header().Get(header); text != "" {
			ms, err := strconv.ParseUint(text, 10, 32)
			if err != nil || ms < 1 || ms > maxDeadline {
				return time.Time{}, &openai.Error{
					Status: 400, Code: openai.CodeBadHeader, Param: header,
					Message: "the header " + header + " must be a number of milliseconds from 1 to " + strconv.Itoa(maxDeadline),
				}
			}
			limit = time.Duration(ms) * time.Millisecond
		}
	}
	if limit == 0 {
		return time.Time{}, nil
	}
	return x.journal.Start.Add(limit), nil
}

// untilDeadline returns a context that ends with ctx, and with admission.ErrDeadline at the
// deadline of the request. The caller calls cancel.
func (x *exchange) untilDeadline(ctx context.Context) (_ context.Context, cancel context.CancelFunc) {
	if x.placing.ask.Deadline.IsZero() {
		return ctx, func() {}
	}
	return context.WithDeadlineCause(ctx, x.placing.ask.Deadline, admission.ErrDeadline)
}
