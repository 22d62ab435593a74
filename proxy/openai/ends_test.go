package openai

import (
	"slices"
	"strings"
	"testing"
)

// TestPromptEnds marks each position with a bar.
func TestPromptEnds(t *testing.T) {
	for _, tt := range []struct {
		name, body, want string
		api              API
		from             int
	}{
		{"messages", `{"messages": [ {"role":"user","content":"a, b"} ,{"role":"x","content":[1,2]}]}`, `[ {"role":"user","content":"a, b"}| ,{"role":"x","content":[1,2]}|`, Chat, 0},
		{"all messages, for each type of part", `{"messages":[{"a":1},{"b":2}]}`, `[{"a":1}|,{"b":2}|`, Chat, 9},
		{"token ids", `{"prompt":[1, 23,456 ]}`, `[1|, 23|,456|`, Completions, 0},
		{"one list of token ids", `{"prompt":[[1,23]]}`, `[1|,23|`, Completions, 0},
		{"token ids of a part", `{"prompt":[1,23,456]}`, `[1,23|,456|`, Completions, 4},
		{"a part that begins behind a token id", `{"prompt":[1,23,456]}`, `[1,23|,456|`, Completions, 5},
		{"text", `{"prompt":"One, two 3x"}`, `One|,| |two| |3x|`, Completions, 0},
		{"text of a part", `{"prompt":"One, two 3x"}`, `One, two| |3x|`, Completions, 6},
		{"escapes", `{"prompt":"a\nb\u00e9c"}`, `a|\|n|b|\|u|00e9c|`, Completions, 0},
		{"characters of several bytes", `{"prompt":"日本a"}`, `日|本|a|`, Completions, 0},
		{"one text in a list", `{"prompt":["a b"]}`, `a| |b|`, Completions, 0},
		{"several prompts", `{"prompt":["a","b"]}`, ``, Completions, 0},
		{"nothing", `{"prompt":""}`, ``, Completions, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := parsed(t, tt.api, tt.body)
			text := string(r.PromptText())
			at := r.AppendPromptEnds([]int32{7}, tt.from)
			if at[0] != 7 || !slices.IsSorted(at[1:]) {
				t.Errorf("positions %v", at)
			}
			for i := len(at) - 1; i > 0; i-- {
				text = text[:at[i]] + "|" + text[at[i]:]
			}
			if len(at) == 1 {
				text = ""
			}
			if text != tt.want {
				t.Errorf("%s, want %s", text, tt.want)
			}
		})
	}
}

// TestPromptEndsOfTurns: the end of a prompt is also an end in every prompt that
// continues it.
func TestPromptEndsOfTurns(t *testing.T) {
	for _, tt := range []struct {
		name, open, end string
		turns           []string
		api             API
	}{
		{"chat", `{"messages":[`, `]}`, []string{`{"role":"user","content":"hi"}`, `,{"role":"assistant","content":"]}"},{"role":"user","content":"\"x"}`, `, {"role":"user"}`}, Chat},
		{"token ids", `{"prompt":[`, `]}`, []string{`1,2,33`, `,4`, `, 5,678`}, Completions},
		{"text", `{"prompt":"`, `"}`, []string{`Q: who?\nA:`, ` me\nQ: why?\nA:`, ` because. 日本`}, Completions},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text, ends := tt.open, []int32(nil)
			for _, turn := range tt.turns {
				text += turn
				r := parsed(t, tt.api, text+tt.end)
				at := r.AppendPromptEnds(nil, 0)
				for _, end := range ends {
					if !slices.Contains(at, end) {
						t.Errorf("%s has no end at %d: %v", strings.TrimPrefix(text, tt.open), end, at)
					}
				}
				ends = append(ends, at[len(at)-1])
			}
		})
	}
}

// FuzzPromptEnds: the ends of a prompt ascend, lie within its text, and include its end.
// A part of a prompt has the same ends as the whole prompt at the same positions.
func FuzzPromptEnds(f *testing.F) {
	for _, body := range []string{
		`{"messages": [ {"role":"user","content":"a, b"} ,{"role":"x","content":[1,2]}]}`, `{"prompt":[1, 23,456 ]}`, `{"prompt":[[1,23]]}`,
		`{"prompt":"One, two 3x"}`, `{"prompt":"a\nb\u00e9c 日本"}`, `{"prompt":["a b"]}`, `{"prompt":""}`, `{"input":[{"content":"x"}]}`,
	} {
		f.Add([]byte(body), "/v1/completions", uint16(0))
		f.Add([]byte(body), "/v1/chat/completions", uint16(3))
		f.Add([]byte(body), "/v1/responses", uint16(9))
	}
	f.Fuzz(func(t *testing.T, body []byte, path string, from uint16) {
		api, ok := APIFor(path)
		var r Request
		if !ok || ParseRequest(api, body, &r) != nil {
			return
		}
		text := r.PromptText()
		ends := r.AppendPromptEnds(nil, 0)
		if len(text) == 0 != (len(ends) == 0) && r.Prompt != PromptMessages {
			t.Fatalf("%d ends of %q", len(ends), text)
		}
		for i, end := range ends {
			if end <= 0 || int(end) > len(text) || i > 0 && end <= ends[i-1] {
				t.Fatalf("ends %v of %q", ends, text)
			}
		}
		if len(ends) == 0 {
			return
		}
		last := ends[len(ends)-1]
		if r.Prompt == PromptMessages {
			if strings.Trim(string(text[last:]), " \t\r\n") != "" {
				t.Errorf("the last end of %q is %d", text, last)
			}
			return
		}
		if int(last) != len(text) {
			t.Errorf("the last end of %q is %d", text, last)
		}
		want := slices.DeleteFunc(slices.Clone(ends), func(end int32) bool { return int(end) < int(from) && end != last })
		if part := r.AppendPromptEnds(nil, min(int(from), len(text))); !slices.Equal(part, want) {
			t.Errorf("ends %v of %q from %d, want %v", part, text, from, want)
		}
	})
}
