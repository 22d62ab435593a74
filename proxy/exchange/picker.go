package exchange

import (
	"bytes"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
	"github.com/pdproxy/pdproxy/proxy/sidecar/extproc"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// The results of a request to the picker that are no failures.
const (
	pickPicked    = "picked"
	pickRefused   = "refused"
	pickCancelled = "cancelled"
)

// askPicker lets the ext_proc picker choose the engines of the request. The picker may change the
// request, or refuse it. Without a usable choice, the policies place the request if the
// configuration fails open; otherwise askPicker returns the client's error. The picker of a sidecar
// only chooses decode: see pickDecode.
func (x *exchange) askPicker() error {
	e := &x.env
	e.Fields = x.client.AppendFields(e.Fields[:0], x.req.ContentType, e.Key == "", e.Config.Server.TrustPDFields)
	result, err := x.consult(x.pickRequest(), x.followPick)
	if result == pickPicked || result == pickRefused || result == pickCancelled || downstream.OwnFault(err) {
		return err
	}
	if !x.picker.FailsOpen() {
		return openai.NewError(openai.CodePickerFailed, "the endpoint picker gave no usable answer: "+result)
	}
	x.journal.Fallback("picker", result)
	return nil
}

// pickDecode lets the picker of a sidecar choose the decode engine. Without a usable choice, the
// place policy chooses it.
func (x *exchange) pickDecode() (picked bool) {
	route := &x.placing.route
	if x.picker == nil { // a reload has added the picker to the sidecar since the request came
		route.DropPick(extproc.Unavailable)
		return false
	}
	q := x.pickRequest()
	route.AsksForDecode(x.picker, q)
	result, _ := x.consult(q, func(d *extproc.Decision) (string, error) {
		if d.Changed { // prefill has computed the KV of another body
			return extproc.BadAnswer, nil
		}
		if reason := route.FollowDecode(x.picker, d); reason != "" {
			return reason, nil
		}
		x.env.Fields = sidecar.Mutate(x.env.Fields, &d.Header, x.env.Config.Server.TrustPDFields)
		return pickPicked, nil
	})
	if result != pickPicked {
		route.DropPick(result)
	}
	return result == pickPicked
}

// consult asks the picker, lets follow use its choice, and records the result. The picker then sees
// the answer to the request.
func (x *exchange) consult(q *extproc.Request, follow func(*extproc.Decision) (result string, err error)) (result string, err error) {
	began := time.Now()
	stream, d, err := x.picker.Ask(x.env.Context, q)
	p := &journal.Pick{Result: pickPicked, Took: time.Since(began)}
	if d != nil {
		p.Destinations, p.Prefill, p.Encoders, p.BodyChanged = d.Destinations, d.Prefill, d.Encoders, d.Changed
	}
	var failed *extproc.Error
	switch {
	case err != nil && x.env.Context.Err() != nil:
		p.Result = pickCancelled
	case errors.As(err, &failed):
		p.Result = failed.Reason
	case d.Refusal != nil:
		p.Result, err = pickRefused, newRefused(d.Refusal)
	default:
		x.observed.Show(stream)
		p.Result, err = follow(d)
	}
	x.journal.Picked(p)
	return p.Result, err
}

// pickRequest returns the request as the picker sees it: with the header lines that every leg
// carries.
func (x *exchange) pickRequest() *extproc.Request {
	r := x.client.Request()
	q := &extproc.Request{
		Method: r.Method, Scheme: "http", Authority: r.Host, Path: r.URL.RequestURI(),
		Header: append(slices.Clip(x.env.Fields), upstream.Field{Name: "X-Request-Id", Value: x.journal.RequestID}),
		Body:   x.client.Body(), Reserve: x.client.Reserve,
	}
	if r.TLS != nil {
		q.Scheme = "https"
	}
	for name, values := range r.Trailer {
		for _, v := range values {
			q.Trailer = append(q.Trailer, upstream.Field{Name: name, Value: v})
		}
	}
	return q
}

// followPick makes the picker's choice that of the request, and returns the result.
func (x *exchange) followPick(d *extproc.Decision) (result string, err error) {
	if d.Changed {
		if err := x.replaceBody(d.Body); err != nil {
			return extproc.BadAnswer, err
		}
	}
	x.changes = &d.Header
	if reason := x.placing.route.Follow(x.picker, x.routed(), d); reason != "" {
		return reason, nil
	}
	return pickPicked, nil
}

// routed returns the request for its route.
func (x *exchange) routed() sidecar.Request {
	return sidecar.Request{Body: &x.req, Ask: &x.placing.ask, Journal: &x.journal, ScheduleStyle: x.env.Config.TRTLLM.ScheduleStyle}
}

// replaceBody replaces the body by that of the picker, which must be a request too.
func (x *exchange) replaceBody(body []byte) error {
	scanned := openai.Request{Object: openai.Object{Memory: &x.client}}
	if err := openai.ReadRequest(x.req.API, x.client.Header().Get("Content-Type"), body, &scanned); err != nil {
		return err
	}
	if err := x.client.RewriteBody(len(body), func(dst []byte) []byte { return append(dst, body...) }); err != nil {
		return err
	}
	before := x.req.Model
	if err := x.scan(); err != nil {
		return err
	}
	if x.req.Model != before {
		x.journal.Stage(telemetry.StageNone) // in the gauges of the old model
		x.meter()
		x.journal.Stage(telemetry.StageRuns)
	}
	return nil
}

// closeObserved ends the picker's stream. A client that leaves with the whole answer has not
// cancelled the request.
func (x *exchange) closeObserved() {
	if x.observed.Late() {
		x.run.Metrics.PickerLate()
	}
	if x.observed.Lost() {
		x.run.Metrics.PickerLost()
	}
	x.observed.Close(x.client.Begun() && !x.client.MustCut())
}

// refusedError is the answer of a picker to the client.
type refusedError struct {
	public  *openai.Error
	refusal *extproc.Refusal
	given   bool // the body of refusal is the answer; otherwise public is
}

func (e *refusedError) Error() string { return e.public.Error() }

// Unwrap returns the error in OpenAI's form.
func (e *refusedError) Unwrap() error { return e.public }

// maxRefusal is the longest part of a picker's text in an error, in bytes.
const maxRefusal = 500

// newRefused returns the client's error for a refusal. A JSON object is passed on as it is. Any
// other text becomes the message of an error in OpenAI's form.
func newRefused(r *extproc.Refusal) *refusedError {
	e := openai.NewError(openai.CodeRejectedByPicker, "the endpoint picker refused the request")
	e.Status = r.Status
	switch {
	case r.Status == http.StatusTooManyRequests:
		e.Type = "rate_limit_error"
	case r.Status < 500:
		e.Type = "invalid_request_error"
	}
	body := bytes.TrimSpace(r.Body)
	given := r.Status < 400 || len(body) > 1 && body[0] == '{' && body[len(body)-1] == '}'
	if text := string(body[:min(len(body), maxRefusal)]); !given && text != "" && utf8.ValidString(text) {
		e.Message += ": " + strings.Join(strings.Fields(text), " ")
	}
	return &refusedError{public: e, refusal: r, given: given}
}

// answerRefusal answers the client with the refusal of the picker.
func (x *exchange) answerRefusal(e *refusedError) {
	sidecar.MutateHeader(x.client.AnswerHeader(), &e.refusal.Header)
	x.journal.Status, x.journal.ErrorCode = e.public.Status, e.public.Code
	if e.given {
		_ = x.client.WriteBody(e.public.Status, e.refusal.Body) // the client may have left
		return
	}
	x.client.Error(x.req.API, e.public)
}
