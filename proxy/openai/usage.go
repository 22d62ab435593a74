package openai

import (
	"bytes"
	"strconv"
)

// Usage holds the token counts of an answer; -1 for a missing count.
type Usage struct {
	Prompt     int64 // tokens of the prompt
	Completion int64 // generated tokens
	Cached     int64 // prompt tokens that were found in a cache
}

// noUsage is the Usage of an answer without counts.
var noUsage = Usage{-1, -1, -1}

// ParseUsage reads the usage of a unary answer of any API. It does not check the rest
// of the body. ok is false if there is no usage. SGLang's native answers have it in
// meta_info; a batch is an array of such answers, whose counts are added up.
func ParseUsage(body []byte) (u Usage, ok bool) {
	u = noUsage
	if raw, found := Find(body, "usage"); found {
		u = usageOf(raw)
		return u, u != noUsage
	}
	if raw, found := Find(body, "meta_info"); found {
		u = usageOf(raw)
		return u, u != noUsage
	}
	c := Cursor{Text: body}
	for c.Open('['); c.Next(']'); {
		if raw, found := Find(c.Skip(), "meta_info"); found {
			u = u.plus(usageOf(raw))
		}
	}
	return u, u != noUsage
}

// usageOf reads a usage or meta_info object. OpenAI completions and chat (vLLM, SGLang,
// TensorRT-LLM) have prompt_tokens, completion_tokens and
// prompt_tokens_details.cached_tokens. Responses have input_tokens, output_tokens and
// input_tokens_details.cached_tokens. Messages have input_tokens, output_tokens and
// cache_read_input_tokens. SGLang's meta_info has cached_tokens beside the others.
func usageOf(raw []byte) Usage {
	u := noUsage
	c := Cursor{Text: raw}
	for c.Open('{'); c.Next('}'); {
		value := c.Skip()
		switch string(c.Key) {
		case "prompt_tokens", "input_tokens":
			u.Prompt = tokens(value)
		case "completion_tokens", "output_tokens":
			u.Completion = tokens(value)
		case "cached_tokens", "cache_read_input_tokens":
			u.Cached = tokens(value)
		case "prompt_tokens_details", "input_tokens_details":
			if cached, ok := Find(value, "cached_tokens"); ok {
				u.Cached = tokens(cached)
			}
		}
	}
	return u
}

// tokens returns a count; -1 if value is not one.
func tokens(value []byte) int64 {
	if n, ok := Int64(value); ok && n >= 0 {
		return n
	}
	return -1
}

// plus adds the counts. If one Usage lacks a count, the sum has the count of the other
// Usage.
func (u Usage) plus(v Usage) Usage {
	return Usage{add(u.Prompt, v.Prompt), add(u.Completion, v.Completion), add(u.Cached, v.Cached)}
}

func add(a, b int64) int64 {
	if a < 0 || b < 0 {
		return max(a, b)
	}
	return a + b
}

// cachedNames are searched for in an answer before it is parsed: most events have none.
var cachedNames = [...][]byte{[]byte(`"cached_tokens"`), []byte(`"cache_read_input_tokens"`)}

// RecountCached returns a whole answer, or the data of one event, whose usage counts that many
// cached tokens. A usage without such a count stays unchanged. If nothing changes, it returns
// answer itself. A usage of messages counts the cached tokens apart from the others, so their
// sum stays the same.
func RecountCached(answer []byte, cached int64) []byte {
	if !countsCached(answer) {
		return answer
	}
	var whole Object
	if whole.Parse(answer) != nil {
		return answer
	}
	for _, holder := range [...]string{"response", "message"} { // of the events of responses and of messages
		if inner, ok := whole.Get(holder); ok && len(inner) > 0 && inner[0] == '{' {
			return whole.Append(nil, Edit{Key: holder, Value: RecountCached(inner, cached)})
		}
	}
	raw, _ := whole.Get("usage")
	var usage Object
	if len(raw) == 0 || raw[0] != '{' || usage.Parse(raw) != nil {
		return answer
	}
	return whole.Append(nil, Edit{Key: "usage", Value: recountUsage(&usage, cached)})
}

func countsCached(answer []byte) bool {
	for _, name := range cachedNames {
		if _, ok := after(answer, name); ok {
			return true
		}
	}
	return false
}

func recountUsage(usage *Object, cached int64) []byte {
	var edits []Edit
	for _, name := range [...]string{"prompt_tokens_details", "input_tokens_details"} {
		raw, _ := usage.Get(name)
		var details Object
		if len(raw) == 0 || raw[0] != '{' || details.Parse(raw) != nil {
			continue
		}
		if old, _ := details.Get("cached_tokens"); tokens(old) >= 0 {
			edits = append(edits, Edit{Key: name, Value: details.Append(nil, Edit{Key: "cached_tokens", Value: strconv.AppendInt(nil, cached, 10)})})
		}
	}
	if read, _ := usage.Get("cache_read_input_tokens"); tokens(read) >= 0 {
		edits = append(edits, Edit{Key: "cache_read_input_tokens", Value: strconv.AppendInt(nil, cached, 10)})
		if rest, _ := usage.Get("input_tokens"); tokens(rest) >= 0 {
			edits = append(edits, Edit{Key: "input_tokens", Value: strconv.AppendInt(nil, max(0, tokens(rest)+tokens(read)-cached), 10)})
		}
	}
	return usage.Append(nil, edits...)
}

// AppendRecounted appends whole events with RecountCached applied to the data of each.
func AppendRecounted(dst, events []byte, cached int64) []byte {
	for len(events) > 0 {
		field, value, rest := nextField(events)
		line := events[:len(events)-len(rest)]
		events = rest
		if string(field) == "data" && countsCached(value) {
			from := bytes.Index(line, value)
			dst = append(append(dst, line[:from]...), RecountCached(value, cached)...)
			line = line[from+len(value):]
		}
		dst = append(dst, line...)
	}
	return dst
}

// Recounted returns the usage of an answer whose engine counted u, with that many cached tokens.
// The prompt of messages is counted without its cached tokens.
func (u Usage) Recounted(api API, cached int64) Usage {
	if api == Messages && u.Cached >= 0 && u.Prompt >= 0 {
		u.Prompt = max(0, u.Prompt+u.Cached-cached)
	}
	u.Cached = cached
	return u
}
