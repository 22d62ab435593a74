package openai

import "strings"

// PromptKind is the form in which a request carries its prompt.
type PromptKind uint8

// The forms of a prompt.
const (
	PromptNone       PromptKind = iota // none, or one that the proxy does not know
	PromptText                         // one string
	PromptTokens                       // one list of token ids
	PromptTexts                        // a list of strings
	PromptTokenLists                   // a list of lists of token ids
	PromptMessages                     // messages of a conversation, or input items
)

// Span is a part of a body: the bytes from Start up to, but not including, End.
type Span struct{ Start, End int }

// forms is a set of PromptKinds, with one bit for each.
type forms uint8

const (
	text       forms = 1 << PromptText
	tokenIDs   forms = 1 << PromptTokens
	texts      forms = 1 << PromptTexts
	tokenLists forms = 1 << PromptTokenLists
	messages   forms = 1 << PromptMessages
)

// formNames is indexed by PromptKind.
var formNames = [...]string{
	PromptText:       "a string",
	PromptTokens:     "a list of token ids",
	PromptTexts:      "a list of strings",
	PromptTokenLists: "a list of lists of token ids",
	PromptMessages:   "a list of objects",
}

func (f forms) String() string {
	var names []string
	for kind, name := range formNames {
		if f&(1<<kind) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, " or ")
}

// promptForms returns the forms in which a field may be the prompt of an API; none if
// it is not the prompt there.
func promptForms(api API, field string) forms {
	switch field {
	case "prompt":
		switch api {
		case Completions:
			return text | texts | tokenIDs | tokenLists
		case Tokenize:
			return text
		}
	case "messages":
		switch api {
		case Chat, Messages, CountTokens, Tokenize, Embeddings: // the last two only in vLLM
			return messages
		}
	case "input":
		switch api {
		case Responses:
			return text | messages
		case Embeddings:
			return text | texts | tokenIDs | tokenLists
		}
	case "text":
		if api == Generate {
			return text | texts
		}
	case "input_ids":
		if api == Generate {
			return tokenIDs | tokenLists
		}
	case "token_ids":
		if api == VLLMGenerate {
			return tokenIDs
		}
	case "tokens":
		if api == Detokenize {
			return tokenIDs
		}
	}
	return 0
}

// PromptRaw returns the prompt's raw value with its quotes or brackets, or nil.
func (r *Request) PromptRaw() []byte {
	if r.Prompt == PromptNone {
		return nil
	}
	return r.raw[r.PromptSpan.Start:r.PromptSpan.End:r.PromptSpan.End]
}

// readPrompt reads a member as the prompt.
func (r *Request) readPrompt(field string, m *member, allowed forms) error {
	if m.kind == kindArray && m.shape.count == 0 {
		return NewFieldError(CodeEmptyArray, field, "'"+field+"' must not be empty.")
	}
	kind := promptKind(m)
	if allowed&(1<<kind) == 0 {
		return mistyped(field, allowed.String())
	}
	if field == "text" && r.Prompt != PromptNone {
		return nil // token ids take precedence over the text: they need no tokenizer
	}
	r.Prompt, r.PromptCount = kind, 1
	r.PromptSpan = Span{int(m.value.start), int(m.value.end)}
	r.PromptTokens = int64(m.value.end-m.value.start+3) / 4
	switch kind {
	case PromptTokens:
		r.PromptTokens = int64(m.shape.count)
	case PromptTexts:
		r.PromptCount = int(m.shape.count)
	case PromptTokenLists:
		r.PromptCount, r.PromptTokens = int(m.shape.count), int64(m.shape.inner)
	case PromptMessages:
		r.MessageCount = int(m.shape.count)
	}
	return nil
}

// promptKind returns a prompt's form from the shape that the scan found; PromptNone if
// no API accepts that shape.
func promptKind(m *member) PromptKind {
	switch {
	case m.kind == kindString:
		return PromptText
	case m.kind != kindArray:
		return PromptNone
	case m.shape.kinds == kindInt:
		return PromptTokens
	case m.shape.kinds == kindString:
		return PromptTexts
	case m.shape.kinds == kindObject:
		return PromptMessages
	case m.shape.kinds == kindArray && m.shape.innerKinds&^kindInt == 0:
		return PromptTokenLists
	}
	return PromptNone
}
