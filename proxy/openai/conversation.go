package openai

import (
	"bytes"
	"net/http"
	"strings"
	"unsafe"
)

// IDSources lists the places of a request that may contain the client's name of the
// conversation. It is immutable and safe for concurrent use.
type IDSources struct {
	fields, late [][]string
	headers      []string
	parents      []string
}

// NewIDSources returns the sources in the order in which they are read: members of the
// body, headers, and members that are read after the headers. A nested member is named
// by its path with dots: client_metadata.session_id. parents are the headers that may
// contain the id of the parent conversation. Header names are converted to
// canonical form here, so that look-ups need not do so.
func NewIDSources(fields, headers, late, parents []string) *IDSources {
	return &IDSources{fields: paths(fields), late: paths(late), headers: canonical(headers), parents: canonical(parents)}
}

func canonical(names []string) []string {
	list := make([]string, len(names))
	for i, name := range names {
		list[i] = http.CanonicalHeaderKey(name)
	}
	return list
}

func paths(fields []string) [][]string {
	split := make([][]string, len(fields))
	for i, f := range fields {
		split[i] = strings.Split(f, ".")
	}
	return split
}

// ConversationID returns the first id that is not blank, without surrounding white
// space, or "". A member that is not a string counts as blank: its meaning is the
// engine's matter. header returns the value of a request header, or "". The id may
// point into the body, so clone an id that is kept.
func (s *IDSources) ConversationID(r *Request, header func(name string) string) string {
	if id := firstText(r, s.fields); id != "" {
		return id
	}
	for _, name := range s.headers {
		if id := strings.TrimSpace(header(name)); id != "" {
			return id
		}
	}
	return firstText(r, s.late)
}

// maxParentID is the length of the longest id of a parent, in bytes.
const maxParentID = 1024

// ParentID returns the id of the parent of the conversation id, without surrounding white
// space, or "". It skips ids that are blank, that equal id, or that are longer than 1024
// bytes. header returns the value of a request header, or "".
func (s *IDSources) ParentID(id string, header func(name string) string) string {
	for _, name := range s.parents {
		parent := strings.TrimSpace(header(name))
		if parent != "" && parent != id && len(parent) <= maxParentID {
			return parent
		}
	}
	return ""
}

func firstText(r *Request, fields [][]string) string {
	for _, path := range fields {
		if id := strings.TrimSpace(r.textAt(path...)); id != "" {
			return id
		}
	}
	return ""
}

// textAt returns the text of a string in the body, or "". It points into the body
// unless it has escapes.
func (r *Request) textAt(path ...string) string {
	v, ok := r.Get(path[0])
	if !ok {
		return ""
	}
	if v, ok = Find(v, path[1:]...); !ok || v[0] != '"' {
		return ""
	}
	inner := v[1 : len(v)-1]
	if bytes.IndexByte(inner, '\\') >= 0 {
		return unescapedText(inner)
	}
	return unsafe.String(unsafe.SliceData(inner), len(inner))
}

// HoldsAnswer reports whether the request contains an earlier answer, as every turn of a
// conversation except the first does: a message of the assistant or of a tool, or the id
// of a stored answer. known is false for prompts that are not messages. It reads the
// messages up to the first such message, and only the role of the last message.
func (r *Request) HoldsAnswer() (holds, known bool) {
	if r.API == Responses {
		if v, _ := r.Get("previous_response_id"); !IsNull(v) {
			return true, true
		}
	}
	if r.Prompt != PromptMessages {
		return false, false
	}
	c := Cursor{Text: r.PromptRaw()}
	c.Open('[')
	for n := 1; c.Next(']'); n++ {
		if isAnswer(c) {
			return true, true
		}
		if n == r.MessageCount {
			break
		}
		c.Skip()
	}
	return false, true
}

// isAnswer reports whether the message or input item before the cursor comes from an
// answer. Items of the responses API without a role are calls, their results, and
// reasoning.
func isAnswer(c Cursor) (answer bool) {
	for c.Open('{'); c.Next('}'); {
		key := unescapedName(c.Key)
		if c.Peek() != '"' {
			c.Skip()
			continue
		}
		text := c.Quoted()
		switch key {
		case "role":
			role := unescapedName(text)
			return role == "assistant" || role == "tool" || role == "function"
		case "type":
			answer = unescapedName(text) != "message"
		}
	}
	return answer
}

// Opening returns raw bytes of the prompt that each turn of a conversation repeats: the
// content of the first message that has the role user, otherwise the whole prompt. The
// input of the responses API may be that content itself. Opening is nil for a request
// without a prompt.
func (r *Request) Opening() []byte {
	raw := r.PromptRaw()
	if r.Prompt != PromptMessages {
		return raw
	}
	c := Cursor{Text: raw}
	for c.Open('['); c.Next(']'); {
		var role, content []byte
		for c.Open('{'); c.Next('}'); {
			switch unescapedName(c.Key) {
			case "role":
				role = c.Skip()
			case "content":
				content = c.Skip()
			default:
				c.Skip()
			}
		}
		if len(role) > 1 && unescapedName(role[1:len(role)-1]) == "user" && content != nil {
			return content
		}
	}
	return raw
}
