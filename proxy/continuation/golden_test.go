package continuation

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// TestRealAnswers: the real vLLM answers a request, and another one whose prompt is that of the first
// with its first three tokens. The events of both, spliced, are the first answer.
func TestRealAnswers(t *testing.T) {
	for name, prompt := range map[string][]uint32{
		"completions": {'W', 'h', 'y', '?'},
		"chat":        {259, 'W', 'h', 'y', '?', 261, 260}, // user, end, assistant
	} {
		t.Run(name, func(t *testing.T) {
			whole, again := realEvents(t, name+"_ids_alone"), realEvents(t, name+"_ids_again_alone")
			text, output, usage := contents(t, whole)
			if got := promptOf(t, whole); !slices.Equal(got, prompt) || len(output) != 5 {
				t.Fatalf("prompt %d, output %d", got, output)
			}
			if got := promptOf(t, again); !slices.Equal(got, append(slices.Clone(prompt), output[:3]...)) {
				t.Errorf("the second prompt is %d", got)
			}
			s := Splicer{Kept: 3}
			s.ID, s.Created = Head(whole[1])
			spliced, kept := [][]byte(nil), 0
			for _, event := range whole {
				if e, ok := ReadEvent(event); ok && kept < 3 {
					spliced, kept = append(spliced, event), kept+len(e.IDs)
				}
			}
			for _, event := range again {
				if more := s.Append(nil, event); len(more) > 0 {
					spliced = append(spliced, more)
				}
			}
			gotText, gotOutput, gotUsage := contents(t, spliced)
			if gotText != text || !slices.Equal(gotOutput, output) || gotUsage != usage || s.Wrong || len(spliced) != len(whole) {
				t.Errorf("%q, %d, %+v, want %q, %d, %+v; %d events of %d, wrong is %t", gotText, gotOutput, gotUsage, text, output, usage, len(spliced), len(whole), s.Wrong)
			}
		})
	}
}

// realEvents returns the events of an answer that was recorded with a real engine.
func realEvents(t *testing.T, name string) [][]byte {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("..", "..", "conformance", "real", "golden", name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	_, answer, _ := bytes.Cut(raw, []byte("<<<\n"))
	_, body, _ := bytes.Cut(answer, []byte("\n\n"))
	return bytes.SplitAfter(bytes.TrimRight(body, "\n"), []byte("\n\n"))
}

// promptOf returns the ids of the prompt in events.
func promptOf(t *testing.T, events [][]byte) []uint32 {
	t.Helper()
	whole := bytes.Join(events, nil)
	list := bytes.Clone(FindPrompt(whole))
	if list == nil {
		return nil
	}
	ids, ok := ReadIDs(nil, list)
	if rest := CutPrompt(whole); !ok || bytes.Contains(rest, promptMember) {
		t.Errorf("ids are left: %s", rest)
	}
	return ids
}

type tokensUsed struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
}

// contents returns the text, the ids and the usage of events, which must have one id.
func contents(t *testing.T, events [][]byte) (text string, output []uint32, usage tokensUsed) {
	t.Helper()
	first := ""
	for _, event := range events {
		rest, ids, ok := Cut(slices.Clone(event), output, false, anyRoom{})
		e, _ := ReadEvent(event)
		if !ok || bytes.Contains(rest, outputMember) || !slices.Equal(ids[len(output):], e.IDs) {
			t.Errorf("ids %d, read %d, left %s", ids, e.IDs, rest)
		}
		text, output = text+e.Text, ids
		var v struct {
			ID    string
			Usage *tokensUsed
		}
		if json.Unmarshal(dataOf(event), &v) == nil {
			if v.Usage != nil {
				usage = *v.Usage
			}
			if first == "" {
				first = v.ID
			}
			if v.ID != first {
				t.Errorf("id %s, then %s", first, v.ID)
			}
		}
	}
	return text, output, usage
}
