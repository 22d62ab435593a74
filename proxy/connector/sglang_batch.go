package connector

import (
	"strconv"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// A request with a list of prompts is one leg on each engine. Each sequence has its own
// transfer: rooms and ids are lists in the order of the prompts, and all sequences share
// one host and port. Source, in SGLang: srt/managers/io_struct.py
// GenerateReqInput.normalize_batch_and_arguments. Scalars would be wrong: the engine
// would count a single room up into the rooms of other requests, and add suffixes of
// different lengths to a single id, which /abort_request matches as prefixes.
//
// Several samples of one prompt (n) cannot be expressed in this way. The engine copies
// the first room into each sample, and into a warm-up request that it runs first, so the
// samples wait for each other's KV until a time-out (srt/managers/tokenizer_manager.py
// _handle_batch_request; sglang pull requests 9224, 24223, 26486, 30723, 40297, none of
// them merged).

// maxBatch is the maximum number of prompts in a pair of legs: if the legs fail, each
// prompt needs its own abort call.
const maxBatch = 128

// batch returns the number of sequences in the lists of r's legs. It returns 0 for a
// request of one sequence, whose fields are not lists. It does not read the client's
// body.
func batch(r *openai.Request) int {
	switch {
	case r.Prompt != openai.PromptTexts && r.Prompt != openai.PromptTokenLists:
		return 0
	case r.API == openai.Completions && r.PromptCount == 1: // meeting.splice takes the prompt out of its list
		return 0
	}
	return r.PromptCount
}

// carriesBatch reports whether r is a list of prompts that a pair of legs can carry,
// one sequence for each.
func carriesBatch(r *openai.Request) bool {
	n := batch(r)
	return n > 0 && n <= maxBatch && r.N == 1 && r.BestOf == 1 && !r.BeamSearch &&
		(r.API == openai.Completions || r.API == openai.Generate)
}

// uncounted returns the member of a request on /generate that may give the engine's
// batch another size than the legs' lists, or "". The engine would then count rooms up
// into those of other requests. The engine counts input_embeds if there is nothing
// else, and texts before token ids (GenerateReqInput's _determine_batch_size), while
// the proxy counts the ids.
func uncounted(r *openai.Request) string {
	if r.API != openai.Generate {
		return ""
	}
	if isSet(r, "input_embeds") {
		return "input_embeds"
	}
	text, _ := r.Get("text")
	ids := r.Prompt == openai.PromptTokens || r.Prompt == openai.PromptTokenLists
	if ids && !openai.IsNull(text) && (text[0] != '"' || r.Prompt != openai.PromptTokens) {
		return "text"
	}
	return ""
}

// ridOf returns the id of sequence i of n on either engine. All ids have the same length,
// so no id is a prefix of another id.
func ridOf(legID string, i, n int) string {
	if n <= 1 {
		return legID
	}
	const hex = "0123456789abcdef"
	return legID + "-" + string([]byte{hex[i>>4&15], hex[i&15]})
}

// ridList returns the JSON list of the ids of n sequences.
func ridList(legID string, n int) []byte {
	list := append(make([]byte, 0, n*(len(legID)+6)+2), '[')
	for i := range n {
		if i > 0 {
			list = append(list, ',')
		}
		list = openai.AppendQuoted(list, ridOf(legID, i, n))
	}
	return append(list, ']')
}

// roomList returns the JSON list of the rooms of n sequences.
func roomList(a *Attempt, n int) []byte {
	list := append(make([]byte, 0, n*20+2), '[')
	for i := range n {
		if i > 0 {
			list = append(list, ',')
		}
		list = strconv.AppendUint(list, bootstrapRoom(a, i), 10)
	}
	return append(list, ']')
}

// readBatch checks prefill's answer to n prompts: it has one answer for each, and the
// engine aborted none.
func readBatch(a *Attempt, n int, body []byte) (Handoff, error) {
	if reason, _ := openai.WholeFailure(a.Request.API, body); reason != "" {
		return Handoff{}, badReply(reason + " of the batch")
	}
	last := strconv.Itoa(n - 1)
	for _, path := range [...][]string{
		{"choices", last, "finish_reason"},
		{last, "meta_info", "finish_reason", "type"},
	} {
		switch reason, ok, err := openai.Lookup(body, path...); {
		case err != nil:
			return Handoff{}, badReply(err.Error())
		case ok && !openai.IsNull(reason):
			return sglangHandoff(a, body), nil
		}
	}
	return Handoff{}, badReply("no finish reason for the last of the batch")
}

// abortAll appends the calls that abort every sequence of a's leg of a phase. Messages without a rid
// have no calls.
func abortAll(calls []Cleanup, a *Attempt, phase abi.Phase) []Cleanup {
	if a.Request.API == openai.Messages && ridHeader(a, phase == abi.Prefill) == nil {
		return calls
	}
	n := max(1, batch(a.Request))
	for i := range n {
		calls = append(calls, abortRID(ridOf(ridFor(a), i, n), phase))
	}
	return calls
}
