package exchange

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

func errNotCarried(connector string, api openai.API) error {
	return openai.NewError(openai.CodeNotImplemented, fmt.Sprintf("the %s protocol does not support %s", connector, api.Path()))
}

// rejectedError returns the client's error for a request that the plan policy rejected with
// that status; 0 means 503.
func rejectedError(status int) *openai.Error {
	e := openai.NewError(openai.CodeRejectedByPolicy, "the plan policy rejected the request")
	if status == 0 {
		return e
	}
	e.Status = status
	switch {
	case status == 429:
		e.Type = "rate_limit_error"
	case status < 500:
		e.Type = "invalid_request_error"
	}
	return e
}

// PublicError returns the error that the client gets for an error of its request.
func PublicError(err error) *openai.Error {
	var (
		oe *openai.Error
		le *attempt.Error
		nt *coordinator.NoTargetError
		re *coordinator.RejectedError
		he *coordinator.HeldError
	)
	switch {
	case errors.As(err, &oe):
		return oe
	case errors.As(err, &le):
		return le.Public()
	case errors.As(err, &nt):
		return openai.NewError(openai.CodeNoTarget, nt.Error())
	case errors.Is(err, coordinator.ErrNoID):
		return openai.NewError(openai.CodeNoID, "no disagg id is left for the request; the coordinator grants none")
	case errors.Is(err, coordinator.ErrUnknownModel):
		return UnknownModel("", nil)
	case errors.Is(err, coordinator.ErrModelNeeded):
		return openai.NewFieldError(openai.CodeMissingField, "model", "model is needed: the engines serve more than one")
	case errors.As(err, &re):
		return rejectedError(re.Status)
	case errors.As(err, &he):
		return admission.ErrHeld
	case errors.Is(err, downstream.ErrDraining), errors.Is(err, context.Canceled):
		return downstream.Draining
	}
	return openai.NewError(openai.CodeInternal, "internal error")
}

// UnknownModel returns the client's error if no engine serves the model of that name.
// known are the models that the client may request.
func UnknownModel(name string, known []string) *openai.Error {
	const maxName, maxKnown = 200, 10 // bytes, models
	text := "the model does not exist"
	if name != "" {
		text = fmt.Sprintf("the model %.*q does not exist", maxName, name)
	}
	if len(known) > 0 {
		text += "; the engines serve " + strings.Join(known[:min(len(known), maxKnown)], ", ")
	}
	if more := len(known) - maxKnown; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return openai.NewFieldError(openai.CodeModelNotFound, "model", text)
}

// reply sends err to the client as the whole answer. No byte of the answer may have been sent.
func (x *exchange) reply(err error) {
	var le *attempt.Error
	if errors.As(err, &le) && le.Reply != nil {
		x.env.AnswerReply(le)
		return
	}
	var refused *refusedError
	if errors.As(err, &refused) {
		x.answerRefusal(refused)
		return
	}
	e := PublicError(err)
	var none *coordinator.NoTargetError
	switch {
	case errors.Is(err, coordinator.ErrUnknownModel):
		e = UnknownModel(x.requested(), x.models())
	case errors.Is(err, admission.ErrNoEngineTimeout):
		if n := x.asleep(); n > 0 {
			e = openai.NewError(openai.CodeNoEngineTimeout, e.Message+coordinator.Sleeping(n))
			if x.env.Config.Sleep.Wake {
				e.Message += ", and none woke in time"
			}
		}
	case errors.As(err, &none) && none.Model == x.req.Model:
		e = PublicError(&coordinator.NoTargetError{Phase: none.Phase, Model: x.requested(), Asleep: x.asleep()})
	}
	x.journal.Status, x.journal.ErrorCode = e.Status, e.Code
	x.client.Error(x.req.API, e)
}

// asleep returns the number of targets that would serve the request's model if they did not sleep.
func (x *exchange) asleep() int {
	if p, ok := x.run.Registry.Snapshot().Pool(x.knownModel()); ok {
		return len(p.Asleep)
	}
	return 0
}

// outcomeOf returns the outcome of an exchange whose answer is the error err.
func outcomeOf(err error) telemetry.Outcome {
	var le *attempt.Error
	if downstream.OwnFault(err) {
		return telemetry.OutcomeShed
	}
	if errors.As(err, &le) && !le.Permanent {
		if le.Code == 504 {
			return telemetry.OutcomeTimeout
		}
		return telemetry.OutcomeEngineError
	}
	if le != nil {
		return telemetry.OutcomeClientError
	}
	oe := PublicError(err)
	switch {
	case oe.Status < 400: // a picker has answered itself
		return telemetry.OutcomeOK
	case oe.Code == openai.CodePickerFailed || oe.Code == openai.CodeRejectedByPicker && oe.Status/100 == 5 || oe.Code == openai.CodeNoTarget || oe.Code == openai.CodeNoEngineTimeout || oe.Code == openai.CodeRejectedByPolicy:
		return telemetry.OutcomeNoTarget
	case oe.Status == 429 || oe.Code == openai.CodeQueueTimeout || oe.Code == openai.CodeSaturated || oe.Code == openai.CodeDeadlineExceeded || oe.Code == openai.CodeHeldByPolicy:
		return telemetry.OutcomeShed
	case oe.Status/100 == 4 || oe.Status == 501:
		return telemetry.OutcomeClientError
	}
	return telemetry.OutcomeInternal
}
