package prompt

import (
	"context"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// ExactIDs returns the token ids that prefill will compute, nil if they are not certain.
// It requests them from engines only if ask is set. The caller must not change them.
func (m *Matcher) ExactIDs(ctx context.Context, p *Prompt, s Source, ask bool) []uint32 {
	if v, _ := s.Request.Get("truncate_prompt_tokens"); !openai.IsNull(v) {
		return nil
	}
	if len(p.found) == 0 {
		if !ask && s.Request.Prompt != openai.PromptTokens && s.Request.Prompt != openai.PromptTokenLists {
			return nil
		}
		p.Used = true
		m.o.Coordinator.Cut(&p.cut, s.Request.Model)
		p.found, _ = m.tokenIDs(ctx, p, s) // there are none without memory for them
	}
	if !p.exact {
		return nil
	}
	return p.found
}

// tokenIDs returns the token ids of the prompt, nil if no source has them in time. The error
// reports that there is no memory for them.
func (m *Matcher) tokenIDs(ctx context.Context, p *Prompt, s Source) ([]uint32, error) {
	if err := p.makeRoom(s); err != nil {
		return nil, err
	}
	var err error
	if p.ids, err = s.Request.AppendTokenIDs(p.ids[:0]); err != nil {
		p.ids = p.ids[:0]
	}
	if m.o.Tokens == nil {
		p.exact = len(p.ids) > 0 && s.Request.API != openai.Chat // vLLM ignores the token ids of a chat request
		return p.ids, nil
	}
	result := m.o.Tokens.Tokens(ctx, tokens.Prompt{Request: s.Request, IDs: p.ids, Model: p.cut.Model, Instances: m.tokenizersOf(p.cut.Model)})
	m.o.Metrics.Prompt(result.Source.String(), result.Reason.String())
	if result.Err != nil {
		m.o.Log.Debug("no token ids", "request_id", s.RequestID, "engine", result.Instance, "reason", result.Reason.String(), "error", result.Err)
	}
	p.exact = result.Exact && (result.Source != tokens.Client || s.Request.API != openai.Chat)
	return result.IDs, nil
}

// makeRoom makes room for the token ids that the client sent. Memory counts the room
// before makeRoom allocates it.
func (p *Prompt) makeRoom(s Source) error {
	n := s.Request.MaxTokenIDs()
	if n <= max(maxKept, cap(p.ids)) {
		return nil
	}
	if err := s.Memory.Derive(4 * n); err != nil {
		return err
	}
	p.ids = make([]uint32, 0, n)
	return nil
}

// tokenizers has, by model, the instances from which token ids can be requested.
type tokenizers struct {
	of      *engine.Snapshot
	byModel map[string][]tokens.Instance
}

// tokenizersOf returns the ready instances that may tokenize for a model.
func (m *Matcher) tokenizersOf(model string) []tokens.Instance {
	now := m.o.Registry.Snapshot()
	if known := m.tokenizers.Load(); known != nil && known.of == now {
		return known.byModel[model]
	}
	fresh := &tokenizers{of: now, byModel: make(map[string][]tokens.Instance)}
	for _, i := range now.Instances {
		if i.State() == engine.Ready {
			for _, served := range i.Models() {
				fresh.byModel[served] = append(fresh.byModel[served], tokens.Instance{Name: i.Spec.Name, Dialect: i.Tokenizes()})
			}
		}
	}
	m.tokenizers.Store(fresh)
	return fresh.byModel[model]
}
