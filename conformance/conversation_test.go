package conformance

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// talks are the forms of conversations that share a system prompt: the path,
// and the body of a turn after that many earlier turns.
var talks = []struct {
	name, path string
	body       func(conversation, turns int) string
}{
	{"chat", chatPath, func(conversation, turns int) string {
		messages := []string{`{"role":"system","content":"` + strings.Repeat("Be brief. ", 800) + `"}`}
		for turn := range turns + 1 {
			if turn > 0 {
				messages = append(messages, fmt.Sprintf(`{"role":"assistant","content":"%d%d"}`, conversation, turn))
			}
			messages = append(messages, fmt.Sprintf(`{"role":"user","content":"q%d %d"}`, conversation, turn))
		}
		return fmt.Sprintf(`{"model":"sim","messages":[%s],"max_tokens":1}`, strings.Join(messages, ","))
	}},
	{"token ids", completionsPath, func(conversation, turns int) string {
		ids := []string{}
		for i := range 2048 {
			ids = append(ids, fmt.Sprint(5+i*7%240))
		}
		for turn := range turns + 1 {
			ids = append(ids, fmt.Sprint(5+conversation), fmt.Sprint(5+turn), "9")
		}
		return fmt.Sprintf(`{"model":"sim","prompt":[%s],"max_tokens":1}`, strings.Join(ids, ","))
	}},
	{"text", completionsPath, func(conversation, turns int) string {
		text := strings.Repeat("Be brief. ", 800)
		for turn := range turns + 1 {
			text += fmt.Sprintf(`Q: %d and %d?\nA: yes %d.\n`, conversation, turn, turn)
		}
		return fmt.Sprintf(`{"model":"sim","prompt":"%s","max_tokens":1}`, text)
	}},
}

// TestShortTurnsGoHome: conversations without a client's id share a long system
// prompt, and each turn adds a few bytes. Every later turn is placed on the
// engine of the previous turn.
func TestShortTurnsGoHome(t *testing.T) {
	const conversations, turns = 43, 4
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{prefill: 8, decode: 1, config: func(c *config.Config) {
		c.Policy.Place = "conversation"
	}})
	for _, talk := range talks {
		t.Run(talk.name, func(t *testing.T) {
			homes, used := make([]string, conversations), make(map[string]int)
			away := 0
			for turn := range turns {
				for c := range homes {
					a := f.post(context.Background(), f.url, talk.path, talk.body(c, turn))
					if a.status != 200 {
						t.Fatalf("got status %d: %s", a.status, a.body)
					}
					home := a.header.Get("X-Pdproxy-Prefill")
					if turn == 0 {
						used[home]++
					} else if home != homes[c] {
						away++
					}
					homes[c] = home
				}
			}
			if away > 0 {
				t.Errorf("%d of %d later turns were placed elsewhere", away, conversations*(turns-1))
			}
			if len(used) < 8 {
				t.Errorf("first turns were placed on %d of 8 engines: %v", len(used), used)
			}
		})
	}
}
