package enginesim

import (
	"context"
	"errors"
	"net/http"
)

// vllm is the vLLM engine: with the NixlConnector (pull) when nixl is set, else
// a plain one.
type vllm struct {
	vllmDialect
	e    *Engine
	nixl bool
}

func newVLLM(e *Engine) *vllm {
	return &vllm{e: e, nixl: e.cfg.Connector == ConnectorVLLMNixl}
}

func (v *vllm) routes(*http.ServeMux) {}

func (v *vllm) start() error { return nil }

func (v *vllm) parse(route string, h http.Header, body []byte) (*request, *apiError) {
	f, ferr := decodeFields(body)
	if ferr != nil {
		return nil, pydanticError(ferr)
	}
	req, ferr := parseOpenAI(route, h, f)
	if ferr != nil {
		return nil, pydanticError(ferr)
	}
	return req, nil
}

// pydanticError is vLLM's answer to a body that its models refuse.
func pydanticError(err *fieldError) *apiError {
	return &apiError{Status: http.StatusBadRequest, Type: "Bad Request", Message: err.Error(), Param: err.Field}
}

func (v *vllm) generate(ctx context.Context, s *sequence, emit func(token)) error {
	r := v.e.pickRank(s.req.Rank)
	defer r.release(s)
	if err := r.reserve(ctx, s, len(s.prompt)+s.limit-1, true); err != nil {
		return err
	}
	if err := r.prefill(ctx, s); err != nil {
		return err
	}
	return r.decode(ctx, s, emit)
}

func (v *vllm) message(context.Context, *rank, sideMessage) (sideMessage, error) {
	return sideMessage{}, errors.New("unknown message")
}
