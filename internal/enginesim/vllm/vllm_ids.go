package vllm

import (
	"encoding/json"
	"maps"
	"slices"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// firstReuse is the first release that is known to take a prompt's ids in
// kv_transfer_params.prompt_token_ids. A release before it renders the messages.
const firstReuse = 30

// cutIDs removes prompt_token_ids from the transfer parameters of a chat, a response or a message,
// as renderers/online_renderer.py does (_reused_prompt_token_ids). The connector does not see
// them. Parameters without any other member count as none.
func (v *VLLM) cutIDs(route string, params core.Fields) (core.Fields, json.RawMessage) {
	const name = "prompt_token_ids"
	switch route {
	case core.RouteChat, core.RouteResponses, core.RouteMessages:
	default:
		return params, nil
	}
	if !params.Has(name) || v.minor() < firstReuse {
		return params, nil
	}
	ids := params[name]
	params = maps.Clone(params)
	if delete(params, name); len(params) == 0 {
		params = nil
	}
	return params, ids
}

// takeIDs takes the ids of the request as its prompt, or counts that the engine tokenizes a text.
// Ids that do not begin with those of the messages are counted too: an engine would answer another
// prompt.
func (v *VLLM) takeIDs(req *core.Request) *core.APIError {
	rendered := req.Prompts
	reused, refusal := reuseIDs(req)
	switch {
	case refusal != nil:
	case reused:
		own, ids := rendered[0], req.Prompts[0]
		if len(ids) < len(own) || !slices.Equal(ids[:len(own)], own) {
			v.e.Stats.StrayIDs.Add(1)
		}
	case textual(req):
		v.e.Stats.Tokenized.Add(1)
	}
	return refusal
}

// textual reports whether the prompt of a request is no list of token ids.
func textual(req *core.Request) bool {
	var ids []core.Token
	switch req.Route {
	case core.RouteTokens:
		return false
	case core.RouteCompletions:
		return json.Unmarshal(req.Fields["prompt"], &ids) != nil
	}
	return true
}

// reuseIDs replaces the rendered prompt by the ids of cutIDs. With echo, and for messages with
// content other than text, the ids are ignored.
func reuseIDs(req *core.Request) (reused bool, refusal *core.APIError) {
	ext, ok := req.Ext.(*vllmRequest)
	if echo, _ := req.Fields.Boolean("echo", false); !ok || ext.ids == nil || echo || !onlyText(req) {
		return false, nil
	}
	const name = "kv_transfer_params.prompt_token_ids"
	var ids []core.Token
	bad := json.Unmarshal(ext.ids, &ids) != nil || len(ids) == 0
	for _, id := range ids {
		bad = bad || id < 0
	}
	if bad {
		return false, core.BadRequest(name, "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers. (parameter=%s)", name)
	}
	for _, id := range ids {
		if !id.Valid() {
			return false, core.BadRequest(name, "Token id %d is out of vocabulary (parameter=%s)", id, name)
		}
	}
	req.Prompts = [][]core.Token{ids}
	return true, nil
}

// otherMedia are the types of parts that are no text once the engine has made chat messages of a
// message or a response (renderers/chat_utils/chat_message.py, has_non_text_content).
var otherMedia = []string{"image", "image_url", "input_image", "input_audio", "audio_url", "video_url", "input_video", "input_file", "prompt_embeds"}

// onlyText reports whether no message has content other than text.
func onlyText(req *core.Request) bool {
	raw := req.Fields["messages"]
	if req.Route == core.RouteResponses {
		raw = req.Fields["input"]
	}
	var list []struct{ Content json.RawMessage }
	json.Unmarshal(raw, &list)
	for _, m := range list {
		var parts []struct{ Type string }
		json.Unmarshal(m.Content, &parts)
		for _, p := range parts {
			if slices.Contains(otherMedia, p.Type) || req.Route == core.RouteChat && p.Type != "text" {
				return false
			}
		}
	}
	return true
}
