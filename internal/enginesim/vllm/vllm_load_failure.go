package vllm

import (
	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// LoadFailure implements loadingProtocol. The first output of the engine opens the answer, also
// if that output is the failure (entrypoints/openai/chat_completion/serving.py, first_iteration;
// entrypoints/anthropic/serving.py, first_item). Newer releases then send the error. Releases
// with DropLoadErrors end the stream instead, with the usage if the client requested it;
// responses and completions with echo have always reported the error.
func (v *VLLM) LoadFailure(req *core.Request, seqs []*core.Sequence, err *core.APIError) []any {
	var events []any
	switch {
	case req.Route == core.RouteMessages:
		events = messagesOpening(req, seqs[0])[:1]
	case req.Route == core.RouteChat:
		for _, s := range seqs {
			events = append(events, v.vllmDialect.Opening(req, s)...)
		}
	}
	if !v.e.Cfg.DropLoadErrors || req.Route == core.RouteResponses || req.Route == core.RouteCompletions && req.Echo {
		if failure := v.ErrorEvents(req, err); failure != nil {
			return append(events, failure...)
		}
		return nil
	}
	if req.Route == core.RouteMessages {
		return append(events, messagesClosing(req, seqs[0])[1:]...) // no block was opened
	}
	return append(events, v.Closing(req, seqs)...)
}
