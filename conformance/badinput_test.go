package conformance

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// doors are the routes that take a JSON object, each with a valid request.
var doors = map[string]string{
	"/v1/chat/completions":      `{"model":"sim","max_tokens":2,"messages":[{"role":"user","content":"hi"}]}`,
	"/v1/completions":           `{"model":"sim","max_tokens":2,"prompt":"hi"}`,
	"/v1/responses":             `{"model":"sim","max_output_tokens":2,"input":"hi"}`,
	"/v1/messages":              `{"model":"sim","max_tokens":2,"messages":[{"role":"user","content":"hi"}]}`,
	"/v1/messages/count_tokens": `{"model":"sim","messages":[{"role":"user","content":"hi"}]}`,
	"/v1/embeddings":            `{"model":"sim","input":"hi"}`,
	"/rerank":                   `{"model":"sim","query":"q","documents":["a","b"]}`,
	"/v1/rerank":                `{"model":"sim","query":"q","documents":["a","b"]}`,
	"/v2/rerank":                `{"model":"sim","query":"q","documents":["a","b"]}`,
	"/score":                    `{"model":"sim","text_1":"q","text_2":["a"]}`,
	"/v1/score":                 `{"model":"sim","text_1":"q","text_2":["a"]}`,
	"/classify":                 `{"model":"sim","input":"hi"}`,
	"/pooling":                  `{"model":"sim","input":"hi"}`,
	"/v1/audio/speech":          `{"model":"sim","voice":"alloy","input":"hi"}`,
	"/v1/images/generations":    `{"model":"sim","prompt":"hi"}`,
	"/tokenize":                 `{"model":"sim","prompt":"hi"}`,
	"/detokenize":               `{"model":"sim","tokens":[1,2]}`,
	"/inference/v1/generate":    `{"model":"sim","token_ids":[1,2],"sampling_params":{"max_tokens":2}}`,
	"/generative_scoring":       `{"model":"sim","query":"q","items":["a"],"label_token_ids":[1,2]}`,
}

// badInput is an input that the proxy refuses at each door, before an engine sees the request.
type badInput struct {
	name   string
	body   func(good string) string
	header []string
	status int
	code   string
	param  string // "" stands for null
}

func always(body string) func(string) string { return func(string) string { return body } }

// added returns the valid request with members at its end.
func added(members string) func(string) string {
	return func(good string) string { return strings.TrimSuffix(good, "}") + "," + members + "}" }
}

func renamed(model string) func(string) string {
	return func(good string) string { return strings.Replace(good, `"sim"`, model, 1) }
}

func gzipped(body string) string {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	fmt.Fprint(w, body)
	w.Close()
	return b.String()
}

func same(good string) string { return good }

// bomb is a body of 32 MiB, above server.max_body, and of a few kB compressed.
var bomb = `{"model":"sim","x":"` + strings.Repeat("a", 32<<20) + `"}`

var badInputs = []badInput{
	{"empty", always(""), nil, 400, "invalid_json", ""},
	{"null", always("null"), nil, 400, "invalid_json", ""},
	{"list", always("[]"), nil, 400, "invalid_json", ""},
	{"text", always(`"x"`), nil, 400, "invalid_json", ""},
	{"open object", always("{"), nil, 400, "invalid_json", ""},
	{"two objects", func(good string) string { return good + good }, nil, 400, "invalid_json", ""},
	{"byte order mark", func(good string) string { return "\ufeff" + good }, nil, 400, "invalid_json", ""},
	{"form", always("model=sim"), []string{"Content-Type", "application/x-www-form-urlencoded"}, 415, "unsupported_media_type", "Content-Type"},
	{"model of another type", renamed("7"), nil, 400, "invalid_type", "model"},
	{"list as model", renamed("[]"), nil, 400, "invalid_type", "model"},
	{"unknown model", renamed(`"nobody"`), nil, 404, "model_not_found", "model"},
	{"long model", renamed(`"` + strings.Repeat("x", 5000) + `"`), nil, 400, "string_above_max_length", "model"},
	{"model twice", added(`"model":"sim"`), nil, 400, "duplicate_key", "model"},
	{"model twice, escaped", added(`"mod\u0065l":"sim"`), nil, 400, "duplicate_key", "model"},
	{"nested key twice", added(`"user":{"a":1,"a":2}`), nil, 400, "duplicate_key", "user"},
	{"no UTF-8", added("\"user\":\"\xff\xfe\""), nil, 400, "invalid_json", "user"},
	{"half a surrogate pair", added(`"user":"\ud800"`), nil, 400, "invalid_json", "user"},
	{"NaN", added(`"temperature":NaN`), nil, 400, "invalid_json", "temperature"},
	{"deep", added(`"user":` + strings.Repeat("[", 20000) + strings.Repeat("]", 20000)), nil, 400, "invalid_json", "user"},
	{"stream of another type", added(`"stream":"yes"`), nil, 400, "invalid_type", "stream"},
	{"reserved name", added(`"KV_Transfer_Params":{}`), nil, 400, "invalid_name", "KV_Transfer_Params"},
	{"no gzip", same, []string{"Content-Encoding", "gzip"}, 400, "bad_content_encoding", "Content-Encoding"},
	{"no zstd", same, []string{"Content-Encoding", "zstd"}, 400, "bad_content_encoding", "Content-Encoding"},
	{"cut gzip", func(good string) string { z := gzipped(good); return z[:len(z)-5] }, []string{"Content-Encoding", "gzip"}, 400, "bad_content_encoding", "Content-Encoding"},
	{"bytes after gzip", func(good string) string { return gzipped(good) + "xx" }, []string{"Content-Encoding", "gzip"}, 400, "bad_content_encoding", "Content-Encoding"},
	{"unknown coding", same, []string{"Content-Encoding", "br"}, 415, "unsupported_content_encoding", "Content-Encoding"},
	{"two codings", same, []string{"Content-Encoding", "gzip, gzip"}, 415, "unsupported_content_encoding", "Content-Encoding"},
	{"gzip bomb", func() func(string) string { z := gzipped(bomb); return always(z) }(), []string{"Content-Encoding", "gzip"}, 413, "body_too_large", ""},
	{"zstd bomb", func() func(string) string {
		w, _ := zstd.NewWriter(nil)
		z := string(w.EncodeAll([]byte(bomb), nil))
		return always(z)
	}(), []string{"Content-Encoding", "zstd"}, 413, "body_too_large", ""},
}

// refusedAs asserts an error in the form of the API, with a message and the request id.
func refusedAs(t *testing.T, path string, got answer, status int, code, param string) {
	t.Helper()
	var body struct {
		Type  string
		Error struct {
			Message, Type, Code string
			Param               *string
		}
	}
	err := json.Unmarshal([]byte(got.body), &body)
	field := ""
	if body.Error.Param != nil {
		field = *body.Error.Param
	}
	anthropic := strings.HasPrefix(path, "/v1/messages")
	if err != nil || got.err != nil || got.status != status || body.Error.Code != code || field != param || body.Error.Message == "" || body.Error.Type == "" ||
		(body.Type == "error") != anthropic || got.header.Get("X-Request-Id") == "" {
		t.Errorf("got status %d, err %v: %.300s, want %d %s of %q", got.status, got.err, got.body, status, code, param)
	}
}

// TestBadInputAtEachDoor: each door refuses each bad input with a clear error, and no engine sees
// such a request. The same connection serves a valid request afterwards.
func TestBadInputAtEachDoor(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{config: func(c *config.Config) {
		c.Server.EngineRoutes = []string{"/generative_scoring"}
	}})
	requests := func() (n int64) {
		for _, e := range f.engines() {
			s := e.State()
			n += s.Requests + s.Rejected
		}
		return n
	}
	for path, good := range doors {
		t.Run(path, func(t *testing.T) {
			before := requests()
			for _, in := range badInputs {
				t.Run(in.name, func(t *testing.T) {
					refusedAs(t, path, f.post(t.Context(), f.url, path, in.body(good), in.header...), in.status, in.code, in.param)
				})
			}
			for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodDelete} {
				if got := f.call(method, path); got.status != 405 || got.header.Get("Allow") != "POST" {
					t.Errorf("%s: got status %d: %s", method, got.status, got.body)
				}
			}
			if n := requests() - before; n != 0 {
				t.Errorf("engines got %d requests", n)
			}
			for _, p := range []string{path, path + "/"} {
				if got := f.post(t.Context(), f.url, p, gzipped(good), "Content-Encoding", "gzip"); got.status != 200 {
					t.Errorf("%s: a valid request got status %d: %s", p, got.status, got.body)
				}
			}
		})
	}
	f.settled()
}

// TestFieldsOfOtherTypes: a required field that is absent or of another type is an error of the
// proxy or of the engine, never a failure of an engine.
func TestFieldsOfOtherTypes(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{config: func(c *config.Config) {
		c.Server.EngineRoutes = []string{"/generative_scoring"}
	}})
	for path, good := range doors {
		t.Run(path, func(t *testing.T) {
			var members map[string]json.RawMessage
			if err := json.Unmarshal([]byte(good), &members); err != nil {
				t.Fatal(err)
			}
			for name := range members {
				for _, value := range []string{"", `7`, `-1`, `1.5`, `true`, `{}`, `[[]]`, `[null]`, `100000000000000000000000`, `1e400`} {
					changed := map[string]json.RawMessage{}
					for k, v := range members {
						if k != name {
							changed[k] = v
						} else if value != "" {
							changed[k] = json.RawMessage(value)
						}
					}
					body, _ := json.Marshal(changed)
					if got := f.try(path, string(body)); got.status != 200 && (got.status/100 != 4 || !strings.Contains(got.body, `"error":{`)) || got.err != nil {
						t.Errorf("%s: got status %d, err %v: %s", body, got.status, got.err, got.body)
					}
				}
			}
		})
	}
	if n := f.metric("pdproxy_retries_total"); n != 0 {
		t.Errorf("got %v retries", n)
	}
	f.settled()
}
