package connector

import (
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Both legs of a request have the same prompt. Decode need not tokenize it if its leg has the token
// ids of prefill: of a completion as the prompt, of the other APIs in kv_transfer_params beside the
// text. The serving layer of vLLM takes the ids out of kv_transfer_params before the connector reads
// them, so they are the same for all connectors.
//
// Sources, in vLLM: renderers/online_renderer.py (_reused_prompt_token_ids, preprocess_chat: the
// templates and the tokenizer are left out, the settings of the parsers are not),
// entrypoints/openai/chat_completion/serving.py (the whole answer has prompt_token_ids beside
// choices), completion/serving.py (in the choice), renderers/inputs/preprocess.py (ids as prompt).

// firstReuse is the first release 0.x that takes the ids of a chat and renders messages with
// other content than text all the same. 0.30 takes the ids, and would drop the media.
const firstReuse = 32

// TakesIDs implements Tokened. With echo, a chat is rendered all the same, and a completion begins
// with the text of its ids. With return_prompt_text, the answer has the text that was tokenized. A
// suffix belongs to the prompt.
func (nixl) TakesIDs(r *openai.Request, t engine.Target) bool {
	if major, minor := release(t.Facts().Version); major == 0 && minor < firstReuse {
		return false
	}
	switch r.API {
	case openai.Completions:
		text := r.Prompt == openai.PromptText || r.Prompt == openai.PromptTexts && r.PromptCount == 1
		return text && !isSet(r, "echo") && !isSet(r, "suffix")
	case openai.Chat:
		return !isSet(r, "echo") && !isSet(r, "return_prompt_text")
	}
	return r.API == openai.Messages || r.API == openai.Responses
}

// AnswersIDs implements Tokened. Answers of messages have no ids. Those of responses have them only
// beside the whole text of the prompt (enable_response_messages).
func (nixl) AnswersIDs(r *openai.Request) bool {
	return r.API == openai.Completions || r.API == openai.Chat
}
