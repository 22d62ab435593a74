package openai

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

// or fills u's missing counts from v.
func (u Usage) or(v Usage) Usage {
	if u.Prompt < 0 {
		u.Prompt = v.Prompt
	}
	if u.Completion < 0 {
		u.Completion = v.Completion
	}
	if u.Cached < 0 {
		u.Cached = v.Cached
	}
	return u
}
