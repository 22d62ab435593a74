package core

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strings"
	"time"
)

// ParseOpenAI reads the fields of /v1/completions and /v1/chat/completions that
// all engines share, with pydantic's types. A FieldError is an ill-typed or
// missing field. The protocol formats it, and checks ranges itself.
func ParseOpenAI(route string, h http.Header, f Fields) (*Request, *FieldError) {
	req := &Request{
		Route: route, Chat: route == RouteChat, Created: time.Now().Unix(),
		Fields: f, Header: h, Rank: -1,
	}
	p := FieldReader{F: f}
	req.Model = p.Str("model", "")
	req.Stream = p.Boolean("stream")
	req.N = int(p.Integer("n", 1))
	req.MaxTokens = int(p.Integer("max_tokens", 0))
	if req.Chat {
		req.MaxTokens = int(p.Integer("max_completion_tokens", int64(req.MaxTokens)))
	} else if !f.Has("max_tokens") {
		req.MaxTokens = 16
	}
	req.Limited = !req.Chat || f.Has("max_tokens") || f.Has("max_completion_tokens")
	req.MinTokens = int(p.Integer("min_tokens", 0))
	req.IgnoreEOS = p.Boolean("ignore_eos")
	req.Seed = uint64(p.Integer("seed", 0))
	req.Echo = p.Boolean("echo")
	req.CacheSalt = p.Str("cache_salt", "")
	req.Temperature, req.TopP = p.number("temperature", 1), p.number("top_p", 1)
	p.number("min_p", 0)
	p.number("repetition_penalty", 1)
	penalties := [2]float64{p.number("presence_penalty", 0), p.number("frequency_penalty", 0)}
	format, _ := f.Object("response_format")
	kind, _ := format.Str("type", "text")
	req.OwnOutput = req.Seed != 0 || penalties != [2]float64{} || kind != "text"
	p.Integer("top_k", 0)
	options := FieldReader{F: p.Object("stream_options")}
	req.IncludeUsage = options.Boolean("include_usage")
	req.ContinuousUsage = options.Boolean("continuous_usage_stats")
	if p.Err == nil {
		p.Err = options.Err
	}
	if p.Err == nil {
		req.Stop, p.Err = ParseStop(f)
	}
	if p.Err == nil {
		req.StopTokenIDs, p.Err = ParseTokenIDs(f, "stop_token_ids")
	}
	if p.Err == nil && req.Chat {
		var text string
		text, p.Err = ChatText(f)
		req.Prompts = [][]Token{Tokenize(text)}
	} else if p.Err == nil {
		req.Prompts, p.Err = ParsePrompt(f)
	}
	if p.Err != nil {
		return nil, p.Err
	}
	return req, nil
}

// FieldReader reads fields and keeps the first error.
type FieldReader struct {
	F   Fields
	Err *FieldError
}

func (p *FieldReader) Keep(err *FieldError) {
	if p.Err == nil {
		p.Err = err
	}
}

func (p *FieldReader) Integer(name string, def int64) int64 {
	v, err := p.F.Integer(name, def)
	p.Keep(err)
	return v
}

func (p *FieldReader) Boolean(name string) bool {
	v, err := p.F.Boolean(name, false)
	p.Keep(err)
	return v
}

func (p *FieldReader) number(name string, def float64) float64 {
	v, err := p.F.Number(name, def)
	p.Keep(err)
	return v
}

func (p *FieldReader) Str(name, def string) string {
	v, err := p.F.Str(name, def)
	p.Keep(err)
	return v
}

func (p *FieldReader) Object(name string) Fields {
	v, err := p.F.Object(name)
	p.Keep(err)
	return v
}

// ParseStop reads a string or a list of strings.
func ParseStop(f Fields) ([]string, *FieldError) {
	if !f.Has("stop") {
		return nil, nil
	}
	var one string
	if json.Unmarshal(f["stop"], &one) == nil {
		return []string{one}, nil
	}
	var list []string
	if json.Unmarshal(f["stop"], &list) != nil {
		return nil, &FieldError{"stop", "string_type", "Input should be a valid string"}
	}
	return list, nil
}

// ParseTokenIDs reads a list of token ids.
func ParseTokenIDs(f Fields, name string) ([]Token, *FieldError) {
	if !f.Has(name) {
		return nil, nil
	}
	var ids []Token
	if json.Unmarshal(f[name], &ids) != nil {
		return nil, &FieldError{name, "int_type", "Input should be a valid integer"}
	}
	return ids, nil
}

// ParsePrompt reads the prompt of a completion: a string, token ids, or a list
// of either.
func ParsePrompt(f Fields) ([][]Token, *FieldError) {
	raw := f["prompt"]
	if !f.Has("prompt") {
		return nil, &FieldError{"prompt", "missing", "Field required"}
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return [][]Token{Tokenize(text)}, nil
	}
	var texts []string
	var ids []Token
	var lists [][]Token
	switch {
	case json.Unmarshal(raw, &texts) == nil:
		for _, text := range texts {
			lists = append(lists, Tokenize(text))
		}
	case json.Unmarshal(raw, &ids) == nil:
		lists = [][]Token{ids}
	case json.Unmarshal(raw, &lists) == nil:
	default:
		return nil, &FieldError{"prompt", "string_type", "Input should be a valid string"}
	}
	return lists, nil
}

// chatMessage has the parts of one message that a chat template reads.
type chatMessage struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

// ChatText renders messages as a prompt, after the tools. The rendering of a
// turn does not depend on later turns, so histories share prefixes. Unless
// add_generation_prompt is false, the assistant's turn is opened at the end.
// With continue_final_message the last turn stays open instead.
func ChatText(f Fields) (string, *FieldError) {
	if !f.Has("messages") {
		return "", &FieldError{"messages", "missing", "Field required"}
	}
	var messages []chatMessage
	if json.Unmarshal(f["messages"], &messages) != nil {
		return "", &FieldError{"messages", "list_type", "Input should be a valid list"}
	}
	open, err := f.Boolean("add_generation_prompt", true)
	if err != nil {
		return "", err
	}
	proceed, err := f.Boolean("continue_final_message", false)
	if err != nil {
		return "", err
	}
	var b bytes.Buffer
	if f.Has("tools") {
		b.WriteString("<|tools|>")
		json.Compact(&b, f["tools"])
		b.WriteString("\n")
	}
	for i, m := range messages {
		text, ok := contentText(m.Content)
		if m.Role == "" || !ok {
			return "", &FieldError{"messages", "missing", "Field required"}
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

// BatchPrompt reports whether a prompt is a list of prompts.
func BatchPrompt(raw json.RawMessage) bool {
	raw = bytes.TrimSpace(raw)
	if len(raw) < 2 || raw[0] != '[' {
		return false
	}
	first := bytes.TrimSpace(raw[1:])
	return first[0] == '"' || first[0] == '['
}

// OptionalID reads an id without conversion to a float.
func (p *FieldReader) OptionalID(name string) *int64 {
	if !p.F.Has(name) {
		return nil
	}
	v := p.Integer(name, 0)
	return &v
}
