package continuation

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// anyRoom is a Room without a limit.
type anyRoom struct{}

func (anyRoom) Grow(ids []uint32, n int) []uint32 { return slices.Grow(ids, n) }

// roomFor is a Room for some ids.
type roomFor int

func (r roomFor) Grow(ids []uint32, n int) []uint32 {
	if len(ids)+n > int(r) {
		return nil
	}
	return slices.Grow(ids, n)
}

// Events of vLLM (entrypoints/openai/completion/serving.py, chat_completion/serving.py) and SGLang
// (srt/entrypoints/openai/serving_completions.py).
const (
	vllmText = `data: {"id":"cmpl-1","object":"text_completion","created":5,"model":"m","choices":[{"index":0,"text":" a","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":[1,22,333],"token_ids":[4,55]}]}` + "\n\n"
	vllmRole = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":5,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":[1,22,333],"prompt_text":null}` + "\n\n"
	vllmChat = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":5,"model":"m","choices":[{"index":0,"delta":{"content":" \"token_ids\":[9]"},"logprobs":null,"finish_reason":null,"token_ids":[4]}]}` + "\n\n"
	sglang   = `data: {"id":"r","object":"text_completion","created":5,"model":"m","choices":[{"index":0,"text":" a","logprobs":null,"finish_reason":null,"matched_stop":null,"token_ids":[4,55],"prompt_token_ids":[1,22,333]}],"usage":null}` + "\n\n"
)

func TestCut(t *testing.T) {
	for _, c := range []struct {
		name, events string
		ids, prompt  []uint32
		rest         string
		bad          bool
	}{
		{"vLLM completions", vllmText, []uint32{4, 55}, []uint32{1, 22, 333}, strings.ReplaceAll(vllmText, `,"prompt_token_ids":[1,22,333],"token_ids":[4,55]`, ""), false},
		{"vLLM role", vllmRole, nil, []uint32{1, 22, 333}, strings.ReplaceAll(vllmRole, `,"prompt_token_ids":[1,22,333]`, ""), false},
		{"vLLM chat", vllmChat, []uint32{4}, nil, strings.ReplaceAll(vllmChat, `,"token_ids":[4]`, ""), false},
		{"SGLang", sglang, []uint32{4, 55}, []uint32{1, 22, 333}, strings.ReplaceAll(sglang, `,"token_ids":[4,55],"prompt_token_ids":[1,22,333]`, ""), false},
		{"several", vllmChat + vllmChat + "data: [DONE]\n\n", []uint32{4, 4}, nil, strings.ReplaceAll(vllmChat+vllmChat, `,"token_ids":[4]`, "") + "data: [DONE]\n\n", false},
		{"null", `{"a":1,"token_ids":null}`, nil, nil, `{"a":1,"token_ids":null}`, false},
		{"empty", `{"a":1,"token_ids":[]}`, nil, nil, `{"a":1}`, false},
		{"largest", `{"a":1,"token_ids":[4294967295]}`, []uint32{1<<32 - 1}, nil, `{"a":1}`, false},
		{"too large", `{"a":1,"token_ids":[4294967296]}`, nil, nil, `{"a":1,"token_ids":[4294967296]}`, true},
		{"negative", `{"a":1,"token_ids":[-1]}`, nil, nil, `{"a":1,"token_ids":[-1]}`, true},
		{"nested", `{"a":1,"token_ids":[[1]]}`, nil, nil, `{"a":1,"token_ids":[[1]]}`, true},
		{"comma", `{"a":1,"token_ids":[1,]}`, nil, nil, `{"a":1,"token_ids":[1,]}`, true},
		{"open", `{"a":1,"token_ids":[1,2`, nil, nil, `{"a":1,"token_ids":[1,2`, true},
		{"open at the start", `{"a":1,"token_ids":[`, nil, nil, `{"a":1,"token_ids":[`, true},
		{"second is bad", `{"a":1,"token_ids":[1]}{"a":1,"token_ids":[x]}`, []uint32{1}, nil, `{"a":1}{"a":1,"token_ids":[x]}`, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			kept, ids, ok := Cut([]byte(c.events), nil, true, anyRoom{})
			if string(kept) != c.events || !slices.Equal(ids, c.ids) || ok == c.bad {
				t.Errorf("kept %s, %v, %t", kept, ids, ok)
			}
			rest, ids, ok := Cut([]byte(c.events), []uint32{99}, false, anyRoom{})
			if !slices.Equal(ids, append([]uint32{99}, c.ids...)) || ok == c.bad {
				t.Errorf("ids %v, %t", ids, ok)
			}
			list := bytes.Clone(FindPrompt(rest))
			var prompt []uint32
			if list != nil {
				if prompt, ok = ReadIDs(nil, list); !ok || MaxIDs(list) != len(prompt) || !SameIDs(list, prompt) {
					t.Errorf("%v, %t of %s", prompt, ok, list)
				}
				rest = CutPrompt(rest)
			}
			if string(rest) != c.rest || !slices.Equal(prompt, c.prompt) {
				t.Errorf("%v\n%s, want\n%s", prompt, rest, c.rest)
			}
			if c.bad {
				return
			}
			if rest := Strip([]byte(c.events)); len(FindPrompt(rest)) == 0 && string(rest) != c.rest || bytes.Contains(rest, outputMember) {
				t.Errorf("without ids %s, want %s", rest, c.rest)
			}
		})
	}
}

func TestCutPrompt(t *testing.T) {
	for text, want := range map[string][2]string{ // what remains, and the list
		`{"a":1,"prompt_token_ids":[1,22],"b":2}`: {`{"a":1,"b":2}`, "[1,22]"},
		`{"a":1,"prompt_token_ids":[1,22`:         {`{"a":1,"prompt_token_ids":[1,22`, ""},
		`{"a":1,"prompt_token_ids":[]}`:           {`{"a":1,"prompt_token_ids":[]}`, ""},
		`{"a":1,"prompt_token_ids":[[1],[2]]}`:    {`{"a":1,"prompt_token_ids":[[1],[2]]}`, ""},
		`{"a":1,"prompt_token_ids":null}`:         {`{"a":1,"prompt_token_ids":null}`, ""},
	} {
		events := []byte(text)
		list := FindPrompt(events)
		if string(list) != want[1] || string(events) != text {
			t.Errorf("%s: the list is %s", events, list)
		}
		if list != nil {
			events = CutPrompt(events)
		}
		if string(events) != want[0] {
			t.Errorf("%s: %s", text, events)
		}
	}
}

func TestReadIDs(t *testing.T) {
	for list, want := range map[string]bool{"[1,22]": true, "[]": true, "[1,]": false, "[x]": false, "[1, 2]": false, "[1],[2]": false, "[4294967296]": false, "[1,22": false} {
		ids, ok := ReadIDs([]uint32{9}, []byte(list))
		if ok != want || !ok && len(ids) != 1 {
			t.Errorf("%s: %v, %t", list, ids, ok)
		}
		if same := SameIDs([]byte(list), ids[1:]); same != (list == "[1,22]") {
			t.Errorf("%s has the ids %v: %t", list, ids[1:], same)
		}
	}
	for _, other := range [][]uint32{nil, {1}, {1, 22, 3}, {1, 23}, {11, 22}} {
		if SameIDs([]byte("[1,22]"), other) {
			t.Errorf("%v are taken for the ids", other)
		}
	}
}

// TestCutWithoutRoom: Cut appends a list only if there is room for all its ids.
func TestCutWithoutRoom(t *testing.T) {
	events := []byte(`{"a":1,"token_ids":[1,2]}{"a":1,"token_ids":[3,4,5]}{"a":1,"token_ids":[6]}`)
	rest, ids, ok := Cut(events, nil, false, roomFor(4))
	if want := `{"a":1}{"a":1,"token_ids":[3,4,5]}{"a":1,"token_ids":[6]}`; ok || !slices.Equal(ids, []uint32{1, 2}) || string(rest) != want {
		t.Errorf("%v, %t, %s", ids, ok, rest)
	}
	if rest = Strip(rest); string(rest) != `{"a":1}{"a":1}{"a":1}` {
		t.Errorf("without ids: %s", rest)
	}
}

func TestReadEvent(t *testing.T) {
	chunk := func(choice string) string { return `data: {"id":"x","choices":[{"index":0,` + choice + `}]}` + "\n\n" }
	for _, c := range []struct {
		event string
		want  string // of fmt, "" if there is no choice
	}{
		{vllmText, `{[4 55]  a  false []}`},
		{vllmRole, `{[]   false []}`},
		{vllmChat, `{[4]  "token_ids":[9]  false []}`},
		{sglang, `{[4 55]  a  false []}`},
		{chunk(`"text":"é\n\ud83d\ude42","finish_reason":"stop","token_ids":[]`), "{[] é\n🙂  true []}"},
		{chunk(`"delta":{"reasoning":"a"},"token_ids":[1]`), `{[1]  reasoning false []}`},
		{chunk(`"delta":{"role":null,"content":"a","reasoning_content":"","reasoning":null,"tool_calls":null}`), `{[] a  false []}`},
		{chunk(`"delta":{"tool_calls":[{"index":0}]}`), `{[]  tool_calls false []}`},
		{chunk(`"text":" é","logprobs":{"text_offset":[7,8],"tokens":["a"," é"]}`), `{[]  é  false [7 8 10]}`},
		{chunk(`"text":"","logprobs":{"text_offset":[],"tokens":[]}`), `{[]   false []}`},
		{chunk(`"text":"","logprobs":{"text_offset":7}`), `{[]   false []}`},
		{chunk(`"delta":{"tool_calls":[]}`), `{[]   false []}`},
		{chunk(`"text":"a","token_ids":[x]`), ""},
		{`data: {"choices":[],"usage":{}}` + "\n\n", ""},
		{"data: [DONE]\n\n", ""},
		{": keep-alive\n\n", ""},
		{`data: {"error":{"message":"x"}}` + "\n\n", ""},
		{`data: {"choices":[{"text":"a`, ""},
		{"", ""},
	} {
		e, ok := ReadEvent([]byte(c.event))
		if got := fmt.Sprint(e); ok != (c.want != "") || ok && got != c.want {
			t.Errorf("%s: %s %t, want %s", c.event, got, ok, c.want)
		}
	}
}

// FuzzCut: whatever an engine sends, kept events are unchanged, cut events are the kept ones
// without lists, and both have the same ids.
func FuzzCut(f *testing.F) {
	for _, event := range []string{vllmText, vllmRole, vllmChat, sglang, vllmText + sglang, `"token_ids":[1]"token_ids":[2]`, `,"token_ids":[,"token_ids":[1]]`} {
		f.Add(event)
	}
	f.Fuzz(func(t *testing.T, text string) {
		kept, ids, ok := Cut([]byte(text), nil, true, anyRoom{})
		if string(kept) != text {
			t.Fatalf("%q became %q", text, kept)
		}
		cut, same, good := Cut([]byte(text), nil, false, anyRoom{})
		if !slices.Equal(ids, same) || ok != good || len(cut) > len(text) {
			t.Fatalf("%q: %v %t, %v %t, %q", text, ids, ok, same, good, cut)
		}
		if good && len(ids) > 0 && len(cut) >= len(text) {
			t.Fatalf("%q: nothing is cut", text)
		}
		if !bytes.Contains([]byte(text), outputMember) && string(cut) != text {
			t.Fatalf("%q became %q", text, cut)
		}
		ReadEvent([]byte(text))
		s := Splicer{ID: []byte(`"x"`), Created: []byte("1"), Kept: 3, Repeated: " a", Offset: 2}
		s.Append(nil, []byte(text))
	})
}

// BenchmarkCut is the cost of one event of a chat with continuation.
func BenchmarkCut(b *testing.B) {
	event := []byte(vllmChat)
	buffer := make([]byte, len(event))
	var ids []uint32
	b.ReportAllocs()
	for b.Loop() {
		copy(buffer, event)
		_, ids, _ = Cut(buffer, ids[:0], false, anyRoom{})
	}
}

// FuzzCountIDs: in checked JSON, a counted list has as many integers from 0, and nothing else.
func FuzzCountIDs(f *testing.F) {
	for _, list := range []string{`[1,2]`, `[]`, `[ 1 , 2 ]`, `[1.5]`, `[-1]`, `[1e5]`, `[1E5]`, `["1"]`, `[null]`, `[true,false]`, `[[1]]`, `[{}]`, `[4294967296]`} {
		f.Add([]byte(`{"usage":{},"prompt_token_ids":` + list + `,"x":"\"prompt_token_ids\":[9]"}`))
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		if _, _, err := openai.Lookup(answer, "x"); err != nil {
			return
		}
		list := FindPrompt(answer)
		if list == nil {
			return
		}
		n := CountIDs(list)
		if n == 0 {
			return
		}
		var ids []json.Number
		if err := json.Unmarshal(list, &ids); err != nil || len(ids) != n {
			t.Fatalf("%q: counted %d, %v", list, n, err)
		}
		for _, id := range ids {
			if strings.Trim(id.String(), "0123456789") != "" {
				t.Fatalf("%q: %s counts as an id", list, id)
			}
		}
	})
}
