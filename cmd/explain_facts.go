package cmd

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// factWords are the words for the facts of a candidate, in the order of the output. abi/README.md
// describes the facts. %s stands for the number.
var factWords = []struct {
	name, words string
	factor      float64 // of the number; 0: 1
	zero        bool    // the fact is shown even if it is zero, because most policies compare it and zero decides too
}{
	{name: "tokens", words: "%s tokens in flight", zero: true},
	{name: "requests", words: "%s requests in flight", zero: true},
	{name: "queued", words: "%s tokens waiting for prefill", zero: true},
	{name: "blocks_gpu", words: "%s KV blocks in GPU memory", zero: true},
	{name: "blocks_cpu", words: "%s in host memory"},
	{name: "blocks_disk", words: "%s on disk"},
	{name: "block_tokens", words: "%s tokens per block"},
	{name: "usage", words: "%s %% of KV memory in use", factor: 100},
	{name: "token_us", words: "prefill takes %s µs per token"},
	{name: "recent_requests", words: "%s recent requests"},
	{name: "recent_tokens", words: "%s recent prompt tokens"},
	{name: "busy", words: "busy %s %% of the last minute", factor: 100},
	{name: "group", words: "pairs in group %s"},
}

// stateWords are the words for the facts that are names. %s stands for the name.
var stateWords = []struct{ name, words string }{
	{"pair", "pair %s"},
	{"home", "home of the conversation (%s)"},
	{"adapter", "LoRA adapter %s"},
}

// facts lists the facts of a candidate in words.
func facts(facts map[string]any) string {
	var list []string
	known := map[string]bool{"role": true, "trial": true}
	if role, _ := facts["role"].(string); role == "both" {
		list = append(list, "prefill and decode")
	} else if role != "" {
		list = append(list, role)
	}
	for _, f := range factWords {
		known[f.name] = true
		v, ok := facts[f.name].(float64)
		if !ok || v == 0 && !f.zero {
			continue
		}
		if f.factor != 0 {
			v *= f.factor
		}
		text := fmt.Sprintf(f.words, rounded(v))
		if v == 1 {
			text = singular.Replace(text)
		}
		list = append(list, text)
	}
	for _, f := range stateWords {
		known[f.name] = true
		if v, _ := facts[f.name].(string); v != "" && v != "none" && v != "unknown" {
			list = append(list, fmt.Sprintf(f.words, v))
		}
	}
	if facts["trial"] == true {
		list = append(list, "gets a trial request, because its circuit was open")
	}
	for _, name := range slices.Sorted(maps.Keys(facts)) { // of a proxy of a later version
		if !known[name] {
			list = append(list, fmt.Sprintf("%s %v", name, facts[name]))
		}
	}
	return strings.Join(list, ", ")
}

// notContinued are the words for the results of a stream that another engine does not continue.
var notContinued = map[string]string{
	"no_ids":     "the API or the engine sends no token ids",
	"cumulative": "each event repeats the events before it",
	"sequences":  "the request has more than one sequence",
	"guided":     "a grammar would begin anew",
	"sampling":   "a sampling parameter counts the output alone",
	"prompt":     "the prompt is more than its token ids, or the new engine had another prompt",
	"reasoning":  "the answer was inside its reasoning",
	"tool_calls": "the answer had called a tool",
	"seam":       "no place is known at which the texts of both engines meet",
	"off":        "the client or the configuration excludes it",
	"too_long":   "the stream has more tokens than retry.continue_tokens",
	"memory":     "limits.buffer_memory has no room",
	"refused":    "the engine or the proxy ended the stream on purpose",
	"attempts":   "the stream has broken off too often",
	"late":       "no engine went on in time",
	"budget":     "the retry budget is used up",
	"no_engine":  "no other engine can go on",
}

// brokeOff says what followed a place at which a stream broke off.
func brokeOff(c journal.ExplainedContinuation) string {
	switch {
	case c.GapMS != nil:
		return fmt.Sprintf("continued on %s after a gap of %s ms", strings.TrimPrefix(c.Prefill+" and "+c.Decode, " and "), rounded(*c.GapMS))
	case c.Result == "completed":
		return "the proxy sent the missing end"
	}
	return strings.TrimSuffix("not continued, "+c.Result+": "+notContinued[c.Result], ": ")
}

// meaning describes the code of an error; "" for a code of a proxy of a later version.
func meaning(code string) string {
	for _, c := range openai.Codes() {
		if c.String() == code {
			return c.Info().Meaning
		}
	}
	return ""
}

// singular makes the words for 1 of the words for other numbers.
var singular = strings.NewReplacer("tokens", "token", "requests", "request", "blocks", "block")

// digits is the number of significant digits of a number in the output.
const digits = 4

// rounded formats a number with four significant digits. Digits before the point stay.
func rounded(v float64) string {
	if v == 0 || math.Abs(v) >= 1e15 {
		return strconv.FormatFloat(v, 'g', digits, 64)
	}
	after := min(max(digits-1-int(math.Floor(math.Log10(math.Abs(v)))), 0), 9)
	text := strconv.FormatFloat(v, 'f', after, 64)
	if after > 0 {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	return text
}
