package openai

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func toolCalls(api API, answer string) (names []string) {
	ToolCalls(api, []byte(answer), func(name []byte) { names = append(names, string(name)) })
	return names
}

func TestToolCalls(t *testing.T) {
	call := func(name string) string {
		return fmt.Sprintf(`{"type":"function","function":{"name":%q,"arguments":"{}"}}`, name)
	}
	for name, tt := range map[string]struct {
		api    API
		answer string
		want   []string
	}{
		"chat":                 {Chat, `{"choices":[{"finish_reason":"tool_calls","message":{"tool_calls":[` + call("read") + "," + call("réad") + `]}}]}`, []string{"read", "réad"}},
		"chat without calls":   {Chat, `{"choices":[{"finish_reason":"stop","message":{"content":"tool_calls","tool_calls":[]}}]}`, nil},
		"chat with null":       {Chat, `{"choices":[{"message":{"tool_calls":null}}]}`, nil},
		"name of another type": {Chat, `{"choices":[{"message":{"tool_calls":[{"function":{"name":7}},5]}}]}`, []string{"", ""}},
		"responses":            {Responses, `{"output":[{"type":"reasoning"},{"type":"function_call","name":"search"},{"type":"message","name":"x"}]}`, []string{"search"}},
		"messages":             {Messages, `{"stop_reason":"tool_use","content":[{"type":"text","text":"x"},{"type":"tool_use","name":"bash","input":{}}]}`, []string{"bash"}},
		"completions":          {Completions, `{"choices":[{"message":{"tool_calls":[` + call("read") + `]}}]}`, nil},
		"no JSON":              {Chat, `<html>`, nil},
		"nothing":              {Messages, ``, nil},
	} {
		if got := toolCalls(tt.api, tt.answer); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
	many := `{"content":[` + strings.TrimSuffix(strings.Repeat(`{"type":"tool_use","name":"x"},`, 500), ",") + `]}`
	if n := len(toolCalls(Messages, many)); n != maxToolCalls {
		t.Errorf("%d calls of an answer count, want %d", n, maxToolCalls)
	}
}

func FuzzToolCalls(f *testing.F) {
	f.Add(uint8(Chat), []byte(`{"choices":[{"message":{"tool_calls":[{"function":{"name":"a"}}]}}]}`))
	f.Add(uint8(Responses), []byte(`{"output":[{"type":"function_call","name":"a"}]}`))
	f.Add(uint8(Messages), []byte(`{"content":[{"type":"tool_use","name":"a"}]}`))
	f.Fuzz(func(t *testing.T, api uint8, answer []byte) {
		n, size := 0, 0
		ToolCalls(API(api), answer, func(name []byte) { n, size = n+1, size+len(name) })
		if n > maxToolCalls || size > 3*len(answer) {
			t.Errorf("%d calls with names of %d bytes", n, size)
		}
	})
}

func TestStreamedToolCalls(t *testing.T) {
	event := func(delta string) string {
		return `data: {"choices":[{"index":0,"delta":` + delta + `,"finish_reason":null}]}` + "\n\n"
	}
	first := func(name string) string {
		return event(`{"tool_calls":[{"index":0,"id":"1","function":{"name":"` + name + `","arguments":""}}]}`)
	}
	more := event(`{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}`)
	last := `data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}` + "\n\n"
	for name, tt := range map[string]struct {
		api    API
		events string
		want   []string
	}{
		"a call":             {Chat, first("read") + more + last, []string{"read", ""}},
		"two calls":          {Chat, event(`{"content":"x"}`) + first("read") + first("bash"), []string{"read", "bash"}},
		"the last event":     {Chat, last + "data: [DONE]\n\n", nil},
		"a text":             {Chat, event(`{"content":"\"tool_calls\":[{"}`), nil},
		"an event of a kind": {Chat, "event: x\n" + first("read"), []string{"read"}},
		"no JSON":            {Chat, `data: {"tool_calls"` + "\n\n", nil},
		"a part":             {Chat, `"tool_calls"`, nil},
		"completions":        {Completions, first("read"), nil},
	} {
		var got []string
		StreamedToolCalls(tt.api, []byte(tt.events), func(name []byte) { got = append(got, string(name)) })
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}
