package websocket

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
)

// TestAppendError: each form of an error becomes OpenAI's message, whose code is a text.
func TestAppendError(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		header     http.Header
		want       string
	}{
		{"proxy", `{"error":{"message":"m","type":"t","param":"p","code":"c"}}`, nil, `{"type":"error","status":400,"error":{"code":"c","message":"m","param":"p","type":"t"}}`},
		{"vLLM", `{"error":{"message":"m","type":"BadRequestError","param":null,"code":400}}`, nil, `{"type":"error","status":400,"error":{"code":"400","message":"m","param":null,"type":"BadRequestError"}}`},
		{"SGLang", `{"object":"error","message":"m","type":"BadRequest","param":null,"code":400}`, nil, `{"type":"error","status":400,"error":{"code":"400","message":"m","param":null,"type":"BadRequest"}}`},
		{"event", `{"type":"error","code":"stream_broken","message":"m","param":null}`, nil, `{"type":"error","status":400,"error":{"code":"stream_broken","message":"m","param":null,"type":"invalid_request_error"}}`},
		{"a text", "denied by \"x\"\n", nil, `{"type":"error","status":400,"error":{"code":null,"message":"denied by \"x\"","param":null,"type":"invalid_request_error"}}`},
		{"no text", "\xff", nil, `{"type":"error","status":400,"error":{"code":null,"message":"Bad Request","param":null,"type":"invalid_request_error"}}`},
		{"a page", "<html>no</html>", nil, `{"type":"error","status":400,"error":{"code":null,"message":"Bad Request","param":null,"type":"invalid_request_error"}}`},
		{"a text in JSON", `{"error":"no"}`, nil, `{"type":"error","status":400,"error":{"code":null,"message":"no","param":null,"type":"invalid_request_error"}}`},
		{"nothing", ``, nil, `{"type":"error","status":400,"error":{"code":null,"message":"Bad Request","param":null,"type":"invalid_request_error"}}`},
		{"a text for the object", `{"error":"no","message":"m"}`, nil, `{"type":"error","status":400,"error":{"code":null,"message":"m","param":null,"type":"invalid_request_error"}}`},
		{"null", `{"error":null}`, nil, `{"type":"error","status":400,"error":{"code":null,"message":"Bad Request","param":null,"type":"invalid_request_error"}}`},
		{"lines", ``, http.Header{"Retry-After": {"1"}, "X-Request-Id": {"\"r\""}, "X-Other": {"o"}}, `{"type":"error","status":400,"error":{"code":null,"message":"Bad Request","param":null,"type":"invalid_request_error"},"headers":{"retry-after":"1","x-request-id":"\"r\""}}`},
	} {
		if got := string(appendError(nil, 400, tt.header, []byte(tt.body))); got != tt.want || !json.Valid([]byte(got)) {
			t.Errorf("%s: got %s, want %s", tt.name, got, tt.want)
		}
	}
}

// TestErrorTypes: an error without a type has that of its status.
func TestErrorTypes(t *testing.T) {
	for status, want := range map[int]string{400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "invalid_request_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"} {
		if got := string(appendError(nil, status, nil, []byte("denied"))); !strings.Contains(got, `"message":"denied","param":null,"type":"`+want+`"`) {
			t.Errorf("%d: %s", status, got)
		}
	}
}

func TestStatusOf(t *testing.T) {
	for data, want := range map[string]int{
		`{"error":{"code":429}}`: 429, `{"type":"error","code":503}`: 503, `{"status":400,"code":503}`: 400,
		`{"code":"stream_broken"}`: 502, `{"code":200}`: 502, `{}`: 502, `no`: 502,
	} {
		if got := statusOf([]byte(data)); got != want {
			t.Errorf("%s: got %d, want %d", data, got, want)
		}
	}
}

// FuzzAppendError: the message is valid JSON for each answer of an engine.
func FuzzAppendError(f *testing.F) {
	f.Add([]byte(`{"error":{"message":"m","type":"error","param":[1],"code":{"a":1}}}`))
	f.Add([]byte(`{"code":1e400}`))
	f.Add([]byte(`[]`))
	f.Fuzz(func(t *testing.T, body []byte) {
		got := appendError(nil, statusOf(body), nil, body)
		var m struct {
			Type   string
			Status int
			Error  struct{ Code *string }
		}
		if err := json.Unmarshal(got, &m); err != nil || m.Type != "error" || m.Status < 400 {
			t.Errorf("got %s: %v", got, err)
		}
	})
}
