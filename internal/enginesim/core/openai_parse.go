package enginesim

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strings"
	"time"
)

// parseOpenAI reads the fields of /v1/completions and /v1/chat/completions that
// all engines share, with pydantic's types. A fieldError is an ill-typed or
// missing field. The protocol formats it, and checks ranges itself.
func parseOpenAI(route string, h http.Header, f fields) (*request, *fieldError) {
	req := &request{
		Route: route, Chat: route == routeChat, Created: time.Now().Unix(),
		Fields: f, Header: h, Rank: -1,
	}
	p := fieldReader{f: f}
	req.Model = p.str("model", "")
	req.Stream = p.boolean("stream")
	req.N = int(p.integer("n", 1))
	req.MaxTokens = int(p.integer("max_tokens", 0))
	if req.Chat {
		req.MaxTokens = int(p.integer("max_completion_tokens", int64(req.MaxTokens)))
	} else if !f.has("max_tokens") {
		req.MaxTokens = 16
	}
	req.Limited = !req.Chat || f.has("max_tokens") || f.has("max_completion_tokens")
	req.MinTokens = int(p.integer("min_tokens", 0))
	req.IgnoreEOS = p.boolean("ignore_eos")
	req.Seed = uint64(p.integer("seed", 0))
	req.Echo = p.boolean("echo")
	req.CacheSalt = p.str("cache_salt", "")
	req.Temperature, req.TopP = p.number("temperature", 1), p.number("top_p", 1)
	for _, name := range []string{"presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"} {
		p.number(name, 0)
	}
	p.integer("top_k", 0)
	options := fieldReader{f: p.object("stream_options")}
	req.IncludeUsage = options.boolean("include_usage")
	req.ContinuousUsage = options.boolean("continuous_usage_stats")
	if p.err == nil {
		p.err = options.err
	}
	if p.err == nil {
		req.Stop, p.err = parseStop(f)
	}
	if p.err == nil {
		req.StopTokenIDs, p.err = parseTokenIDs(f, "stop_token_ids")
	}
	if p.err == nil && req.Chat {
		var text string
		text, p.err = chatText(f)
		req.Prompts = [][]token{tokenize(text)}
	} else if p.err == nil {
		req.Prompts, p.err = parsePrompt(f)
	}
	if p.err != nil {
		return nil, p.err
	}
	return req, nil
}

// fieldReader reads fields and keeps the first error.
type fieldReader struct {
	f   fields
	err *fieldError
}

func (p *fieldReader) keep(err *fieldError) {
	if p.err == nil {
		p.err = err
	}
}

func (p *fieldReader) integer(name string, def int64) int64 {
	v, err := p.f.integer(name, def)
	p.keep(err)
	return v
}

func (p *fieldReader) boolean(name string) bool {
	v, err := p.f.boolean(name, false)
	p.keep(err)
	return v
}

func (p *fieldReader) number(name string, def float64) float64 {
	v, err := p.f.number(name, def)
	p.keep(err)
	return v
}

func (p *fieldReader) str(name, def string) string {
	v, err := p.f.str(name, def)
	p.keep(err)
	return v
}

func (p *fieldReader) object(name string) fields {
	v, err := p.f.object(name)
	p.keep(err)
	return v
}

// parseStop reads a string or a list of strings.
func parseStop(f fields) ([]string, *fieldError) {
	if !f.has("stop") {
		return nil, nil
	}
	var one string
	if json.Unmarshal(f["stop"], &one) == nil {
		return []string{one}, nil
	}
	var list []string
	if json.Unmarshal(f["stop"], &list) != nil {
		return nil, &fieldError{"stop", "string_type", "Input should be a valid string"}
	}
	return list, nil
}

// parseTokenIDs reads a list of token ids.
func parseTokenIDs(f fields, name string) ([]token, *fieldError) {
	if !f.has(name) {
		return nil, nil
	}
	var ids []token
	if json.Unmarshal(f[name], &ids) != nil {
		return nil, &fieldError{name, "int_type", "Input should be a valid integer"}
	}
	return ids, nil
}

// parsePrompt reads the prompt of a completion: a string, token ids, or a list
// of either.
func parsePrompt(f fields) ([][]token, *fieldError) {
	raw := f["prompt"]
	if !f.has("prompt") {
		return nil, &fieldError{"prompt", "missing", "Field required"}
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return [][]token{tokenize(text)}, nil
	}
	var texts []string
	var ids []token
	var lists [][]token
	switch {
	case json.Unmarshal(raw, &texts) == nil:
		for _, text := range texts {
			lists = append(lists, tokenize(text))
		}
	case json.Unmarshal(raw, &ids) == nil:
		lists = [][]token{ids}
	case json.Unmarshal(raw, &lists) == nil:
	default:
		return nil, &fieldError{"prompt", "string_type", "Input should be a valid string"}
	}
	return lists, nil
}

// chatMessage has the parts of one message that a chat template reads.
type chatMessage struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

// chatText renders messages as a prompt, after the tools. The rendering of a
// turn does not depend on later turns, so histories share prefixes. Unless
// add_generation_prompt is false, the assistant's turn is opened at the end.
// With continue_final_message the last turn stays open instead.
func chatText(f fields) (string, *fieldError) {
	if !f.has("messages") {
		return "", &fieldError{"messages", "missing", "Field required"}
	}
	var messages []chatMessage
	if json.Unmarshal(f["messages"], &messages) != nil {
		return "", &fieldError{"messages", "list_type", "Input should be a valid list"}
	}
	open, err := f.boolean("add_generation_prompt", true)
	if err != nil {
		return "", err
	}
	proceed, err := f.boolean("continue_final_message", false)
	if err != nil {
		return "", err
	}
	var b bytes.Buffer
	if f.has("tools") {
		b.WriteString("<|tools|>")
		json.Compact(&b, f["tools"])
		b.WriteString("\n")
	}
	for i, m := range messages {
		text, ok := contentText(m.Content)
		if m.Role == "" || !ok {
			return "", &fieldError{"messages", "missing", "Field required"}
		}
		b.WriteString("<|" + m.Role + "|>" + text)
		if !proceed || i < len(messages)-1 {
			b.WriteString("\n")
		}
	}
	if open && !proceed {
		b.WriteString("<|assistant|>")
	}
	return b.String(), nil
}

// contentText returns the text of a message's content: a string, null, or
// parts. Parts that are not text contribute their raw bytes.
func contentText(raw json.RawMessage) (string, bool) {
	if len(raw) == 0 || string(raw) == "null" {
		return "", true
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text, true
	}
	var parts []json.RawMessage
	if json.Unmarshal(raw, &parts) != nil {
		return "", false
	}
	var b strings.Builder
	for _, raw := range parts {
		var part struct {
			Type string  `json:"type"`
			Text *string `json:"text"`
		}
		if json.Unmarshal(raw, &part) != nil || part.Type == "" {
			return "", false
		}
		if part.Text != nil {
			b.WriteString(*part.Text)
		} else {
			b.Write(raw)
		}
	}
	return b.String(), true
}

// batchPrompt reports whether a prompt is a list of prompts.
func batchPrompt(raw json.RawMessage) bool {
	raw = bytes.TrimSpace(raw)
	if len(raw) < 2 || raw[0] != '[' {
		return false
	}
	first := bytes.TrimSpace(raw[1:])
	return first[0] == '"' || first[0] == '['
}

// optionalID reads an id without conversion to a float.
func (p *fieldReader) optionalID(name string) *int64 {
	if !p.f.has(name) {
		return nil
	}
	v := p.integer(name, 0)
	return &v
}
