package attempt

import (
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

func TestEnding(t *testing.T) {
	chat := func(calls string) []byte { return []byte(`{"choices":[{"message":{"tool_calls":[` + calls + `]}}]}`) }
	const search, read = `{"function":{"name":"search"}}`, `{"function":{"name":"read"}}`
	for name, tt := range map[string]struct {
		answer []byte
		calls  bool
		tools  int
	}{
		"text":                {[]byte(`{"choices":[{"message":{"content":"x"}}]}`), false, 0},
		"one call":            {chat(search), true, 1},
		"two calls of a tool": {chat(search + "," + search), true, 1},
		"two tools":           {chat(search + "," + read), true, 2},
		"no name":             {chat(`{}`), true, 0},
	} {
		e := ending(openai.Chat, tt.answer)
		if e.ToolCall != tt.calls || len(e.Tools) != tt.tools {
			t.Errorf("%s: %+v", name, e)
		}
	}
	if a, b := ending(openai.Chat, chat(search+","+read)), ending(openai.Chat, chat(read+","+search)); a.Tools[0] != b.Tools[0] || a.Tools[1] != b.Tools[1] {
		t.Error("the order of the calls counts")
	}
}
