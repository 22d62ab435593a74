package connector

import (
	"bytes"
	"strconv"
	"unsafe"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// editRoom is the number of edits that a leg has room for: up to twelve of the
// connector's own, the priority, two for token ids, and those that cut PD
// fields.
const editRoom = 15 + openai.PDCuts

// literal returns the bytes of a constant, for the value of an edit. They must not be
// written to.
func literal(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }

// cut returns the edit that removes a member.
func cut(key string) openai.Edit { return openai.Edit{Key: key, Remove: true} }

// spliced returns the leg with a's body after the edits, with the priority of the leg, and
// without the client's PD fields ([openai.CutPD]) unless the client is trusted. edits must
// have the capacity of editRoom. Without a change it is the client's body itself.
func spliced(a *Attempt, dst []byte, edits []openai.Edit) Leg {
	leg := Leg{Path: a.Request.Path()}
	if a.Request.Form { // a form has no members that a connector edits
		if leg.Body, leg.Alias = a.Request.Raw(), true; !a.Request.WithoutPD && !a.Trust {
			leg.Body, leg.Alias = a.Request.AppendForm(dst), false
		}
		return leg
	}
	if a.Priority != nil { // without append, which would move the values of all edits to the heap
		edits = edits[:len(edits)+1]
		edits[len(edits)-1] = openai.Edit{Key: "priority", Value: a.Priority}
	}
	if a.ReturnIDs {
		edits = edits[:len(edits)+1]
		edits[len(edits)-1] = openai.Edit{Key: "return_token_ids", Value: literalTrue}
	}
	switch {
	case a.PromptIDs == nil:
	case a.Request.API == openai.Completions:
		edits = edits[:len(edits)+1]
		edits[len(edits)-1] = openai.Edit{Key: "prompt", Value: a.PromptIDs}
	default:
		edits = withPromptIDs(edits, a.PromptIDs)
	}
	if !a.Trust && !a.Request.WithoutPD {
		edits = openai.CutPD(edits, a.Request)
	}
	if len(edits) == 0 {
		leg.Body, leg.Alias = a.Request.Raw(), true
		return leg
	}
	leg.Body = a.Request.Append(dst, edits...)
	return leg
}

// promptIDsRoom is what the name of prompt_token_ids adds to the transfer's parameters, in bytes.
const promptIDsRoom = 32

// withPromptIDs adds ids to the transfer's parameters, if the leg has some. vLLM removes them before
// its connector reads the parameters (renderers/online_renderer.py, _reused_prompt_token_ids).
func withPromptIDs(edits []openai.Edit, ids []byte) []openai.Edit {
	at, params := len(edits), []byte("{}")
	for i := range edits {
		if edits[i].Key == "kv_transfer_params" {
			at, params = i, bytes.Clone(edits[i].Value) // a copy, which moves no edit to the heap
		}
	}
	edits = edits[:max(len(edits), at+1)]
	edits[at].Key, edits[at].Remove = "kv_transfer_params", false
	edits[at].Value = openai.AppendEdited(make([]byte, 0, len(params)+len(ids)+promptIDsRoom), params, openai.Edit{Key: "prompt_token_ids", Value: ids})
	return edits
}

// plain returns the leg that one engine answers alone: the client's body without its PD
// fields.
func plain(a *Attempt, dst []byte) Leg {
	var room [editRoom]openai.Edit
	return spliced(a, dst, room[:0])
}

// isObject reports whether raw is a JSON object, judging by its first byte.
func isObject(raw []byte) bool {
	c := openai.Cursor{Text: raw}
	return c.Peek() == '{'
}

// lone returns the only element of a prompt list of length one. Engines treat ["x"]
// like "x", but not all of them do so if the batch has to carry transfer fields.
func lone(r *openai.Request) (prompt []byte, ok bool) {
	if r.PromptCount != 1 || r.Prompt != openai.PromptTexts && r.Prompt != openai.PromptTokenLists {
		return nil, false
	}
	prompt, ok, err := openai.Lookup(r.PromptRaw(), "0")
	return prompt, ok && err == nil
}

// oneSequence rejects requests of more than one sequence: prefill's answer has the
// parameters of one transfer, so decode would not read the blocks of the other sequences.
// The error is nil or an *openai.Error.
func oneSequence(r *openai.Request) error {
	switch {
	case !r.API.Generates():
		return notPairable("", "This route is served by one engine.")
	case r.N > 1 && (r.API == openai.Generate || r.API == openai.VLLMGenerate):
		return severalSequences("sampling_params.n")
	case r.N > 1:
		return severalSequences("n")
	case r.BeamSearch:
		return severalSequences("use_beam_search")
	case r.BestOf > 1:
		return severalSequences("best_of")
	case r.PromptCount > 1:
		return severalSequences(promptField(r))
	}
	return nil
}

// promptField returns the name of the member with the list of prompts.
func promptField(r *openai.Request) string {
	switch {
	case r.API == openai.Generate && r.Prompt == openai.PromptTexts:
		return "text"
	case r.API == openai.Generate:
		return "input_ids"
	}
	return "prompt"
}

func severalSequences(field string) *openai.Error {
	return notPairable(field, "'"+field+"' asks for more than one sequence, which cannot be split into prefill and decode, and no engine here serves it whole.")
}

// notPairable returns the client's error for a form that can only be aggregated.
func notPairable(field, message string) *openai.Error {
	return openai.NewFieldError(openai.CodeNotPairable, field, message)
}

// rankField is the line with the data-parallel rank, which vLLM and (on its OpenAI
// routes) SGLang read, for an instance with several ranks.
func rankField(rank int) Field {
	return Field{Name: "X-data-parallel-rank", Value: strconv.Itoa(rank)}
}
