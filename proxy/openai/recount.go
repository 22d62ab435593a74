package openai

import (
	"bytes"
	"strconv"
)

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
	return indexKey(answer, cachedNames[0]) >= 0 || indexKey(answer, cachedNames[1]) >= 0
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
		line, rest := events, []byte(nil)
		if i := bytes.IndexByte(events, '\n'); i >= 0 {
			line, rest = events[:i+1], events[i+1:]
		}
		events = rest
		if field, value := splitLine(line); string(field) == "data" && countsCached(value) {
			data := bytes.TrimRight(value, "\r\n")
			dst = append(dst, line[:len(line)-len(value)]...)
			dst = append(dst, RecountCached(data, cached)...)
			line = value[len(data):]
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
