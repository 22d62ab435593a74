package docs

import (
	"encoding/json"
	"go/ast"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

type object = map[string]any

// route is an operation of an OpenAPI document.
type route struct {
	method, path, summary string
	ok                    int    // the status of success
	body                  object // schema of the request body; nil: none
	text                  bool   // the answer is text
}

var anyObject = object{"type": "object", "additionalProperties": true}

// generation is the schema of the bodies of an API. The proxy reads only these fields and
// passes all others to the engine.
func generation(needed string, fields object) object {
	fields["model"] = object{"type": "string", "description": "Optional if the engines serve one model."}
	schema := object{"type": "object", "properties": fields, "additionalProperties": true}
	if needed != "" {
		schema["required"] = []string{needed}
	}
	return schema
}

var (
	stream    = object{"type": "boolean", "description": "true: the answer is a stream of events."}
	maxTokens = object{"type": "integer", "minimum": 0}
	samples   = object{"type": "integer", "minimum": 1}
)

// publicRoutes are the routes of the public address, except those of package openai.
var publicRoutes = []route{
	{method: "get", path: "/v1/models", summary: "The models of all ready engines", ok: 200},
	{method: "get", path: "/v1/models/{model}", summary: "One model", ok: 200},
	{method: "get", path: "/health", summary: "200 if the proxy can serve a request now", ok: 200},
	{method: "get", path: "/version", summary: "The version of the proxy", ok: 200},
}

// engineRoutes are the routes of package openai, which carry a body to an engine.
var engineRoutes = map[openai.API]route{
	openai.Completions:  {summary: "Complete a text", body: generation("prompt", object{"prompt": object{}, "max_tokens": maxTokens, "n": samples, "stream": stream})},
	openai.Chat:         {summary: "Answer a chat", body: generation("messages", object{"messages": object{"type": "array"}, "max_tokens": maxTokens, "max_completion_tokens": maxTokens, "n": samples, "stream": stream})},
	openai.Responses:    {summary: "Create a response", body: generation("input", object{"input": object{}, "max_output_tokens": maxTokens, "stream": stream})},
	openai.Messages:     {summary: "Create a message, as Anthropic's API", body: generation("messages", object{"messages": object{"type": "array"}, "max_tokens": maxTokens, "stream": stream})},
	openai.Generate:     {summary: "Generate, as SGLang's own API", body: generation("", object{"text": object{}, "input_ids": object{}, "sampling_params": object{}, "stream": stream})},
	openai.VLLMGenerate: {summary: "Generate from token ids, as vLLM's own API", body: generation("token_ids", object{"token_ids": object{"type": "array"}, "sampling_params": anyObject, "stream": stream})},
	openai.Embeddings:   {summary: "Compute embeddings", body: generation("input", object{"input": object{}})},
	openai.Tokenize:     {summary: "Convert text to token ids", body: generation("", object{"prompt": object{"type": "string"}})},
	openai.Detokenize:   {summary: "Convert token ids to text", body: generation("", object{"tokens": object{"type": "array"}})},
}

// adminRoutes describes each route of proxy/admin.
var adminRoutes = []route{
	{method: "get", path: "/healthz", summary: "200 while the process runs; needs no token", ok: 200},
	{method: "get", path: "/readyz", summary: "200 if the proxy can serve a request now; needs no token", ok: 200},
	{method: "get", path: "/metrics", summary: "Metrics in the format of Prometheus", ok: 200, text: true},
	{method: "get", path: "/", summary: "The list of the endpoints; for a client that accepts text/html, the dashboard (needs no token)", ok: 200},
	{method: "get", path: "/dashboard/{file}", summary: "A part of the dashboard; needs no token", ok: 200, text: true},
	{method: "get", path: "/v1/dashboard/events", summary: "A snapshot of what the dashboard shows, each second, as server-sent events of the name snapshot; the data is JSON", ok: 200, text: true},
	{method: "get", path: "/v1/dashboard/part", summary: "What this process alone contributes to a snapshot; query after: PROCESS.NEXT of an earlier answer, to get only what is new", ok: 200},
	{method: "get", path: "/v1/engines", summary: "Engines with their state, load and facts", ok: 200},
	{method: "post", path: "/v1/engines", summary: "Add an engine; the body has the keys of [[engine]]", ok: 201, body: anyObject},
	{method: "delete", path: "/v1/engines/{name}", summary: "Drain and remove an engine; query drain: a duration", ok: 202},
	{method: "get", path: "/v1/pairs", summary: "Pairs of engines with their state", ok: 200},
	{method: "get", path: "/v1/policies", summary: "Policies and filters with calls, failures and times", ok: 200},
	{method: "post", path: "/v1/policies/{name}/reload", summary: "Load a policy or filter again", ok: 200},
	{method: "get", path: "/v1/exchanges", summary: "The requests that run now, the oldest first", ok: 200},
	{method: "get", path: "/v1/explain/{id}", summary: "The record of one request that has ended", ok: 200},
	{method: "get", path: "/perf_metrics", summary: "The times of the requests that have ended", ok: 200},
	{method: "post", path: "/v1/drain", summary: "Drain the proxy", ok: 200},
	{method: "get", path: "/v1/sidecar", summary: "The coordination policies of a sidecar", ok: 200},
	{method: "put", path: "/v1/sidecar/policies", summary: "Change the order of the coordination policies", ok: 200,
		body: object{"type": "object", "required": []string{"policies"}, "properties": object{"policies": object{"type": "array", "items": object{"type": "string"}}}}},
	{method: "delete", path: "/v1/sidecar/policies", summary: "Use the configured order again", ok: 200},
	{method: "get", path: "/v1/workers", summary: "The workers of a coordinator", ok: 200},
}

func publicAPI(t testing.TB) string {
	routes := slices.Clone(publicRoutes)
	for api := openai.Completions; api.Path() != ""; api++ {
		r, ok := engineRoutes[api]
		if !ok {
			t.Errorf("no description of %s", api.Path())
		}
		r.method, r.path, r.ok = "post", api.Path(), 200
		routes = append(routes, r)
	}
	return document("pdproxy: public API", "An API key, if server.auth.keys_file is set.", routes, publicCodes)
}

func adminAPI(testing.TB) string {
	return document("pdproxy: admin API", "The token of the admin address.", adminRoutes, adminCodes)
}

// document returns an OpenAPI document. All operations may answer with the errors of codes.
func document(title, auth string, routes []route, codes []errorCode) string {
	errors := object{}
	var names []string
	byStatus := map[int][]string{}
	for _, c := range codes {
		names = append(names, c.code)
		for _, s := range c.statuses {
			byStatus[s] = append(byStatus[s], c.code)
		}
	}
	for status, list := range byStatus {
		errors["E"+strconv.Itoa(status)] = object{
			"description": "Codes: " + strings.Join(list, ", "),
			"content":     object{"application/json": object{"schema": object{"$ref": "#/components/schemas/Error"}}},
		}
	}
	paths := object{}
	for _, r := range routes {
		answer := object{"description": "Success"}
		switch {
		case r.text:
			answer["content"] = object{"text/plain": object{"schema": object{"type": "string"}}}
		case r.body != nil && r.body["properties"] != nil && r.body["properties"].(object)["stream"] != nil:
			answer["content"] = object{"application/json": object{"schema": anyObject}, "text/event-stream": object{"schema": object{"type": "string"}}}
		default:
			answer["content"] = object{"application/json": object{"schema": object{}}}
		}
		responses := object{strconv.Itoa(r.ok): answer}
		for status := range byStatus {
			responses[strconv.Itoa(status)] = object{"$ref": "#/components/responses/E" + strconv.Itoa(status)}
		}
		operation := object{"summary": r.summary, "operationId": operationID(r), "responses": responses}
		if r.body != nil {
			operation["requestBody"] = object{"required": true, "content": object{"application/json": object{"schema": r.body}}}
		}
		if i := strings.IndexByte(r.path, '{'); i >= 0 {
			name := r.path[i+1 : strings.IndexByte(r.path, '}')]
			operation["parameters"] = []any{object{"name": name, "in": "path", "required": true, "schema": object{"type": "string"}}}
		}
		if r.method == "delete" && strings.HasPrefix(r.path, "/v1/engines") {
			operation["parameters"] = append(operation["parameters"].([]any), object{"name": "drain", "in": "query", "schema": object{"type": "string", "default": "60s"}})
		}
		item, ok := paths[r.path].(object)
		if !ok {
			item = object{}
			paths[r.path] = item
		}
		item[r.method] = operation
	}
	text := object{"type": "string"}
	orNull := object{"type": []string{"string", "null"}}
	doc := object{
		"openapi":  "3.1.0",
		"info":     object{"title": title, "version": "1", "license": object{"name": "Apache-2.0", "identifier": "Apache-2.0"}},
		"paths":    paths,
		"security": []any{object{}, object{"bearer": []string{}}},
		"components": object{
			"responses":       errors,
			"securitySchemes": object{"bearer": object{"type": "http", "scheme": "bearer", "description": auth}},
			"schemas": object{"Error": object{"type": "object", "required": []string{"error"}, "properties": object{
				"error": object{"type": "object", "required": []string{"message", "type", "param", "code"}, "properties": object{
					"message": text, "type": text, "param": orNull,
					"code": object{"type": []string{"string", "null"}, "description": "An engine's own errors may have other codes.", "examples": names},
				}},
			}}},
		},
	}
	out, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		panic(err) // the document has only maps, lists and texts
	}
	return string(out) + "\n"
}

func operationID(r route) string {
	return r.method + strings.Map(func(c rune) rune {
		switch c {
		case '{', '}':
			return -1
		case '/', '.':
			return '_'
		}
		return c
	}, r.path)
}

// TestEveryAdminRouteIsListed compares the routes of proxy/admin with the document.
func TestEveryAdminRouteIsListed(t *testing.T) {
	found := map[string]bool{}
	paths := map[string]string{}
	for _, file := range parseDir(t, root+"/proxy/admin") {
		ast.Inspect(file, func(n ast.Node) bool {
			if v, ok := n.(*ast.ValueSpec); ok {
				for i := range v.Values {
					paths[v.Names[i].Name] = literal(v.Values[i])
				}
			}
			return true
		})
	}
	for _, file := range parseDir(t, root+"/proxy/admin") {
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) != 2 || !slices.Contains([]string{"Handle", "HandleFunc"}, nameOf(call.Fun)) {
				return true
			}
			pattern := literal(call.Args[0])
			if sum, ok := call.Args[0].(*ast.BinaryExpr); ok {
				pattern = literal(sum.X) + paths[nameOf(sum.Y)]
			}
			found[strings.TrimSuffix(pattern, "{$}")] = true
			return true
		})
	}
	if len(found) < 15 {
		t.Fatalf("found only %d routes", len(found))
	}
	for _, r := range adminRoutes {
		pattern := strings.ToUpper(r.method) + " " + r.path
		if !found[pattern] {
			t.Errorf("%s is listed, but the admin address does not have it", pattern)
		}
		delete(found, pattern)
	}
	for pattern := range found {
		t.Errorf("%s is not listed", pattern)
	}
}
