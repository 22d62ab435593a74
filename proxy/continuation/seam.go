package continuation

import (
	"strings"
	"unicode/utf8"

	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// Tail has the last events of a broken stream.
type Tail struct {
	// Events are in order, as ReadEvent returned them. Events without a choice are left out.
	Events []Event
	// Called: an event before them had a call of a tool.
	Called bool
	// First: no event with ids was before them.
	First bool
	// Stop is the number of letters that the longest stop string has before its last one. A stop
	// string that begins in the new prompt is not found.
	Stop int
	// Held: the engine relays text with a delay of Stop letters, and ids without one.
	Held bool
	// Greedy: the new engine generates the same tokens. It must repeat the text of an event.
	Greedy bool
}

// NewTail returns a Tail with the facts of a request that Check accepts. The rest is the stream's.
func NewTail(d tokens.Dialect, r *openai.Request) Tail {
	temperature, _ := r.Get("temperature")
	t := Tail{Greedy: isNumber(temperature, "0")}
	if d != tokens.VLLM {
		// While its text may end with the begin of a stop string, SGLang sends no event
		// (managers/scheduler_components/output_streamer.py).
		return t
	}
	// v1/engine/detokenizer.py
	stop, _ := r.Get("stop")
	c := openai.Cursor{Text: stop}
	c.Walk("", 0, func(_ string, _ int, value []byte) bool {
		text, _ := openai.String(value)
		t.Stop = max(t.Stop, utf8.RuneCountInString(text)-1)
		return true
	})
	include, _ := r.Get("include_stop_str_in_output")
	t.Held = string(include) != "true"
	return t
}

// Meeting is the place at which the answers of both engines meet.
type Meeting struct {
	// Drop is the number of ids at the end of the output that the new engine generates again.
	Drop int
	// Repeated is the text with which the new answer must begin. The client has it already.
	Repeated string
}

// maxCheck is the number of relayed bytes that are compared with the decoded text.
const maxCheck = 64

// Find returns where the new answer begins. text returns the text of a few tokens before the tail,
// the same each time, and of the ids of the tail's first n events, as an engine of the model decodes
// them together (POST /detokenize). It is called once or a few times. Its error comes with Seam.
//
// Letters of a text are characters of Unicode, as in the engines.
func (t *Tail) Find(text func(n int) (string, error)) (Meeting, Reason, error) {
	first, reason := t.content()
	if reason != "" {
		return Meeting{}, reason, nil
	}
	if t.First && t.relayed(0, len(t.Events)) == "" {
		return Meeting{Drop: t.ids(0)}, "", nil // the answer begins anew
	}
	var decoded string // of the first m events, at which ids and relayed text agree
	m, sent := -1, 0   // the client has decoded[:sent] from these events
	for n := len(t.Events); n >= first; n-- {
		if n < len(t.Events) && len(t.Events[n].IDs) == 0 {
			continue // the same ids
		}
		d, err := text(n)
		if err != nil {
			return Meeting{}, Seam, err
		}
		if strings.HasSuffix(d, "\ufffd") { // inside a letter
			continue
		}
		if m < 0 {
			end := len(d)
			if t.Held {
				end = back(d, t.Stop)
			}
			if relayed := t.relayed(0, n); relayed == "" || !agree(d[:end], relayed) {
				continue
			}
			m, decoded, sent = n, d, end
			if n > first && (t.Stop > 0 || t.Greedy) {
				continue // the new answer begins before
			}
		}
		limit := back(decoded, t.Stop)
		if n == 0 && t.First { // no stop string begins before the output
			limit = len(decoded)
		}
		more := len(d) - min(limit, sent)
		if strings.HasPrefix(decoded, d) && more <= 0 {
			return Meeting{Drop: t.ids(n), Repeated: decoded[len(d):sent] + t.relayed(m, len(t.Events))}, "", nil
		}
		if more > 0 && n > first { // leave out half of the events in which these bytes lie, by the mean length of an event
			n = max(first+1, n-more*m/(2*len(decoded)))
		}
	}
	return Meeting{}, Seam, nil
}

// content returns the number of events that a seam cannot lie before, or the state of the answer in
// which it cannot lie at all. Behind reasoning, a seam lies behind the first text of the content, so
// that the end of the reasoning is in the prompt.
func (t *Tail) content() (first int, reason Reason) {
	if t.Called {
		return 0, ToolCalls
	}
	for i, e := range t.Events {
		switch {
		case e.State == ToolCalls:
			return 0, ToolCalls
		case e.State == Reasoning:
			reason = Reasoning
		case e.Text != "" && reason != "":
			first, reason = i+1, ""
		}
	}
	return first, reason
}

// relayed is the text of the events from one up to another.
func (t *Tail) relayed(from, to int) string {
	var b strings.Builder
	for _, e := range t.Events[from:to] {
		b.WriteString(e.Text)
	}
	return b.String()
}

// ids is the number of ids from an event on.
func (t *Tail) ids(from int) (n int) {
	for _, e := range t.Events[from:] {
		n += len(e.IDs)
	}
	return n
}

// Offset returns the text offset, in the log probabilities, at which the new answer begins; 0
// without offsets. SGLang's are all -1 (srt/entrypoints/openai/utils.py, to_openai_style_logprobs).
func (t *Tail) Offset(m Meeting) int64 {
	drop := m.Drop
	for i := len(t.Events) - 1; i >= 0; i-- {
		e := t.Events[i]
		if drop <= len(e.IDs) && len(e.Offsets) == len(e.IDs)+1 && e.Offsets[0] >= 0 {
			return e.Offsets[len(e.IDs)-drop]
		}
		drop -= len(e.IDs)
	}
	return 0
}

// agree reports whether the decoded text ends with the end of the relayed text. The relayed text
// may begin with text of earlier ids.
func agree(decoded, relayed string) bool {
	return strings.HasSuffix(decoded, relayed[max(0, len(relayed)-maxCheck):])
}

// back returns the length of text without its last letters.
func back(text string, letters int) int {
	end := len(text)
	for ; letters > 0 && end > 0; letters-- {
		_, n := utf8.DecodeLastRuneInString(text[:end])
		end -= n
	}
	return end
}
