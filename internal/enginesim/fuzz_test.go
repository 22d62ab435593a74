package enginesim

import (
	"bufio"
	"bytes"
	"encoding/json"
	"net/http"
	"reflect"
	"testing"
	"unicode/utf8"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/vllm"
)

// FuzzParse: for any body, the parser returns a request that the core can run,
// or an answer in the engine's form.
func FuzzParse(f *testing.F) {
	routes := []string{core.RouteCompletions, core.RouteChat, core.RouteResponses, core.RouteMessages, core.RouteTokens}
	for _, body := range []string{
		``, `{}`, `[]`, `null`, `"x"`, `{"prompt":"hi","max_tokens":3}`, `{"prompt":[1,2,300]}`, `{"prompt":[[1],[2]],"n":3,"best_of":2}`,
		`{"messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true}}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"x"}]}],"stop":["a","b"],"seed":-1,"max_tokens":1,"system":"s"}`,
		`{"prompt":"x","kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1,2],[3]],"remote_port":"5600"}}`,
		`{"prompt":"x","n":0,"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":1}}`,
		`{"prompt":"x","max_tokens":1e400,"n":-9223372036854775808}`, `{"prompt":"<eos99999999999999999999>","max_tokens":9223372036854775807}`,
		`{"prompt":"x","n":1000000000000}`, `{"input":"x","instructions":"y","max_output_tokens":3}`, `{"input":[{"role":"user","content":"x"}]}`,
		`{"token_ids":[1,2],"sampling_params":{"max_tokens":2,"extra_args":{"kv_transfer_params":{}}}}`, `{"token_ids":[1],"sampling_params":null}`,
	} {
		for i := range routes {
			f.Add(body, uint8(i))
		}
	}
	e, err := New(Config{Connector: ConnectorVLLMNixl, KVBlocks: 64})
	if err != nil {
		f.Fatal(err)
	}
	if err := e.Start(); err != nil {
		f.Fatal(err)
	}
	e.Close() // so that clean-ups are not sent
	f.Fuzz(func(t *testing.T, body string, route uint8) {
		req, refusal := e.Proto.Parse(routes[int(route)%len(routes)], http.Header{}, []byte(body))
		if refusal != nil {
			form := refusal.Body
			if form == nil {
				form = e.Proto.ErrorBody(refusal)
			}
			raw, err := core.EncodeJSON(form)
			if err != nil || !json.Valid(raw) || !utf8.Valid(raw) || refusal.Status < 400 || refusal.Status > 499 {
				t.Fatalf("refusal %d %q %v", refusal.Status, raw, err)
			}
			return
		}
		for _, s := range e.NewSequences(req) {
			if len(s.Prompt) == 0 || s.Limit < 1 || core.Room(s) < len(s.Prompt) || core.Room(s) > e.MaxModelLen() {
				t.Fatalf("room for %d tokens of %d", core.Room(s), len(s.Prompt))
			}
		}
	})
}

// FuzzAppendString: encoding/json decodes the encoder's strings to the same text.
func FuzzAppendString(f *testing.F) {
	for _, s := range []string{"", "a\"b\\c", "\x00\x1f\x7f", "é世🙂", "\xff\xc3", "</script>&", "\u2028"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		var back string
		if err := json.Unmarshal(core.AppendString(nil, s), &back); err != nil || back != validRunes(s) {
			t.Fatalf("%q is read back as %q, %v", s, back, err)
		}
	})
}

// validRunes replaces each broken byte, as encoding/json does.
func validRunes(s string) string { return string([]rune(s)) }

// FuzzReadSide: a broken frame gives an error; a valid frame is read as it was
// written.
func FuzzReadSide(f *testing.F) {
	var whole bytes.Buffer
	core.WriteSide(&whole, core.SideMessage{Op: vllm.NixlRead, Engine: "e", Key: "k", Blocks: []core.BlockID{1, 2}, Fields: map[string]string{"a": "b"}, Payload: []byte{1, 2, 3}})
	f.Add(whole.Bytes())
	f.Add(whole.Bytes()[:9])
	f.Add([]byte{255, 255, 255, 255})
	f.Add([]byte{0, 0, 0, 2, '{', '}', 1, 0, 0, 0, 9})
	f.Add([]byte{0, 0, 0, 1, 'x', 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := core.ReadSide(bufio.NewReader(bytes.NewReader(raw)))
		if err != nil {
			return
		}
		var again bytes.Buffer
		if err := core.WriteSide(&again, m); err != nil {
			t.Fatal(err)
		}
		back, err := core.ReadSide(bufio.NewReader(&again))
		if err != nil || !reflect.DeepEqual(back, m) {
			t.Fatalf("%+v is read back as %+v, %v", m, back, err)
		}
	})
}
