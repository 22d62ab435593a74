package vllm

import (
	"encoding/json"
	"maps"

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

// reuseIDs replaces the rendered prompt by the ids of cutIDs. With echo, and for messages with
// content other than text, the ids are ignored.
func reuseIDs(req *core.Request) *core.APIError {
	ext, ok := req.Ext.(*vllmRequest)
	if echo, _ := req.Fields.Boolean("echo", false); !ok || ext.ids == nil || echo || !onlyText(req.Fields["messages"]) {
		return nil
	}
	const name = "kv_transfer_params.prompt_token_ids"
	var ids []core.Token
	bad := json.Unmarshal(ext.ids, &ids) != nil || len(ids) == 0
	for _, id := range ids {
		bad = bad || id < 0
	}
	if bad {
		return core.BadRequest(name, "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers. (parameter=%s)", name)
	}
	for _, id := range ids {
		if !id.Valid() {
			return core.BadRequest(name, "Token id %d is out of vocabulary (parameter=%s)", id, name)
		}
	}
	req.Prompts = [][]core.Token{ids}
	return nil
}

// onlyText reports whether no message has content other than text.
func onlyText(messages json.RawMessage) bool {
	var list []struct{ Content json.RawMessage }
	json.Unmarshal(messages, &list)
	for _, m := range list {
		var parts []struct{ Type string }
		json.Unmarshal(m.Content, &parts)
		for _, p := range parts {
			if p.Type != "text" {
				return false
			}
		}
	}
	return true
}
