package openai

import (
	"bytes"
	"net/http"
	"strings"
	"testing"
)

// sources are some places of an id.
var sources = NewIDSources(
	[]string{"conversation_params.conversation_id", "conversation_id", "session_id"},
	[]string{"X-Session-ID", "X-Correlation-ID"},
	[]string{"prompt_cache_key", "client_metadata.session_id"},
	[]string{"x-parent-agent", "X-Session-ID"},
)

func TestParentID(t *testing.T) {
	long := strings.Repeat("p", maxParentID)
	for _, tt := range []struct{ name, id, agent, session, want string }{
		{"none", "a", "", "", ""},
		{"in the order of the list", "a", "p", "s", "p"},
		{"blank values are skipped", "a", " \t", "s", "s"},
		{"trimmed", "a", " p ", "", "p"},
		{"the conversation itself is no parent", "s", "", "s", ""},
		{"the next header after the conversation itself", "a", "a", "s", "s"},
		{"longest", "a", long, "", long},
		{"too long", "a", long + "p", "", ""},
	} {
		header := http.Header{"X-Parent-Agent": {tt.agent}, "X-Session-Id": {tt.session}}
		if got := sources.ParentID(tt.id, header.Get); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestConversationID(t *testing.T) {
	for _, tt := range []struct{ name, members, session, correlation, want string }{
		{"none", ``, "", "", ""},
		{"body", `"conversation_params":{"conversation_id":"c-1"}`, "", "", "c-1"},
		{"body before headers", `"session_id":"s"`, "h", "k", "s"},
		{"body in the order of the list", `"session_id":"s","conversation_id":"c"`, "", "", "c"},
		{"headers in the order of the list", ``, "h", "k", "h"},
		{"second header", ``, "", "k", "k"},
		{"headers before late members", `"prompt_cache_key":"p"`, "", "k", "k"},
		{"late member", `"prompt_cache_key":"p","client_metadata":{"session_id":"m"}`, "", "", "p"},
		{"nested late member", `"client_metadata":{"a":{"session_id":"no"},"session_id":"m"}`, "", "", "m"},
		{"blank values are skipped", `"conversation_id":" \t","session_id":""`, " \t ", "k", "k"},
		{"trimmed in the body", `"conversation_id":"  c 1\n"`, "", "", "c 1"},
		{"trimmed in a header", ``, " h ", "", "h"},
		{"escapes", `"conversation\u005fid":"c\/\u00e9\ud83d\ude00"`, "", "", "c/é😀"},
		{"nested escapes", `"client_metadata":{"session\u005fid":"\u0041"}`, "", "", "A"},
		{"no strings", `"conversation_params":{"conversation_id":7},"conversation_id":["c"],"session_id":null`, "", "k", "k"},
		{"not an object", `"conversation_params":"c"`, "", "", ""},
		{"an array", `"client_metadata":["session_id"]`, "", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			body := `{"messages":[{}]}`
			if tt.members != "" {
				body = `{"messages":[{}],` + tt.members + `}`
			}
			h := http.Header{}
			h.Set("x-session-id", tt.session)
			h.Set("x-correlation-id", tt.correlation)
			var r Request
			if err := ParseRequest(Chat, []byte(body), &r); err != nil {
				t.Fatal(err)
			}
			if got := sources.ConversationID(&r, h.Get); got != tt.want {
				t.Errorf("sources.ConversationID(&r, h.Get) = %q, want %q", got, tt.want)
			}
		})
	}
}

func TestHoldsAnswer(t *testing.T) {
	for _, tt := range []struct {
		api          API
		body         string
		holds, known bool
	}{
		{Chat, `{"messages":[{"role":"user","content":"hi"}]}`, false, true},
		{Chat, `{"messages":[{"role":"system","content":"s"},{"content":[{"role":"assistant"}],"role":"user"}]}`, false, true},
		{Chat, `{"messages":[{"role":"user","content":"{\"role\":\"assistant\"}"}]}`, false, true},
		{Chat, `{"messages":[{},{"role":null},{"role":1}]}`, false, true},
		{Chat, `{"messages":[ {"role":"user","content":"a]},{"} , {"content":"b", "role" : "assistant"}, {"role":"user"} ]}`, true, true},
		{Chat, `{"messages":[{"role":"user"},{"r\u006fle":"assist\u0061nt"}]}`, true, true},
		{Chat, `{"messages":[{"role":"user"},{"role":"tool"}]}`, true, true},
		{Messages, `{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":[]},{"role":"user","content":[]}]}`, true, true},
		{Responses, `{"input":[{"type":"message","role":"user"}]}`, false, true},
		{Responses, `{"input":[{"role":"user"},{"type":"message","role":"assistant"}]}`, true, true},
		{Responses, `{"input":[{"role":"user"},{"type":"function_call","name":"f"}]}`, true, true},
		{Responses, `{"input":"hi"}`, false, false},
		{Responses, `{"input":"hi","previous_response_id":"r"}`, true, true},
		{Responses, `{"input":"hi","previous_response_id":null}`, false, false},
		{Completions, `{"prompt":"hi"}`, false, false},
		{Completions, `{"prompt":[1,2]}`, false, false},
	} {
		var r Request
		if err := ParseRequest(tt.api, []byte(tt.body), &r); err != nil {
			t.Fatal(err)
		}
		if holds, known := r.HoldsAnswer(); holds != tt.holds || known != tt.known {
			t.Errorf("%s: r.HoldsAnswer() = %v, %v, want %v, %v", tt.body, holds, known, tt.holds, tt.known)
		}
	}
}

func TestConversationAllocatesNothing(t *testing.T) {
	h := http.Header{"X-Correlation-Id": {"k"}}
	for _, body := range [][]byte{
		[]byte(`{"model":"m","messages":[{"role":"user","content":"hi"}],"client_metadata":{"session_id":7}}`),
		[]byte(`{"model":"m","messages":[{"role":"user","content":"hi"},{"role":"assistant"}],"cache_salt":"s","conversation_id":"c"}`),
		textBody(8<<10, english),
	} {
		var r Request
		n := testing.AllocsPerRun(10, func() {
			if err := ParseRequest(Chat, body, &r); err != nil {
				t.Fatal(err)
			}
			if sources.ConversationID(&r, h.Get) == "" || len(r.PromptText()) == 0 {
				t.Fatal("no conversation id or no prompt text was found")
			}
			r.HoldsAnswer()
			for raw := range r.Preamble {
				_ = raw
			}
			if len(r.CacheSalt()) > 1 || r.LoRA() != "" {
				t.Fatal("salt or adapter")
			}
		})
		if n != 0 {
			t.Errorf("%.40s: %v allocations", body, n)
		}
	}
}

// A new source of conversation ids must not hide an id that an earlier source has found.
func TestConversationIDOutlivesNothing(t *testing.T) {
	body := []byte(`{"messages":[{}],"conversation_id":"c-1"}`)
	var r Request
	if err := ParseRequest(Chat, body, &r); err != nil {
		t.Fatal(err)
	}
	id := sources.ConversationID(&r, http.Header{}.Get)
	kept := strings.Clone(id)
	clear(body)
	if id == "c-1" || kept != "c-1" {
		t.Errorf("the id %q was copied, its clone is %q", id, kept)
	}
}

func TestOpening(t *testing.T) {
	const system, user, answer = `{"role":"system","content":"be short"}`, `{"content":"hi \u00e9","role":"user"}`, `{"role":"assistant","content":"yes"}`
	for _, tt := range []struct {
		api        API
		body, want string
	}{
		{Chat, `{"messages":[` + system + `,` + user + `]}`, `"hi \u00e9"`},
		{Chat, `{"messages":[` + user + `,` + answer + `,{"role":"user","content":"next"}]}`, `"hi \u00e9"`},
		{Chat, `{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]}]}`, `[{"type":"text","text":"a"}]`},
		{Chat, `{"messages":[` + answer + `]}`, `[` + answer + `]`},
		{Chat, `{"messages":[{"role":"user"},{"role":1,"content":"b"},{"role":"","content":"c"},{"role":null},` + user + `]}`, `"hi \u00e9"`},
		{Messages, `{"system":"s","messages":[` + user + `]}`, `"hi \u00e9"`},
		{Responses, `{"input":"hi"}`, `"hi"`},
		{Responses, `{"input":[{"type":"reasoning"},{"role":"user","content":"hi"}]}`, `"hi"`},
		{Completions, `{"prompt":"text"}`, `"text"`},
		{Completions, `{"prompt":[1,2]}`, `[1,2]`},
		{Completions, `{"prompt_embeds":"AA"}`, ``},
	} {
		var r Request
		if err := ParseRequest(tt.api, []byte(tt.body), &r); err != nil {
			t.Fatalf("%s: %v", tt.body, err)
		}
		if got := string(r.Opening()); got != tt.want {
			t.Errorf("%s: got %s, want %s", tt.body, got, tt.want)
		}
	}
}

// FuzzOpening: the opening lies within the prompt, and a further turn has the same one.
func FuzzOpening(f *testing.F) {
	f.Add(`{"role":"user","content":"hi"}`)
	f.Add(`{"content":[],"role":"user"},{"role":"system"}`)
	f.Add(`{"role":"us\u0065r","content":{}}`)
	f.Fuzz(func(t *testing.T, messages string) {
		var first, later Request
		if ParseRequest(Chat, []byte(`{"messages":[`+messages+`]}`), &first) != nil ||
			ParseRequest(Chat, []byte(`{"messages":[`+messages+`,{"role":"assistant","content":"x"}]}`), &later) != nil {
			return
		}
		opening := first.Opening()
		if !bytes.Contains(first.PromptRaw(), opening) {
			t.Fatalf("%s is not in the prompt", opening)
		}
		if !bytes.Equal(opening, first.PromptRaw()) && !bytes.Equal(opening, later.Opening()) {
			t.Fatalf("got %s, later %s", opening, later.Opening())
		}
	})
}
