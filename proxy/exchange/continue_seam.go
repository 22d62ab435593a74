package exchange

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/continuation"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/prompt"
)

const (
	// seamTime is how long the search for the seam of a stream may take, and askTime how long one
	// engine may take to decode a few tokens.
	seamTime, askTime = 3 * time.Second, time.Second
	// contextTokens is the number of tokens before those of the tail that are decoded with them. A tokenizer may treat
	// the first token of a text differently.
	contextTokens = 16
)

// seam finds where the new answer begins. The engines of the model decode the last tokens of the
// stream.
func (x *exchange) seam(tail *continuation.Tail) (continuation.Meeting, continuation.Reason) {
	k := x.env.Kept
	before := len(k.IDs)
	for _, e := range tail.Events {
		before -= len(e.IDs)
	}
	if before < k.Prompt { // cannot happen: the tail has ids of the output only
		return continuation.Meeting{}, continuation.Seam
	}
	ctx, cancel := context.WithTimeout(x.env.Context, seamTime)
	defer cancel()
	from := max(0, before-contextTokens)
	engines := x.decoders()
	m, reason, err := tail.Find(func(n int) (text string, err error) {
		end := before
		for _, e := range tail.Events[:n] {
			end += len(e.IDs)
		}
		err = errNoDecoder
		for len(engines) > 0 && ctx.Err() == nil {
			if text, err = x.detokenize(ctx, engines[0], k.IDs[from:end]); err == nil {
				break
			}
			engines = engines[1:]
		}
		return text, err
	})
	if err != nil {
		x.journal.Warn("no engine decoded the last tokens of a stream", "error", err)
	}
	if errors.Is(err, errNoDecoder) {
		reason = continuation.NoEngine
	}
	return m, reason
}

// errNoDecoder: no engine has answered the question for a text.
var errNoDecoder = errors.New("no engine of the model answers")

// decoders returns the ready engines that decode tokens of the request's model, those that have not
// failed in this request first.
func (x *exchange) decoders() (list []*engine.Instance) {
	var failed []*engine.Instance
	var le *attempt.Error
	var failing *engine.Instance
	if errors.As(x.placing.outcome.Err, &le) {
		failing = le.Target.Instance
	}
	for _, i := range x.run.Registry.Snapshot().Instances {
		switch {
		case i.State() != engine.Ready || dialectOf(i) != x.env.Kept.Dialect || len(i.Models()) == 0 ||
			x.req.Model != "" && !slices.Contains(i.Models(), x.req.Model):
		case i == failing || slices.ContainsFunc(x.placing.ask.Excluded, func(t engine.Target) bool { return t.Instance == i }):
			failed = append(failed, i)
		default:
			list = append(list, i)
		}
	}
	return append(list, failed...)
}

// detokenize returns the text of tokens, as an engine decodes them. vLLM's route is in
// entrypoints/serve/tokenize/api_router.py, SGLang's in entrypoints/http_server.py.
func (x *exchange) detokenize(ctx context.Context, i *engine.Instance, ids []uint32) (string, error) {
	if len(ids) == 0 {
		return "", nil
	}
	model := x.req.Model
	if model == "" {
		model = i.Models()[0]
	}
	body := openai.AppendQuoted([]byte(`{"model":`), model)
	body = append(continuation.AppendIDs(append(body, `,"tokens":`...), ids), '}')
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	status, answer, err := prompt.Asker{Registry: x.run.Registry, Memory: x.run.Memory}.Ask(ctx, i.Spec.Name, openai.Detokenize.Path(), body)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errNoDecoder, err)
	}
	var v struct{ Prompt, Text *string }
	switch err := json.Unmarshal(answer, &v); {
	case status != http.StatusOK:
		return "", errors.New("decode tokens: the engine answers with an error")
	case err != nil || v.Prompt == nil && v.Text == nil:
		return "", errors.New("decode tokens: the engine's answer has no text")
	case v.Prompt != nil:
		return *v.Prompt, nil
	}
	return *v.Text, nil
}
