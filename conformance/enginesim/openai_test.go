package enginesim

import (
	"encoding/json"
	"net/http"
	"testing"
	"unicode/utf8"
)

// FuzzParse: whatever the body, the parser gives a request that the core can
// run or an answer in the engine's form.
func FuzzParse(f *testing.F) {
	for _, body := range []string{
		``, `{}`, `[]`, `null`, `"x"`, `{"prompt":"hi","max_tokens":3}`, `{"prompt":[1,2,300]}`, `{"prompt":[[1],[2]],"n":3,"best_of":2}`,
		`{"messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true}}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"x"}]}],"stop":["a","b"],"seed":-1}`,
		`{"prompt":"x","kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1,2],[3]],"remote_port":"5600"}}`,
		`{"prompt":"x","max_tokens":1e400,"n":-9223372036854775808}`, `{"prompt":"<eos99999999999999999999>","max_tokens":9223372036854775807}`,
		`{"prompt":"x","n":1000000000000}`,
	} {
		f.Add(body, true)
		f.Add(body, false)
	}
	e, err := New(Config{Connector: ConnectorVLLMNixl, KVBlocks: 64})
	if err != nil {
		f.Fatal(err)
	}
	e.end(false) // nothing may be sent
	f.Fuzz(func(t *testing.T, body string, chat bool) {
		route := routeCompletions
		if chat {
			route = routeChat
		}
		req, refusal := e.proto.parse(route, http.Header{}, []byte(body))
		if refusal != nil {
			raw, err := encodeJSON(e.proto.errorBody(refusal))
			if err != nil || !json.Valid(raw) || !utf8.Valid(raw) || refusal.Status < 400 || refusal.Status > 499 {
				t.Fatalf("refusal %d %q %v", refusal.Status, raw, err)
			}
			return
		}
		if refusal := e.checkTokens(req); refusal != nil {
			return
		}
		for _, s := range e.newSequences(req) {
			if s.limit < 1 || room(s) < len(s.prompt) || room(s) > e.maxModelLen() {
				t.Fatalf("room for %d tokens of %d", room(s), len(s.prompt))
			}
		}
	})
}

// FuzzAppendString: the encoder's strings are what encoding/json reads back.
func FuzzAppendString(f *testing.F) {
	for _, s := range []string{"", "a\"b\\c", "\x00\x1f\x7f", "é世🙂", "\xff\xc3", "</script>&", "\u2028"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		var back string
		if err := json.Unmarshal(appendString(nil, s), &back); err != nil || back != validRunes(s) {
			t.Fatalf("%q came back as %q, %v", s, back, err)
		}
	})
}

// validRunes replaces each broken byte, as encoding/json does.
func validRunes(s string) string { return string([]rune(s)) }
