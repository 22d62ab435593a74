package tokens

import "github.com/pdproxy/pdproxy/proxy/openai"

// Dialect is the kind of an engine's tokenize endpoints.
type Dialect uint8

// The dialects.
const (
	NoTokenizer Dialect = iota // has no tokenize endpoint
	VLLM
	SGLang
	TRTLLM
)

// way is one form of the tokenize request, in the order in which the forms are tried.
type way uint8

const (
	// vLLM with --enable-scale-out, vllm/entrypoints/scale_out/render: accepts the body of
	// the API itself and returns exactly the ids that it would compute.
	renderChat way = iota + 1
	renderMessages
	renderResponses
	// vLLM, vllm/entrypoints/serve/tokenize: accepts the prompt and whether special
	// tokens are added, or messages and some of the members that shape them.
	tokenizePrompt
	tokenizeMessages
	// renderPrompt is renderChat for completions that /tokenize cannot express.
	renderPrompt
	// SGLang, srt/entrypoints/openai/serving_tokenize.py. The form with messages
	// accepts every member of a chat request. Older versions, which accept only
	// prompts, reject it.
	sglangPrompt
	sglangMessages
	// TensorRT-LLM, serve/openai_protocol.py, TokenizeRequest: a prompt with special
	// tokens; every other member is rejected.
	trtllmPrompt

	ways
)

// forms is indexed by way.
var forms = [ways]struct {
	dialect Dialect
	path    string
}{
	renderChat:       {VLLM, "/v1/chat/completions/render"},
	renderMessages:   {VLLM, "/v1/messages/render"},
	renderResponses:  {VLLM, "/v1/responses/render"},
	tokenizePrompt:   {VLLM, "/tokenize"},
	tokenizeMessages: {VLLM, "/tokenize"},
	renderPrompt:     {VLLM, "/v1/completions/render"},
	sglangPrompt:     {SGLang, "/v1/tokenize"},
	sglangMessages:   {SGLang, "/v1/tokenize"},
	trtllmPrompt:     {TRTLLM, "/_internal/tokenize"},
}

func (w way) dialect() Dialect { return forms[w].dialect }
func (w way) path() string     { return forms[w].path }

// exact reports whether the engine computes exactly the ids that it answers to w. This is
// so for renderings. It is also so for a prompt alone, because no other member of the
// request affects its ids.
func (w way) exact() bool { return w.renders() || w == tokenizePrompt }

// renders reports whether the answer to w has the form of a rendering.
func (w way) renders() bool {
	return w == renderChat || w == renderMessages || w == renderResponses || w == renderPrompt
}

// unspeakable lists members of a vLLM chat request that influence the ids and that
// /tokenize does not accept.
var unspeakable = [...]string{"reasoning_effort", "documents", "truncate_prompt_tokens"}

// suits reports whether this form can carry all members of a request that shape the ids
// which engines of its dialect compute.
func (w way) suits(r *openai.Request) bool {
	_, plain := plainText(r)
	switch w {
	case renderChat, sglangMessages:
		return r.API == openai.Chat
	case renderMessages: // the route rejects a body without a model (anthropic/protocol.py)
		return r.API == openai.Messages && r.HasModel
	case renderResponses: // the route has no earlier responses
		return r.API == openai.Responses && !has(r, "previous_response_id")
	case tokenizePrompt:
		return plain && r.API == openai.Completions
	case tokenizeMessages:
		return r.API == openai.Chat && !has(r, unspeakable[:]...)
	case renderPrompt:
		return r.API == openai.Completions && r.PromptCount == 1 &&
			(r.Prompt == openai.PromptText || r.Prompt == openai.PromptTexts)
	case sglangPrompt:
		return plain
	case trtllmPrompt:
		around, _ := special(TRTLLM, r)
		return plain && around && r.API == openai.Completions
	}
	return false
}

// plainText returns the raw JSON string of a request's prompt. ok is false unless the
// prompt is one non-empty text whose ids depend on no other member than those for special
// tokens.
func plainText(r *openai.Request) (raw []byte, ok bool) {
	raw = r.PromptRaw()
	switch {
	case r.API != openai.Completions && r.API != openai.Generate:
		return nil, false
	case r.Prompt == openai.PromptTexts && r.PromptCount == 1:
		raw, ok = openai.Find(raw, "0")
	case r.Prompt == openai.PromptText:
		ok = true
	}
	if !ok || len(raw) < len(`"x"`) ||
		has(r, "truncate_prompt_tokens", "prompt_embeds", "image_data", "video_data", "audio_data") {
		return nil, false
	}
	return raw, true
}

// special reports whether an engine puts the model's first and last tokens around a
// plain text: the value of add_special_tokens, true by default. SGLang always adds
// them. ok is false if the engine rejects the body.
func special(d Dialect, r *openai.Request) (truth, ok bool) {
	v, _ := r.Get("add_special_tokens")
	if d == SGLang || openai.IsNull(v) {
		return true, true
	}
	return openai.Bool(v)
}

// has reports whether the body has one of the members with a value.
func has(r *openai.Request, keys ...string) bool {
	for _, key := range keys {
		if v, _ := r.Get(key); !openai.IsNull(v) {
			return true
		}
	}
	return false
}

// Members of a vLLM chat request that /tokenize accepts.
var tokenizeKeys = [...]string{
	"messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
	"chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs",
}

// appendBody appends the body of the tokenize request.
func (w way) appendBody(dst []byte, r *openai.Request) []byte {
	switch w {
	case renderChat, renderMessages, renderResponses, renderPrompt, sglangMessages:
		return appendQuestion(dst, r)
	case tokenizeMessages:
		return appendMembers(dst, r, tokenizeKeys[:]...)
	}
	raw, _ := plainText(r)
	if w == tokenizePrompt {
		dst = appendMembers(dst, r, "add_special_tokens")
	} else {
		dst = appendMembers(dst, r)
	}
	dst = dst[:len(dst)-1]
	if dst[len(dst)-1] != '{' {
		dst = append(dst, ',')
	}
	dst = append(dst, `"prompt":`...)
	dst = append(dst, raw...)
	return append(dst, '}')
}

// appendQuestion appends the client's body without the members that a tokenize request
// must not have, even from a trusted client: transfer fields, and members for the
// delivery of the answer.
func appendQuestion(dst []byte, r *openai.Request) []byte {
	room := [2 + openai.PDCuts]openai.Edit{
		{Key: "stream", Remove: true},
		{Key: "stream_options", Remove: true},
	}
	return r.Append(dst, openai.CutPD(room[:2], r)...)
}

// appendMembers appends an object of the model and of those keys that have a value in
// the body, unchanged.
func appendMembers(dst []byte, r *openai.Request, keys ...string) []byte {
	dst = append(dst, '{')
	if v, _ := r.Get("model"); !openai.IsNull(v) {
		dst = append(dst, `"model":`...)
		dst = append(dst, v...)
	}
	for _, key := range keys {
		v, _ := r.Get(key)
		if openai.IsNull(v) {
			continue
		}
		if dst[len(dst)-1] != '{' {
			dst = append(dst, ',')
		}
		dst = append(dst, '"')
		dst = append(dst, key...)
		dst = append(dst, '"', ':')
		dst = append(dst, v...)
	}
	return append(dst, '}')
}
