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
		{"all messages, whatever the part", `{"messages":[{"a":1},{"b":2}]}`, `[{"a":1}|,{"b":2}|`, Chat, 9},
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

// TestPromptEndsOfTurns: the end of a prompt is an end of each prompt that goes on
// from it.
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
