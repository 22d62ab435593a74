package enginesim

// loadFailure implements loadingProtocol. The first output of the engine opens the answer, also
// if that output is the failure (entrypoints/openai/chat_completion/serving.py, first_iteration;
// entrypoints/anthropic/serving.py, first_item). Newer releases then send the error. Releases
// with DropLoadErrors end the stream instead, with the usage if the client requested it;
// responses and completions with echo have always reported the error.
func (v *vllm) loadFailure(req *request, seqs []*sequence, err *apiError) []any {
	var events []any
	switch {
	case req.Route == routeMessages:
		events = messagesOpening(req, seqs[0])[:1]
	case req.Route == routeChat:
		for _, s := range seqs {
			events = append(events, v.vllmDialect.opening(req, s)...)
		}
	}
	if !v.e.cfg.DropLoadErrors || req.Route == routeResponses || req.Route == routeCompletions && req.Echo {
		if failure := v.errorEvents(req, err); failure != nil {
			return append(events, failure...)
		}
		return nil
	}
	if req.Route == routeMessages {
		return append(events, messagesClosing(req, seqs[0])[1:]...) // no block was opened
	}
	return append(events, v.closing(req, seqs)...)
}
