package enginesim

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// TestRoutesEqualDirect: on every route of vLLM the answer of a pair equals
// that of one engine, unary and streaming, and all routes give the same text.
func TestRoutesEqualDirect(t *testing.T) {
	prompt := words(31, 70)
	quoted, _ := json.Marshal(prompt)
	ids, _ := json.Marshal(core.Tokenize("<|user|>" + prompt + "\n<|assistant|>"))
	routes := []struct{ route, body, limit string }{
		{core.RouteChat, `"messages":[{"role":"user","content":` + string(quoted) + `}],"max_tokens":LIMIT`, ""},
		{core.RouteCompletions, `"prompt":` + string(ids) + `,"max_tokens":LIMIT`, ""},
		{core.RouteResponses, `"input":` + string(quoted) + `,"max_output_tokens":LIMIT`, ""},
		{core.RouteMessages, `"model":"sim","messages":[{"role":"user","content":[{"type":"text","text":` + string(quoted) + `}]}],"max_tokens":LIMIT`, ""},
		{core.RouteTokens, `"token_ids":` + string(ids) + `,"sampling_params":{"max_tokens":LIMIT}`, ""},
	}
	var texts []string
	for _, tt := range routes {
		t.Run(tt.route, func(t *testing.T) {
			pd := startPair(t)
			body := func(limit int, extra string) string {
				return "{" + strings.Replace(tt.body, "LIMIT", fmt.Sprint(limit), 1) + extra + "}"
			}
			direct := post(t, pd.both.URL()+tt.route, body(9, ""))
			want := anyText(t, tt.route, string(direct.body))
			texts = append(texts, want)
			for _, streaming := range []string{"", `,"stream":true`} {
				p := post(t, pd.p.URL()+tt.route, body(1, ","+prefillParams))
				d := post(t, pd.d.URL()+tt.route, body(9, streaming+`,"kv_transfer_params":`+p.params(t)))
				if got := anyText(t, tt.route, string(d.body)); got != want {
					t.Errorf("stream %q: text %q, direct %q", streaming, got, want)
				}
			}
			if p, d := pd.p.State(), pd.d.State(); d.Transfers != 2 || p.StaleReads != 0 || p.BlocksPinned != 0 {
				t.Errorf("prefill %+v, decode %+v", p, d)
			}
		})
	}
	for _, text := range texts {
		if text != texts[0] || text == "" {
			t.Errorf("texts differ: %q", texts)
		}
	}
}

// anyText returns the text of an answer on any route, unary or streamed.
func anyText(t *testing.T, route, body string) string {
	t.Helper()
	var text strings.Builder
	read := func(raw string) {
		var v struct {
			Type    string
			Delta   json.RawMessage
			Output  []struct{ Content []struct{ Text string } }
			Content []struct{ Text string }
			Choices []struct {
				Text           string
				Message, Delta struct{ Content string }
				TokenIDs       []core.Token `json:"token_ids"`
			}
			Error any
		}
		if err := json.Unmarshal([]byte(raw), &v); err != nil || v.Error != nil {
			t.Fatalf("%q: json.Unmarshal([]byte(raw), &v) = %v, want nil", raw, err)
		}
		for _, c := range v.Choices {
			text.WriteString(c.Text + c.Message.Content + c.Delta.Content + core.Detokenize(c.TokenIDs))
		}
		for _, c := range v.Content {
			text.WriteString(c.Text)
		}
		for _, o := range v.Output {
			for _, c := range o.Content {
				text.WriteString(c.Text)
			}
		}
		var delta struct{ Text string }
		switch v.Type {
		case "response.output_text.delta":
			json.Unmarshal(v.Delta, &delta.Text)
		case "content_block_delta":
			json.Unmarshal(v.Delta, &delta)
		}
		text.WriteString(delta.Text)
	}
	if strings.HasPrefix(body, "{") {
		read(body)
		return text.String()
	}
	last := ""
	for event := range strings.SplitSeq(strings.TrimSuffix(body, "\n\n"), "\n\n") {
		name, data, _ := strings.Cut(event, "data: ")
		if last = name + data; data != "[DONE]" {
			read(data)
		}
	}
	ends := map[string]string{core.RouteResponses: "event: response.completed\n", core.RouteMessages: "event: message_stop\n"}
	if end, named := ends[route]; named && !strings.HasPrefix(last, end) || !named && last != "[DONE]" {
		t.Errorf("stream ends with %q", last)
	}
	return text.String()
}

func TestRouteRefusals(t *testing.T) {
	pd := startPair(t)
	for _, tt := range []struct {
		route, body, want string
		status            int
	}{
		{core.RouteMessages, `{"model":"sim","messages":[{"role":"user","content":"x"}]}`, `{"error":{"message":"1 validation error:\n  {'type': 'missing', 'loc': 'body.max_tokens'`, 400},
		{core.RouteMessages, `{"messages":[],"max_tokens":1}`, `{"error":{"message":"1 validation error:\n  {'type': 'missing', 'loc': 'body.model'`, 400},
		{core.RouteMessages, `{"model":"x","messages":[],"max_tokens":1}`, `{"type":"error","error":{"type":"not_found_error","message":"The model`, 404},
		{core.RouteMessages, `{"model":"sim","messages":[],"max_tokens":0}`, `{"error":{"message":"1 validation error:\n  {'type': 'value_error', 'loc': 'body.max_tokens'`, 400},
		{core.RouteResponses, `{}`, `{"error":{"message":"1 validation error:\n  {'type': 'missing', 'loc': 'body.input'`, 400},
		{core.RouteResponses, `{"input":3}`, `{"error":{"message":"1 validation error:`, 400},
		{core.RouteResponses, `{"input":"x","max_output_tokens":0}`, `{"error":{"message":"max_tokens must be at least 1`, 400},
		{core.RouteTokens, `{"token_ids":["x"]}`, `{"error":{"message":"1 validation error:`, 400},
		{core.RouteTokens, `{"token_ids":[],"sampling_params":{}}`, `{"error":{"message":"1 validation error:\n  {'type': 'too_short'`, 400},
		{core.RouteTokens, `{"token_ids":[-1],"sampling_params":{}}`, `{"error":{"message":"1 validation error:\n  {'type': 'value_error'`, 400},
		{core.RouteTokens, `{"token_ids":[1]}`, `{"error":{"message":"1 validation error:\n  {'type': 'missing', 'loc': 'body.sampling_params'`, 400},
		{core.RouteTokens, `{"token_ids":[1],"max_tokens":1,"sampling_params":{"max_tokens":0}}`, `{"error":{"message":"max_tokens must be at least 1`, 400},
	} {
		if a := post(t, pd.p.URL()+tt.route, tt.body); a.status != tt.status || !strings.HasPrefix(string(a.body), tt.want) {
			t.Errorf("%s, %s: post(pd.p.URL()+tt.route, tt.body) = %d, %s", tt.route, tt.body, a.status, a.body)
		}
	}
	// A load failure has the route's own form.
	pd.d.SetFault("1:load", 0, "")
	params := `"kv_transfer_params":` + pd.prefill(t, "x")
	if a := post(t, pd.d.URL()+core.RouteMessages, `{"model":"sim","messages":[],"max_tokens":1,`+params+`}`); a.status != 500 || !strings.HasPrefix(string(a.body), `{"type":"error","error":{"type":"api_error"`) {
		t.Errorf("messages: %d %s", a.status, a.body)
	}
	a := post(t, pd.d.URL()+core.RouteMessages, `{"model":"sim","messages":[],"max_tokens":1,"stream":true,`+params+`}`)
	if !strings.HasPrefix(string(a.body), "event: message_start\n") || !strings.Contains(string(a.body), "event: error\ndata: {\"type\":\"error\"") || strings.Count(string(a.body), "event:") != 2 {
		t.Errorf("messages stream: %d %s", a.status, a.body)
	}
	// The response was announced before the failure, and has no event for it.
	resp, err := http.Post(pd.d.URL()+core.RouteResponses, "application/json", strings.NewReader(`{"input":"x","stream":true,`+params+`}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if events := strings.Count(string(got), "\n\n"); err == nil || events != 2 || !strings.Contains(string(got), "event: response.in_progress\n") {
		t.Errorf("responses stream: %v %s", err, got)
	}
}

// TestRejectedTokensLeg: the token route has no clean-up.
func TestRejectedTokensLeg(t *testing.T) {
	pd := startPair(t)
	params := pd.prefill(t, words(32, 20))
	a := post(t, pd.d.URL()+core.RouteTokens, `{"token_ids":[65],"sampling_params":{"max_tokens":0,"extra_args":{"kv_transfer_params":`+params+`}}}`)
	if a.status != 400 {
		t.Errorf("post = %d, %s", a.status, a.body)
	}
	pd.d.Close() // no request is running
	if s := pd.p.State(); s.BlocksPinned != 2 {
		t.Errorf("prefill %+v", s)
	}
}

func TestDuplicateIDs(t *testing.T) {
	e := startEngine(t, Config{Hang: core.HangDecode})
	for _, id := range []string{"same", "same", "other"} {
		openStream(t, e.URL()+core.RouteCompletions, completion("x", `"stream":true,"request_id":"`+id+`"`))
	}
	eventually(t, "three running requests", func() bool { return e.State().RequestsRunning == 3 })
	if s := e.State(); s.DuplicateIDs != 1 {
		t.Errorf("state %+v", s)
	}
}
