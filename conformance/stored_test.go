package conformance

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

const responsesPath = "/v1/responses"

// call sends a request without a body to the proxy.
func (f *fleet) call(method, path string) answer {
	f.t.Helper()
	r, err := http.NewRequest(method, f.url+path, nil)
	if err != nil {
		f.t.Fatal(err)
	}
	resp, err := f.client.Do(r)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return readAnswer(resp, body, err)
}

// respond creates a response and returns its id and its text.
func (f *fleet) respond(members string) (id, text string) {
	f.t.Helper()
	a := f.try(responsesPath, `{"model":"sim","input":"tell me","max_output_tokens":9`+members+`}`)
	var response struct{ ID string }
	if err := json.Unmarshal([]byte(a.body), &response); err != nil || a.status != 200 || response.ID == "" {
		f.t.Fatalf("got status %d: %s", a.status, a.body)
	}
	return response.ID, a.text
}

// TestStoredResponses: each process of a fleet, also a new one, finds a response at the engine
// that holds it: to read it, to continue it, to cancel it.
func TestStoredResponses(t *testing.T) {
	for _, connector := range []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorVLLMMooncake} {
		t.Run(connector, func(t *testing.T) {
			var cfg config.Config
			f := startFleet(t, connector, fleetOptions{prefill: 2, decode: 3, engine: slow(enginesim.RoleDecode, 2000), config: func(c *config.Config) { cfg = *c }})
			ids, texts := []string{}, []string{}
			for n := range 6 {
				id, text := f.respond(fmt.Sprintf(`,"instructions":"%d"`, n))
				ids, texts = append(ids, id), append(texts, text)
			}
			right := func(what string) {
				t.Helper()
				for n, id := range ids {
					got := f.call("GET", responsesPath+"/"+id)
					if got.status != 200 || got.text != texts[n] || !strings.Contains(got.body, id) || strings.Contains(got.body, "remote_") {
						t.Errorf("%s: got status %d: %s, want the text %q", what, got.status, got.body, texts[n])
					}
				}
			}
			for range 3 {
				right("first")
			}
			if err := f.reload(&cfg); err != nil {
				t.Fatal(err)
			}
			right("after a reload")
			for _, id := range ids {
				if next, _ := f.respond(`,"previous_response_id":"` + id + `"`); next == id {
					t.Errorf("the next response has the same id %s", id)
				}
				if got := f.call("POST", responsesPath+"/"+id+"/cancel"); got.status != 400 || !strings.Contains(got.body, "Cannot cancel a synchronous response.") {
					t.Errorf("cancel: got status %d: %s", got.status, got.body)
				}
				if got := f.call("DELETE", responsesPath+"/"+id); got.status != 501 || !strings.Contains(got.body, "not_implemented") {
					t.Errorf("delete: got status %d: %s", got.status, got.body)
				}
				if got := f.call("GET", responsesPath+"/"+id+"?stream=true&starting_after=7&rid=x"); got.status != 200 || !got.done || !strings.Contains(got.body, `"sequence_number":71`) {
					t.Errorf("stream: got status %d: %s", got.status, got.body)
				}
			}
		})
	}
}

// TestBackgroundResponses: a response in the background is polled until it is complete, or
// cancelled.
func TestBackgroundResponses(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{decode: 3, prefill: 1, engine: slow(enginesim.RoleDecode, 2000)})
	id, _ := f.respond(`,"background":true,"store":true`)
	f.eventually("the response is complete", func() bool {
		got := f.call("GET", responsesPath+"/"+id)
		if got.status != 200 {
			t.Fatalf("got status %d: %s", got.status, got.body)
		}
		return got.text != "" && strings.Contains(got.body, id)
	})
	for _, e := range f.decode {
		e.SetDecodeUsPerToken(1_000_000)
	}
	id, _ = f.respond(`,"background":true,"store":true`)
	if got := f.call("POST", responsesPath+"/"+id+"/cancel"); got.status != 200 || !strings.Contains(got.body, `"status":"cancelled"`) {
		t.Errorf("cancel: got status %d: %s", got.status, got.body)
	}
	if got := f.call("GET", responsesPath+"/"+id); got.status != 200 || !strings.Contains(got.body, `"status":"cancelled"`) {
		t.Errorf("got status %d: %s", got.status, got.body)
	}
}

// TestUnknownResponses: bad ids and ids of other engines get clear errors, and a response that
// a stopped engine may hold is not reported as unknown.
func TestUnknownResponses(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{})
	for _, row := range []struct {
		method, path string
		status       int
		code         string
	}{
		{"GET", "/resp_none", 404, `"param":"response_id","code":"response_not_found"`},
		{"DELETE", "/resp_none/", 404, "response_not_found"},
		{"POST", "/resp_none/cancel", 404, "response_not_found"},
		{"POST", "/resp_none", 405, "method_not_allowed"},
		{"GET", "/resp_none/cancel", 405, "method_not_allowed"},
		{"PUT", "/resp_none", 405, "method_not_allowed"},
		{"GET", "/resp%2f..%2f..%2fsleep", 404, "not_found"},
		{"GET", "/resp_none/input_items", 404, "not_found"},
		{"POST", "/compact", 404, `"code":"not_found"`},
		{"POST", "/input_tokens/", 404, `"code":"not_found"`},
		{"GET", "/compact", 404, `"code":"not_found"`},
		{"GET", "/resp_" + strings.Repeat("x", 300), 404, "not_found"},
	} {
		if got := f.call(row.method, responsesPath+row.path); got.status != row.status || !strings.Contains(got.body, row.code) || !strings.Contains(got.body, `{"error":{"message":`) {
			t.Errorf("%s %s: got status %d: %s", row.method, row.path, got.status, got.body)
		}
	}
	if got := f.try(responsesPath, `{"model":"sim","input":"x","previous_response_id":"resp_none"}`); got.status != 404 || !strings.Contains(got.body, "resp_none") {
		t.Errorf("unknown previous response: got status %d: %s", got.status, got.body)
	}
}

// TestWebSocket: each message is one request through both engines. Codex, which needs more than
// engines have, is refused with 426 and can send its request afterwards.
func TestWebSocket(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{})
	beta := http.Header{"OpenAI-Beta": {"responses_websockets=2026-02-06"}}
	if _, resp, err := websocket.Dial(t.Context(), f.url+responsesPath, &websocket.DialOptions{HTTPHeader: beta}); err == nil || resp == nil || resp.StatusCode != http.StatusUpgradeRequired {
		t.Errorf("got %v, %v, want 426", resp, err)
	}
	f.respond("")
	c, _, err := websocket.Dial(t.Context(), f.url+responsesPath, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	var texts []string
	for range 2 {
		if err := c.Write(t.Context(), websocket.MessageText, []byte(`{"type":"response.create","model":"sim","input":"over a socket","max_output_tokens":4}`)); err != nil {
			t.Fatal(err)
		}
		text := ""
		for kind := ""; kind != "response.completed"; {
			var event struct{ Type, Delta string }
			_, message, err := c.Read(t.Context())
			if err == nil {
				err = json.Unmarshal(message, &event)
			}
			if err != nil || event.Type == "error" {
				t.Fatalf("got %s, %v", message, err)
			}
			kind, text = event.Type, text+event.Delta
		}
		texts = append(texts, text)
	}
	if texts[0] == "" || texts[0] != texts[1] {
		t.Errorf("got texts %q", texts)
	}
	if err := c.Close(websocket.StatusNormalClosure, ""); err != nil {
		t.Error(err)
	}
}
