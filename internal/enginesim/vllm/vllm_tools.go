package vllm

import (
	"math"
	"net/http"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// The errors of releases that search for a forced tool call in a text that was
// cut off after its first token.
var (
	errToolJSON = &core.APIError{
		Status: http.StatusBadRequest, Type: "BadRequestError",
		Message: "1 validation error for list[function-wrap[__log_extra_fields__()]]\n  Invalid JSON: expected value at line 1 column 1",
	}
	errToolAssertion = &core.APIError{Status: http.StatusInternalServerError, Type: "InternalServerError"}
)

// parseTools is the serving layer's parsing of an unary answer whose request
// forces a tool call. The engine core has ended the request by then and holds
// its blocks. Some releases fail the request anyway: before 0.18 ("required"),
// before 0.19 ("required" in a response), and before 0.21 (a named function,
// with a reasoning parser, which the engine has).
func (v *VLLM) parseTools(s *core.Sequence) error {
	if s.Req.Stream || len(s.Output) != 1 || s.Finish != "length" {
		return nil
	}
	minor := v.minor()
	word, err := s.Req.Fields.Str("tool_choice", "")
	kind := ""
	if err != nil { // the value is an object
		choice, _ := s.Req.Fields.Object("tool_choice")
		kind, _ = choice.Str("type", "")
	}
	switch {
	case word == "required" && s.Req.Route == core.RouteResponses && minor < 19,
		word == "required" && s.Req.Route == core.RouteChat && minor < 18,
		kind == "any" && s.Req.Route == core.RouteMessages && minor < 18:
		return errToolJSON
	case (kind == "function" || kind == "tool") && minor < 21:
		return errToolAssertion
	}
	return nil
}

// minor is the number of the release, large for a current build without one.
func (v *VLLM) minor() int {
	_, rest, _ := strings.Cut(v.e.Cfg.Version, ".")
	digits, _, _ := strings.Cut(rest, ".")
	if minor, _ := strconv.Atoi(digits); minor > 1 {
		return minor
	}
	return math.MaxInt
}
