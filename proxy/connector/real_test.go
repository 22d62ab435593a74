package connector

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// capture is one exchange with a real vLLM, recorded by conformance/real.
type capture struct {
	path    string
	request []byte // body
	status  string // status line
	answer  []byte // body
}

func readCapture(t *testing.T, name string) capture {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "conformance", "real", "golden", name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok1 := bytes.Cut(text, []byte(">>>\n"))
	sent, got, ok2 := bytes.Cut(rest, []byte("\n<<<\n"))
	if !ok1 || !ok2 {
		t.Fatalf("%s is no capture", name)
	}
	c := capture{}
	head, body, _ := bytes.Cut(sent, []byte("\n\n"))
	c.path, c.request = strings.Fields(string(head))[1], body
	head, c.answer, _ = bytes.Cut(got, []byte("\n\n"))
	c.status, _, _ = strings.Cut(string(head), "\n")
	return c
}

// members decodes an object and keeps the text of numbers.
func members(t *testing.T, raw []byte) map[string]any {
	t.Helper()
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	m := make(map[string]any)
	if err := dec.Decode(&m); err != nil {
		t.Fatalf("dec.Decode(&m) = %v, %s", err, raw)
	}
	return m
}

// TestRealPairs replays pairs that a real prefill and decode engine answered. The
// connector sends prefill the recorded request, except for its own edits, and builds the
// same decode request from the real answer.
func TestRealPairs(t *testing.T) {
	for _, name := range []string{
		"completions_unary", "completions_stream", "chat_unary", "chat_stream",
		"responses_unary", "responses_stream", "messages_unary", "messages_stream", "completions_eos",
	} {
		t.Run(name, func(t *testing.T) {
			p, d := readCapture(t, name+"_prefill"), readCapture(t, name+"_decode")
			wantDecode := members(t, d.request)
			client := maps.Clone(wantDecode)
			delete(client, "kv_transfer_params")
			body, err := json.Marshal(client)
			if err != nil {
				t.Fatal(err)
			}
			a := pair(t, p.path, string(body))
			if err := (nixl{}).Pairable(a.Request); err != nil {
				t.Fatal(err)
			}

			leg, err := nixl{}.Prefill(a, nil)
			if err != nil {
				t.Fatal(err)
			}
			got, want := members(t, leg.Body), members(t, p.request)
			delete(got, "ignore_eos")
			delete(got, "store")
			if !reflect.DeepEqual(got, want) {
				t.Errorf("prefill leg %v\nwant %v", got, want)
			}

			a.Prefill.Host, a.Decode.Host = "127.0.0.1", "127.0.0.1" // where the engines ran
			h, err := nixl{}.ReadPrefill(a, p.answer)
			if err != nil || !h.Pinned || h.Fallback != "" {
				t.Fatalf("handoff %+v, %v", h, err)
			}
			if leg, err = (nixl{}).Decode(a, &h, nil); err != nil {
				t.Fatal(err)
			}
			if got := members(t, leg.Body); !reflect.DeepEqual(got, wantDecode) {
				t.Errorf("decode leg %v\nwant %v", got, wantDecode)
			}
			if !strings.HasSuffix(d.status, "200 OK") {
				t.Errorf("the real decode engine answered %s", d.status)
			}
		})
	}
}

// TestRealAnswers reads unusual answers of a real prefill engine.
func TestRealAnswers(t *testing.T) {
	a := pair(t, "/v1/completions", `{"prompt":"x"}`)
	a.Prefill.Host, a.Decode.Host = "127.0.0.1", "127.0.0.1" // where the engines ran
	if h, err := (nixl{}).ReadPrefill(a, readCapture(t, "completions_short_prefill").answer); err != nil || !h.Pinned {
		t.Errorf("a prompt shorter than a block: %+v, %v", h, err)
	}
	// A streamed answer of prefill has no params: therefore the leg is unary.
	if h, err := (nixl{}).ReadPrefill(a, readCapture(t, "completions_stream_on_prefill").answer); err == nil {
		t.Errorf("an event stream was read as an answer: %+v", h)
	}
	if h, err := (nixl{}).ReadPrefill(a, readCapture(t, "completions_no_params_decode").answer); err != nil || h.Pinned || h.Fallback != "no_kv_params" {
		t.Errorf("null params: %+v, %v", h, err)
	}
}

// TestRealFacts reads the facts of a real engine.
func TestRealFacts(t *testing.T) {
	var f engine.Facts
	for _, name := range []string{"models", "version"} {
		c := readCapture(t, name)
		if err := (nixl{}).ReadFacts(&f, c.path, 200, c.answer); err != nil {
			t.Fatal(err)
		}
	}
	if len(f.Models) != 1 || f.Models[0] != "tiny" || f.Version == "" {
		t.Errorf("facts %+v", f)
	}
}

// TestRealRefusals: a prefill leg has none of the forms that a real engine rejects, or
// for which it pins blocks that no call can free.
func TestRealRefusals(t *testing.T) {
	for _, name := range []string{"stream_options_without_stream", "min_tokens_over_max", "chat_stream_options"} {
		c := readCapture(t, "refuse_"+name)
		if !strings.Contains(c.status, " 400 ") {
			t.Errorf("the real engine answered %s with %s", name, c.status)
		}
		m := members(t, c.request)
		delete(m, "kv_transfer_params")
		body, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if name == "chat_stream_options" {
			body = append(body[:len(body)-1], `,"stream":true}`...)
		}
		leg, err := nixl{}.Prefill(pair(t, c.path, string(body)), nil)
		if err != nil {
			t.Fatal(err)
		}
		got := members(t, leg.Body)
		for _, key := range []string{"stream_options", "min_tokens"} {
			if _, ok := got[key]; ok {
				t.Errorf("%s: the leg has %s", name, key)
			}
		}
	}
	for _, name := range []string{"n_2", "prompt_list_2"} {
		c := readCapture(t, "refuse_"+name)
		r := request(t, c.path, string(c.request))
		if err := (nixl{}).Pairable(r); err == nil || r.API != openai.Completions {
			t.Errorf("%s is pairable", name)
		}
	}
}
