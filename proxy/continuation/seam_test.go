package continuation

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// model is a stream whose tokens are pieces of a text, as a byte-level tokenizer's. Token i has the
// bytes pieces[i].
type model struct {
	pieces []string
	events []Event
	decode func(from, to int) string // of tokens
}

// stream relays the pieces as an engine does: token by token or a few at once, with stop letters
// held back, and without text for a token that ends inside a letter (vLLM) or with the part of the
// token before its last blank (SGLang).
func stream(r *rand.Rand, pieces []string, stop int, sglang bool) model {
	m := model{pieces: pieces, decode: func(from, to int) string { return strings.ToValidUTF8(strings.Join(pieces[from:to], ""), "\ufffd") }}
	text, sent, whole := "", 0, 0
	for i := 0; i < len(pieces); {
		n := min(len(pieces)-i, 1+r.IntN(8)/7)
		var e Event
		for range n {
			e.IDs = append(e.IDs, uint32(i))
			if text += pieces[i]; utf8.ValidString(text) {
				whole = len(text)
			}
			i++
		}
		ready := whole
		if sglang {
			ready += 1 + strings.LastIndexByte(text[whole:], ' ')
		} else {
			ready = back(text[:whole], stop)
		}
		if ready > sent {
			e.Text, sent = text[sent:ready], ready
		}
		m.events = append(m.events, e)
	}
	return m
}

// pieces cuts a text at random bytes, more often before blanks.
func pieces(r *rand.Rand, text string) (list []string) {
	for len(text) > 0 {
		n := min(len(text), 1+r.IntN(4))
		list, text = append(list, text[:n]), text[n:]
	}
	return list
}

// TestFind: wherever a stream breaks, and however few of its events are known, the relayed text
// and the text of the tokens from the seam on, less the repeated text, are the whole text. The
// stop string that lies across the break is behind the seam.
func TestFind(t *testing.T) {
	const text = "hello wörld, 語 and 🙂🙂 go on  a while, ha ha ha ha é é é, to the énd🙂 of it all."
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 1))
		sglang, stop, delay := r.IntN(3) == 0, 0, 0
		if !sglang && r.IntN(2) == 0 {
			stop = 1 + r.IntN(6)
			delay = stop * r.IntN(2) // 0 with include_stop_str_in_output
		}
		m := stream(r, pieces(r, text), delay, sglang)
		found := 0
		for broken := 1; broken < len(m.events); broken++ {
			known := min(broken, 4+r.IntN(20))
			tail := Tail{Events: m.events[broken-known : broken], First: known == broken, Stop: stop, Held: delay > 0, Greedy: r.IntN(2) == 0}
			token := 0 // the first one of the tail
			for _, e := range m.events[:broken-known] {
				token += len(e.IDs)
			}
			end := token
			relayed := ""
			for i, e := range m.events[:broken] {
				relayed += e.Text
				if i >= broken-known {
					end += len(e.IDs)
				}
			}
			context := max(0, token-5)
			for context > 0 && !utf8.ValidString(strings.Join(m.pieces[:context], "")) {
				context-- // an engine's prompt ends with a letter
			}
			meet, reason, err := tail.Find(func(n int) (string, error) {
				to := token
				for _, e := range tail.Events[:n] {
					to += len(e.IDs)
				}
				if context == 0 {
					return "the prompt " + m.decode(0, to), nil
				}
				return m.decode(context, to), nil
			})
			if err != nil || reason != "" {
				if reason != Seam {
					t.Fatalf("seed %d, event %d: %q, %v", seed, broken, reason, err)
				}
				continue
			}
			found++
			kept := end - meet.Drop
			before := strings.Join(m.pieces[:kept], "")
			if !utf8.ValidString(before) {
				t.Fatalf("seed %d, event %d: the seam is inside a letter: %q", seed, broken, before)
			}
			if before+meet.Repeated != relayed {
				t.Fatalf("seed %d, event %d: %q and %q, relayed %q", seed, broken, before, meet.Repeated, relayed)
			}
			if all := strings.Join(m.pieces[:end], ""); stop > 0 && before != "" && utf8.RuneCountInString(all[len(before):]) < stop {
				t.Fatalf("seed %d, event %d: a stop string may begin in %q and end behind %q", seed, broken, before, all)
			}
		}
		if found < len(m.events)/2 {
			t.Errorf("seed %d: only %d of %d seams are found", seed, found, len(m.events))
		}
	}
}

func TestFindStates(t *testing.T) {
	event := func(text string, state Reason) Event { return Event{IDs: []uint32{1}, Text: text, State: state} }
	for name, c := range map[string]struct {
		tail Tail
		want string
	}{
		"content":                 {Tail{Events: []Event{event("a", ""), event("b", "")}}, `{0 }`},
		"greedy":                  {Tail{Events: []Event{event("a", ""), event("b", "")}, Greedy: true}, `{1 b}`},
		"greedy, all is repeated": {Tail{Events: []Event{event("a", "")}, Greedy: true}, `{1 a}`},
		"reasoning":               {Tail{Events: []Event{event("a", ""), event("", Reasoning)}}, `reasoning`},
		"end of reasoning":        {Tail{Events: []Event{event("", Reasoning), event("", "")}}, `reasoning`},
		"behind reasoning":        {Tail{Events: []Event{event("", Reasoning), event("", ""), event("b", "")}, Greedy: true}, `{0 }`},
		"behind reasoning, later": {Tail{Events: []Event{event("", Reasoning), event("b", ""), event("c", "")}, Greedy: true}, `{1 c}`},
		"a call":                  {Tail{Events: []Event{event("a", ""), event("", ToolCalls)}}, `tool_calls`},
		"a call before":           {Tail{Events: []Event{event("a", "")}, Called: true}, `tool_calls`},
		"nothing relayed":         {Tail{Events: []Event{event("", ""), event("", "")}, First: true, Held: true, Stop: 9}, `{2 }`},
		"a stop string at first":  {Tail{Events: []Event{event("a", "")}, First: true, Stop: 9}, `{1 a}`},
		"a stop string later":     {Tail{Events: []Event{event("a", "")}, Stop: 9}, `seam`},
		"held back by a parser":   {Tail{Events: []Event{event("a", ""), event("", "")}}, `{1 }`},
		"another text":            {Tail{Events: []Event{event("x", ""), event("y", "")}}, `seam`},
		"no text":                 {Tail{Events: []Event{event("", ""), event("", "")}}, `seam`},
	} {
		t.Run(name, func(t *testing.T) {
			// The engine decodes each id that is not of reasoning to the letters in order.
			meet, reason, err := c.tail.Find(func(n int) (string, error) {
				text := "before "
				for _, e := range c.tail.Events[:n] {
					switch {
					case e.Text == "x" || e.Text == "y":
						text += "other"
					case e.Text != "":
						text += e.Text
					case e.State != "":
						text += "thought"
					default:
						text += "<"
					}
				}
				return text, nil
			})
			got := fmt.Sprint(meet)
			if reason != "" {
				got = string(reason)
			}
			if got != c.want || err != nil {
				t.Errorf("%s, %v, want %s", got, err, c.want)
			}
		})
	}
	broken := errors.New("no engine answers")
	tail := Tail{Events: []Event{event("a", "")}}
	if _, reason, err := tail.Find(func(int) (string, error) { return "", broken }); reason != Seam || !errors.Is(err, broken) {
		t.Errorf("%q, %v", reason, err)
	}
}

func TestNewTail(t *testing.T) {
	for _, c := range []struct {
		d    tokens.Dialect
		body string
		want string
	}{
		{tokens.VLLM, completion, "stop 0, held true, greedy false"},
		{tokens.VLLM, completion + `,"temperature":0`, "stop 0, held true, greedy true"},
		{tokens.VLLM, completion + `,"temperature":0.0,"stop":"\n\nab"`, "stop 3, held true, greedy true"},
		{tokens.VLLM, completion + `,"temperature":1,"stop":["a","","語語語"],"include_stop_str_in_output":true`, "stop 2, held false, greedy false"},
		{tokens.VLLM, completion + `,"stop":null`, "stop 0, held true, greedy false"},
		{tokens.SGLang, completion + `,"stop":["abc"],"temperature":0`, "stop 0, held false, greedy true"},
	} {
		tail := NewTail(c.d, read(t, openai.Completions, c.body+"}"))
		if got := fmt.Sprintf("stop %d, held %t, greedy %t", tail.Stop, tail.Held, tail.Greedy); got != c.want {
			t.Errorf("%s: %s, want %s", c.body, got, c.want)
		}
	}
}
