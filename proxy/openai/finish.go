package openai

const (
	// maxReason is the longest finish reason that is kept, in bytes. The longest one of the
	// protocols is model_context_window_exceeded.
	maxReason = 64
	// maxReasons is how many choices have a finish reason that is kept: OpenAI's limit of n.
	maxReasons = 128
	// maxAnsweredModel is the longest name of an answer's model that is kept, in bytes.
	maxAnsweredModel = 256
)

// ModelOf returns the model that a whole answer names; "" for none, and for a name of more than
// 256 bytes. It does not check the rest of the answer.
func ModelOf(answer []byte) string {
	raw, _ := Find(answer, "model")
	return shortString(raw, maxAnsweredModel)
}

// StreamModel is ModelOf for the start of a stream. A responses stream and a messages stream
// name the model in the object that their first event announces.
func (a API) StreamModel(head []byte) string {
	holder := ""
	switch a {
	case Responses:
		holder = "response"
	case Messages:
		holder = "message"
	}
	for len(head) > 0 {
		field, value, rest := nextField(head)
		head = rest
		if string(field) != "data" {
			continue
		}
		if holder != "" {
			value, _ = Find(value, holder)
		}
		if model := ModelOf(value); model != "" {
			return model
		}
	}
	return ""
}

// FinishReasons returns the finish reasons in a whole answer, in the order of the choices. The
// words are those of the API: finish_reason, stop_reason of messages, and for responses the
// reason of incomplete_details, or else the status. A reason of more than 64 bytes and the
// reasons after the first 128 choices are left out.
func FinishReasons(api API, answer []byte) []string {
	var r reasons
	switch api {
	case Responses:
		r.noteResponse(answer)
	case Messages:
		raw, _ := Find(answer, "stop_reason")
		r.set(0, raw)
	default:
		r.note(answer)
	}
	return r.list()
}

// reasons are the finish reasons of an answer, by the index of the choice; "" for a choice
// without a reason so far.
type reasons []string

// set keeps a raw reason. SGLang's native form is an object with a type
// (managers/schedule_batch.py, BaseFinishReason).
func (r *reasons) set(choice int64, raw []byte) {
	if len(raw) > 0 && raw[0] == '{' {
		raw, _ = Find(raw, "type")
	}
	text := shortString(raw, maxReason)
	if text == "" || choice >= maxReasons {
		return
	}
	for int64(len(*r)) <= choice {
		*r = append(*r, "")
	}
	(*r)[choice] = text
}

// note keeps the reasons of an answer, or of an event without a type. SGLang's native answers
// are one object, or an array of them; its streams have the index of the object.
func (r *reasons) note(data []byte) {
	list, ok := Find(data, "choices")
	if !ok {
		list, _ = Find(data)
	}
	if len(list) == 0 || list[0] != '[' {
		r.noteChoice(list, 0)
		return
	}
	c := Cursor{Text: list}
	c.Open('[')
	for at := int64(0); at < maxReasons && c.Next(']'); at++ {
		r.noteChoice(c.Skip(), at)
	}
}

// noteChoice keeps the reason of a choice, which is number at unless it has an index.
func (r *reasons) noteChoice(choice []byte, at int64) {
	raw, ok := Find(choice, "finish_reason")
	if !ok {
		raw, _ = Find(choice, "meta_info", "finish_reason")
	}
	if index, _ := Find(choice, "index"); tokens(index) >= 0 {
		at = tokens(index)
	}
	r.set(at, raw)
}

// noteResponse keeps the reason of a response. vLLM reports an incomplete response in an event
// named response.completed (entrypoints/openai/responses/protocol.py).
func (r *reasons) noteResponse(response []byte) {
	raw, _ := Find(response, "incomplete_details", "reason")
	if IsNull(raw) {
		raw, _ = Find(response, "status")
	}
	r.set(0, raw)
}

// noteTyped keeps the reason in the data of an event with a type that endsText names.
func (r *reasons) noteTyped(data []byte) {
	if response, ok := Find(data, "response"); ok {
		r.noteResponse(response)
		return
	}
	raw, _ := Find(data, "delta", "stop_reason")
	r.set(0, raw)
}

// endsText reports whether an event of that type has the reason of the answer's end.
func endsText(kind []byte) bool {
	switch string(kind) {
	case "message_delta", "response.completed", "response.incomplete", "response.failed":
		return true
	}
	return false
}

// list returns the known reasons; nil for none.
func (r reasons) list() []string {
	var known []string
	for _, reason := range r {
		if reason != "" {
			known = append(known, reason)
		}
	}
	return known
}

// shortString returns the text of a raw string; "" for any other value and for a text of more
// than most bytes.
func shortString(raw []byte, most int) string {
	if len(raw) > 6*most+2 { // an escape has at most six bytes for each byte of text
		return ""
	}
	text, _ := String(raw)
	if len(text) > most {
		return ""
	}
	return text
}
