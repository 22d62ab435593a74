package enginesim

// vllmDialect renders answers as vLLM does.
type vllmDialect struct{}

func (vllmDialect) errorBody(err *apiError) any {
	var param any
	if err.Param != "" {
		param = err.Param
	}
	return obj("error", obj("message", err.Message, "type", err.Type, "param", param, "code", err.Status))
}

func (d vllmDialect) errorEvents(_ *request, err *apiError) []any { return []any{d.errorBody(err)} }

func (vllmDialect) streamOptions() streamOptions { return streamOptions{ErrorDone: true} }

func (vllmDialect) unary(req *request, seqs []*sequence) any {
	var choices []any
	for _, s := range seqs {
		choices = append(choices, obj("index", s.choice, "text", s.answerText(), "finish_reason", s.finish))
	}
	return obj("id", req.ID, "choices", choices)
}

func (vllmDialect) opening(*request, *sequence) []any { return nil }

func (vllmDialect) event(req *request, s *sequence, p piece) any {
	return obj("id", req.ID, "choices", []any{obj("index", s.choice, "text", p.Text)})
}

func (vllmDialect) closing(*request, []*sequence) []any { return nil }
