package openapi

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"
)

// document is an OpenAPI document, and the answers that the test has seen.
type document struct {
	doc    *openapi3.T
	router routers.Router
	seen   map[string]bool // "GET /v1/engines 200"
}

// The library has no decoder for style sheets and for streams of events. A schema of an object describes the data
// of an event; any other schema is a text.
func init() {
	openapi3filter.RegisterBodyDecoder("text/css", openapi3filter.FileBodyDecoder)
	openapi3filter.RegisterBodyDecoder("text/event-stream", func(body io.Reader, _ http.Header, schema *openapi3.SchemaRef, _ openapi3filter.EncodingFn) (any, error) {
		text, err := io.ReadAll(body)
		if err != nil || !schema.Value.Type.Is("object") {
			return string(text), err
		}
		_, data, _ := strings.Cut(string(text), "\ndata: ")
		var value any
		err = json.Unmarshal([]byte(data), &value)
		return value, err
	})
}

// firstEvent reads the first event of a stream.
func firstEvent(r io.Reader) ([]byte, error) {
	var event []byte
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if event = append(event, line...); err != nil || len(line) == 1 && bytes.Contains(event, []byte("data: ")) {
			return event, err
		}
	}
}

func load(t *testing.T, name string) *document {
	t.Helper()
	doc, err := openapi3.NewLoader().LoadFromFile("../../../docs/reference/" + name)
	if err != nil {
		t.Fatal(err)
	}
	if err := doc.Validate(t.Context()); err != nil {
		t.Fatal(err)
	}
	router, err := gorillamux.NewRouter(doc)
	if err != nil {
		t.Fatal(err)
	}
	return &document{doc, router, map[string]bool{}}
}

// call is a request and the status of its answer.
type call struct {
	method, path, body string
	status             int
	header             [2]string // replaces a header; an empty value removes it
	endless            bool      // the answer is a stream of events without an end
}

// check sends a request and validates its answer against the document.
func (d *document) check(t *testing.T, base, token string, c call) {
	t.Helper()
	name := c.method + " " + c.path
	r, err := http.NewRequest(c.method, base+c.path, strings.NewReader(c.body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+token)
	if c.body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	if c.header[0] != "" {
		r.Header.Set(c.header[0], c.header[1])
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	read := io.ReadAll
	if c.endless {
		read = firstEvent
	}
	body, err := read(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != c.status {
		t.Errorf("%s: status %d, want %d: %s", name, resp.StatusCode, c.status, body)
		return
	}
	route, params, err := d.router.FindRoute(r)
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	options := &openapi3filter.Options{IncludeResponseStatus: true, AuthenticationFunc: openapi3filter.NoopAuthenticationFunc}
	err = openapi3filter.ValidateResponse(t.Context(), &openapi3filter.ResponseValidationInput{
		RequestValidationInput: &openapi3filter.RequestValidationInput{Request: r, PathParams: params, Route: route, Options: options},
		Status:                 resp.StatusCode, Header: resp.Header, Body: io.NopCloser(bytes.NewReader(body)), Options: options,
	})
	if err != nil {
		t.Errorf("%s: %v\n%s", name, err, body)
	}
	d.seen[fmt.Sprintf("%s %s %d", route.Method, route.Path, resp.StatusCode)] = true
}

// unseen lists the answers of the document that the test has not seen.
func (d *document) unseen() []string {
	var list []string
	for path, item := range d.doc.Paths.Map() {
		for method, o := range item.Operations() {
			for status := range o.Responses.Map() {
				if name := method + " " + path + " " + status; !d.seen[name] {
					list = append(list, name)
				}
			}
		}
	}
	return list
}

// TestAdmin calls each operation of the admin address, and provokes each of its errors.
func TestAdmin(t *testing.T) {
	d := load(t, "openapi-admin.json")
	single := run(t, "http", "")
	fleet := run(t, "http", "[fleet]\nworkers = 1\n")
	sidecar := run(t, "http", "[sidecar]\nlocal = \"%DECODE%\"\nrole = \"decode\"\nconnector = \"vllm-nixl\"\n")

	id := "a-request-of-the-test"
	load(t, "openapi.json").check(t, single.public, "", call{method: "POST", path: "/v1/completions", status: 200, header: [2]string{"X-Request-Id", id},
		body: `{"model": "sim", "prompt": "Hello there", "max_tokens": 4}`})
	engine := `{"name": "x", "url": "http://127.0.0.1:1", "role": "both", "connector": "none"}`
	for _, c := range []call{
		{method: "GET", path: "/", status: 200},
		{method: "GET", path: "/dashboard/style.css", status: 200},
		{method: "GET", path: "/dashboard/nothing.js", status: 404},
		{method: "GET", path: "/v1/dashboard/events", status: 200, endless: true},
		{method: "GET", path: "/v1/dashboard/part", status: 200},
		{method: "GET", path: "/v1/dashboard/history", status: 200},
		{method: "GET", path: "/v1/dashboard/requests?from=0&to=9e9", status: 200},
		{method: "GET", path: "/v1/dashboard/requests?from=2&to=1", status: 400},
		{method: "GET", path: "/healthz", status: 200},
		{method: "GET", path: "/readyz", status: 200},
		{method: "GET", path: "/metrics", status: 200},
		{method: "GET", path: "/v1/engines", status: 200},
		{method: "POST", path: "/v1/engines", status: 201, body: engine},
		{method: "POST", path: "/v1/engines", status: 400, body: `{"nam": "x"}`},
		{method: "POST", path: "/v1/engines", status: 415, body: engine, header: [2]string{"Content-Type", "text/plain"}},
		{method: "DELETE", path: "/v1/engines/x?drain=0s", status: 202},
		{method: "DELETE", path: "/v1/engines/nobody", status: 404},
		{method: "DELETE", path: "/v1/engines/p0?drain=soon", status: 400},
		{method: "POST", path: "/v1/engines/p0/drain?move=perhaps", status: 400},
		{method: "POST", path: "/v1/engines/nobody/drain", status: 404},
		{method: "POST", path: "/v1/engines/p0/drain?move=true", status: 200},
		{method: "DELETE", path: "/v1/engines/nobody/drain", status: 404},
		{method: "DELETE", path: "/v1/engines/p0/drain", status: 200},
		{method: "GET", path: "/v1/pairs", status: 200},
		{method: "GET", path: "/v1/policies", status: 200},
		{method: "POST", path: "/v1/policies/least_load/reload", status: 200},
		{method: "POST", path: "/v1/policies/nothing/reload", status: 404},
		{method: "GET", path: "/v1/exchanges", status: 200},
		{method: "GET", path: "/v1/explain/" + id, status: 200},
		{method: "GET", path: "/v1/explain/nothing", status: 404},
		{method: "GET", path: "/perf_metrics", status: 200},
		{method: "GET", path: "/v1/sidecar", status: 404},
		{method: "PUT", path: "/v1/sidecar/policies", status: 404, body: `{"policies": []}`},
		{method: "DELETE", path: "/v1/sidecar/policies", status: 404},
		{method: "GET", path: "/v1/workers", status: 404},
		{method: "POST", path: "/v1/drain", status: 200},
		{method: "GET", path: "/readyz", status: 503},
	} {
		d.check(t, single.admin, single.token, c)
	}
	for _, c := range []call{
		{method: "GET", path: "/v1/workers", status: 200},
		{method: "GET", path: "/metrics", status: 200},
		{method: "GET", path: "/v1/engines", status: 200},
		{method: "GET", path: "/v1/policies", status: 200},
		{method: "GET", path: "/v1/exchanges", status: 200},
		{method: "GET", path: "/perf_metrics", status: 200},
		{method: "POST", path: "/v1/policies/least_load/reload", status: 200},
		{method: "POST", path: "/v1/drain", status: 200},
	} {
		d.check(t, fleet.admin, fleet.token, c)
	}
	for _, c := range []call{
		{method: "GET", path: "/v1/sidecar", status: 200},
		{method: "PUT", path: "/v1/sidecar/policies", status: 400, body: `{"policies": ["nothing"]}`},
		{method: "PUT", path: "/v1/sidecar/policies", status: 415, body: `{"policies": []}`, header: [2]string{"Content-Type", "text/plain"}},
		{method: "DELETE", path: "/v1/sidecar/policies", status: 200},
	} {
		d.check(t, sidecar.admin, sidecar.token, c)
	}
	d.guarded(t, single)
	for _, answer := range d.unseen() {
		switch answer {
		case "POST /v1/policies/{name}/reload 409", // a plugin whose new version fails
			"POST /v1/policies/{name}/reload 504", "POST /v1/drain 504", // a worker that hangs
			"PUT /v1/sidecar/policies 200": // the order depends on the set-up
		default:
			t.Errorf("%s is in the document, and the test has not seen it", answer)
		}
	}
}

// guarded sends requests of web pages and requests without a token to each operation.
func (d *document) guarded(t *testing.T, p proxy) {
	t.Helper()
	for path, item := range d.doc.Paths.Map() {
		for method, o := range item.Operations() {
			for _, status := range []int{401, 403} {
				if o.Responses.Value(strconv.Itoa(status)) == nil {
					continue
				}
				c := call{method: method, path: strings.NewReplacer("{name}", "x", "{id}", "x", "{file}", "style.css").Replace(path), status: status, header: [2]string{"Authorization", "Bearer wrong"}}
				if status == 403 {
					c.header = [2]string{"Origin", "http://page.example.com"}
				}
				d.check(t, p.admin, p.token, c)
			}
		}
	}
}

// TestPublic calls each operation of the public address with good and bad bodies.
func TestPublic(t *testing.T) {
	d := load(t, "openapi.json")
	p := run(t, "http", "")
	for _, c := range []call{
		{method: "GET", path: "/v1/models", status: 200},
		{method: "GET", path: "/v1/models/sim", status: 200},
		{method: "GET", path: "/v1/models/nothing", status: 404},
		{method: "GET", path: "/health", status: 200},
		{method: "GET", path: "/version", status: 200},
		{method: "POST", path: "/v1/completions", status: 200, body: `{"prompt": "Hello", "max_tokens": 2}`},
		{method: "POST", path: "/v1/completions", status: 200, body: `{"prompt": "Hello", "max_tokens": 2, "stream": true}`},
		{method: "POST", path: "/v1/chat/completions", status: 200, body: `{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}`},
		{method: "POST", path: "/v1/chat/completions", status: 400, body: `{"messages": []}`},
		{method: "POST", path: "/v1/chat/completions", status: 400, body: `{"messages": true, "messages": 1}`},
		{method: "POST", path: "/v1/chat/completions", status: 404, body: `{"model": "nothing", "messages": [{"role": "user", "content": "Hello"}]}`},
		{method: "POST", path: "/v1/chat/completions", status: 415, body: `{}`, header: [2]string{"Content-Encoding", "br"}},
		{method: "POST", path: "/v1/chat/completions", status: 400, body: `{}`, header: [2]string{"Content-Encoding", "gzip"}},
		{method: "POST", path: "/v1/messages", status: 400, body: `{"messages": 1}`},
		{method: "POST", path: "/v1/responses", status: 400, body: `{"input": 1}`},
		{method: "POST", path: "/generate", status: 501, body: `{"text": "Hello"}`},
		{method: "POST", path: "/inference/v1/generate", status: 400, body: `{"token_ids": "x"}`},
		{method: "POST", path: "/v1/embeddings", status: 400, body: `{"input": []}`},
		{method: "POST", path: "/tokenize", status: 200, body: `{"prompt": "Hello"}`},
		{method: "POST", path: "/detokenize", status: 400, body: `{"tokens": []}`},
	} {
		d.check(t, p.public, "", c)
	}
}
