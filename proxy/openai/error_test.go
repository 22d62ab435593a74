package openai

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestErrorJSON(t *testing.T) {
	for _, tt := range []struct {
		e    Error
		want string
	}{
		{Error{Status: 400, Code: CodeInvalidType, Param: "n", Message: `'n' must be "an integer".`},
			`{"error":{"message":"'n' must be \"an integer\".","type":"invalid_request_error","param":"n","code":"invalid_type"}}`},
		{Error{Status: 503, Message: "no engine\n\u00e9\x01\xff"},
			`{"error":{"message":"no engine\né\u0001` + "\ufffd" + `","type":"server_error","param":null,"code":null}}`},
		{Error{Status: 404, Type: "not_found", Code: CodeModelNotFound}, `{"error":{"message":"","type":"not_found","param":null,"code":"model_not_found"}}`},
		{Error{Status: 401}, `{"error":{"message":"","type":"authentication_error","param":null,"code":null}}`},
		{Error{Status: 403}, `{"error":{"message":"","type":"permission_error","param":null,"code":null}}`},
		{Error{Status: 429}, `{"error":{"message":"","type":"rate_limit_error","param":null,"code":null}}`},
	} {
		got := string(tt.e.AppendJSON(nil))
		if got != tt.want {
			t.Errorf("got  %s\nwant %s", got, tt.want)
		}
		if !json.Valid([]byte(got)) {
			t.Errorf("no JSON: %s", got)
		}
	}
}

func TestErrorOfAnAPI(t *testing.T) {
	e := &Error{Status: 503, Message: "m"}
	plain := string(e.AppendJSON(nil))
	for api, want := range map[API]string{
		0: plain, Chat: plain, Responses: plain, VLLMGenerate: plain,
		Messages: `{"type":"error",` + plain[1:], CountTokens: `{"type":"error",` + plain[1:],
	} {
		if got := string(api.AppendError([]byte("> "), e)); got != "> "+want {
			t.Errorf(`%v: string(api.AppendError([]byte("> "), e)) = %s, want %s`, api, got, "> "+want)
		}
	}
}

// Log lines must not contain text of a client.
func TestErrorHidesBodies(t *testing.T) {
	e := &Error{Status: 502, Code: CodeLegFailed, Param: "secret key", Message: "secret prompt"}
	if got := e.Error(); got != "status 502: leg_failed" {
		t.Error(got)
	}
	if got := (&Error{Status: 429, Message: "secret"}).Error(); got != "status 429: rate_limit_error" {
		t.Error(got)
	}
	var o Object
	err := o.Parse([]byte(`{"secret key":"secret` + "\x01" + `"}`))
	if strings.Contains(err.Error(), "secret") || strings.Contains(err.(*Error).Message, "secret") {
		t.Error(err)
	}
}

func TestAppendErrorEvent(t *testing.T) {
	e := &Error{Status: 502, Type: "server_error", Code: CodeLegFailed, Message: "decode d0 broke off"}
	plain := `data: {"error":{"message":"decode d0 broke off","type":"server_error","param":null,"code":"leg_failed"}}` + "\n\n"
	for api, want := range map[API]string{
		Chat:         plain,
		Completions:  plain,
		Generate:     plain,
		VLLMGenerate: plain,
		Messages:     "event: error\n" + `data: {"type":"error","error":{"type":"server_error","message":"decode d0 broke off"}}` + "\n\n",
		Responses:    "event: error\n" + `data: {"type":"error","sequence_number":7,"code":"leg_failed","message":"decode d0 broke off","param":null,"error":{"type":"server_error","code":"leg_failed","message":"decode d0 broke off","param":null}}` + "\n\n",
	} {
		got := string(api.AppendErrorEvent([]byte("> "), e, 7))
		if got != "> "+want {
			t.Errorf("%v: got %s", api, got)
		}
		// The scanner of this package must recognize the text as an error.
		var s EventScanner
		s.Feed([]byte(got[2:]))
		if !s.Failed || s.Done || s.Events != 1 {
			t.Errorf("%v: scanned as %+v", api, s)
		}
		if h := headOf(api, got[2:]); h.Verdict != ErrorEvent || h.End != len(want) {
			t.Errorf("%v: judged as %+v", api, h)
		}
	}
	if got := string(AppendErrorEvent(nil, e)); got != plain {
		t.Error(got)
	}
	if got := string(AppendDone([]byte("> "))); got != "> data: [DONE]\n\n" {
		t.Error(got)
	}
}

// A body's buffer returns to the pool before its error is answered and logged.
func TestWithNotContinued(t *testing.T) {
	for events, want := range map[string]string{
		"data: {\"error\":{\"message\":\"no\",\"code\":500}}\n\ndata: [DONE]\n\n": "data: {\"error\":{\"not_continued\":\"seam\",\"message\":\"no\",\"code\":500}}\n\ndata: [DONE]\n\n",
		"event: error\ndata: {\"error\": {\"message\": \"no\"}, \"id\": 7}\n\n":   "event: error\ndata: {\"error\": {\"not_continued\":\"seam\",\"message\": \"no\"}, \"id\": 7}\n\n",
		"data: {\"error\":{}}\n\n":                            "data: {\"error\":{\"not_continued\":\"seam\"}}\n\n",
		"data: {\"object\":\"error\",\"message\":\"no\"}\n\n": "data: {\"object\":\"error\",\"message\":\"no\"}\n\n",
		"data: {\"error\":\"no\"}\n\n":                        "data: {\"error\":\"no\"}\n\n",
		"data: {\"error\":{\n\n":                              "data: {\"error\":{\n\n",
		": x\n\n":                                             ": x\n\n",
		"":                                                    "",
	} {
		if got := string(WithNotContinued([]byte(events), "seam")); got != want {
			t.Errorf("%q: got  %q\nwant %q", events, got, want)
		}
		if got := string(WithNotContinued([]byte(events), "")); got != events {
			t.Errorf("without a reason: %q", got)
		}
	}
}

func TestErrorOutlivesBody(t *testing.T) {
	for _, text := range []string{`{"messages":[{}],"n":0}`, `{"prompt":[]}`, `{"n":1,"n":1}`, `{"n":tru}`, `{"max_tokens":1.5}`} {
		body := []byte(text)
		var r Request
		api := Chat
		if strings.Contains(text, "prompt") {
			api = Completions
		}
		err := ParseRequest(api, body, &r)
		before := string(err.(*Error).AppendJSON(nil))
		clear(body)
		if after := string(err.(*Error).AppendJSON(nil)); after != before {
			t.Errorf("%s became %s", before, after)
		}
	}
}
