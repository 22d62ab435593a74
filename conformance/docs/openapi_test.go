package docs

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

type object = map[string]any

// route is an operation of an OpenAPI document.
type route struct {
	method, path, summary string
	ok                    int           // the status of success
	body                  object        // schema of the request body; nil: none
	schema                object        // of the answer
	answer                object        // the whole answer, where schema does not describe it
	others                object        // other answers without an error code, by status
	codes                 []openai.Code // errors of this operation
	errors                string        // schema of errors; empty: Error
	open                  bool          // needs no token
	form                  bool          // the body may be a form
	upstream, reference   string        // product and page that describe the bodies of the API
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
	{method: "get", path: "/v1/models", summary: "The models of all ready engines", ok: 200, codes: slices.Concat(filtered, keyed),
		schema: object{"type": "object", "required": []string{"object", "data"}, "properties": object{"object": object{"const": "list"}, "data": object{"type": "array", "items": modelSchema}}}},
	{method: "get", path: "/v1/models/{model}", summary: "One model", ok: 200, schema: modelSchema, codes: slices.Concat(filtered, keyed, []openai.Code{openai.CodeModelNotFound})},
	{method: "get", path: "/v1/responses/{response_id}", summary: "A response that an engine stores", ok: 200, schema: anyObject, codes: stored, upstream: "OpenAI", reference: openAIResponses + "get"},
	{method: "delete", path: "/v1/responses/{response_id}", summary: "Delete a response that an engine stores", ok: 200, schema: anyObject, codes: append(slices.Clone(stored), openai.CodeNotImplemented), upstream: "OpenAI", reference: openAIResponses + "delete"},
	{method: "post", path: "/v1/responses/{response_id}/cancel", summary: "Cancel a response that an engine computes in the background", ok: 200, schema: anyObject, codes: append(slices.Clone(stored), openai.CodeNotImplemented), upstream: "OpenAI", reference: openAIResponses + "cancel"},
	{method: "get", path: "/health", summary: "200 if the proxy can serve a request now", ok: 200, schema: statusSchema, codes: []openai.Code{openai.CodeNoTarget}},
	{method: "get", path: "/version", summary: "The version of the proxy", ok: 200, codes: filtered,
		schema: object{"type": "object", "required": []string{"version"}, "properties": object{"version": text}}},
}

var (
	modelSchema = object{"type": "object", "required": []string{"id", "object", "created", "owned_by"}, "properties": object{
		"id": text, "object": object{"const": "model"}, "created": object{"type": "integer"}, "owned_by": text, "root": text, "parent": text,
		"max_model_len": object{"type": "integer", "description": "Limit of prompt and answer together, in tokens: the smallest of the engines that serve the model."},
	}}
	statusSchema = object{"type": "object", "required": []string{"status"}, "properties": object{"status": text}}
	nameSchema   = object{"type": "object", "required": []string{"name"}, "properties": object{"name": text, "state": text}}
)

// engineRoutes are the routes of package openai, which carry a body to an engine.
var engineRoutes = map[openai.API]route{
	openai.Completions:      {upstream: "OpenAI", reference: "https://platform.openai.com/docs/api-reference/completions", summary: "Complete a text", body: generation("prompt", object{"prompt": object{}, "max_tokens": maxTokens, "n": samples, "stream": stream})},
	openai.Chat:             {upstream: "OpenAI", reference: "https://platform.openai.com/docs/api-reference/chat", summary: "Answer a chat", body: generation("messages", object{"messages": object{"type": "array"}, "max_tokens": maxTokens, "max_completion_tokens": maxTokens, "n": samples, "stream": stream})},
	openai.Responses:        {upstream: "OpenAI", reference: "https://platform.openai.com/docs/api-reference/responses", summary: "Create a response", body: generation("input", object{"input": object{}, "max_output_tokens": maxTokens, "stream": stream})},
	openai.Messages:         {upstream: "Anthropic", reference: "https://docs.anthropic.com/en/api/messages", summary: "Create a message, as Anthropic's API", body: generation("messages", object{"messages": object{"type": "array"}, "max_tokens": maxTokens, "stream": stream})},
	openai.Generate:         {upstream: "SGLang", reference: "https://docs.sglang.ai/basic_usage/native_api.html", summary: "Generate, as SGLang's own API", body: generation("", object{"text": object{}, "input_ids": object{}, "sampling_params": object{}, "stream": stream})},
	openai.VLLMGenerate:     {upstream: "vLLM", reference: "https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html", summary: "Generate from token ids, as vLLM's own API", body: generation("token_ids", object{"token_ids": object{"type": "array"}, "sampling_params": anyObject, "stream": stream})},
	openai.Embeddings:       {upstream: "OpenAI", reference: "https://platform.openai.com/docs/api-reference/embeddings", summary: "Compute embeddings", body: generation("input", object{"input": object{}})},
	openai.Tokenize:         {upstream: "vLLM", reference: "https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html", summary: "Convert text to token ids", body: generation("", object{"prompt": object{"type": "string"}})},
	openai.Rerank:           rerank,
	openai.RerankV1:         rerank,
	openai.RerankV2:         rerank,
	openai.Score:            {upstream: "vLLM", reference: vllmPooling, summary: "Compute the similarity of texts", body: generation("", object{"text_1": object{}, "text_2": object{}})},
	openai.ScoreV1:          {upstream: "vLLM", reference: vllmPooling, summary: "Compute the similarity of texts; SGLang's score has the fields query, items and label_token_ids", body: generation("", object{"text_1": object{}, "text_2": object{}, "query": object{}, "items": object{}})},
	openai.Classify:         {upstream: "vLLM", reference: vllmPooling, summary: "Classify texts", body: generation("", object{"input": object{}, "text": object{}})},
	openai.ClassifyV1:       {upstream: "SGLang", reference: "https://docs.sglang.ai/supported_models/classify_models.html", summary: "Classify texts", body: generation("", object{"input": object{}})},
	openai.Pooling:          {upstream: "vLLM", reference: vllmPooling, summary: "Compute pooled outputs of a model", body: generation("", object{"input": object{}})},
	openai.CountTokens:      {upstream: "Anthropic", reference: "https://docs.anthropic.com/en/api/messages-count-tokens", summary: "Count the tokens of messages, as Anthropic's API", body: generation("messages", object{"messages": object{"type": "array"}})},
	openai.Transcriptions:   {upstream: "OpenAI", reference: openAIAudio + "createTranscription", summary: "Convert speech to text; the body is a form (multipart/form-data)", body: generation("", object{"file": object{}, "stream": stream})},
	openai.Translations:     {upstream: "OpenAI", reference: openAIAudio + "createTranslation", summary: "Convert speech to English text; the body is a form (multipart/form-data)", body: generation("", object{"file": object{}})},
	openai.Speech:           {upstream: "OpenAI", reference: openAIAudio + "createSpeech", summary: "Convert text to speech", body: generation("", object{"input": object{}})},
	openai.ImageGenerations: {upstream: "OpenAI", reference: "https://platform.openai.com/docs/api-reference/images/create", summary: "Make images", body: generation("", object{"prompt": object{}})},
	openai.ImageEdits:       {upstream: "OpenAI", reference: "https://platform.openai.com/docs/api-reference/images/createEdit", summary: "Change images; the body is a form (multipart/form-data) or a JSON object", body: generation("", object{"image": object{}, "prompt": object{}})},
	openai.Detokenize:       {upstream: "vLLM", reference: "https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html", summary: "Convert token ids to text", body: generation("", object{"tokens": object{"type": "array"}})},
}

const openAIResponses = "https://platform.openai.com/docs/api-reference/responses/"

const openAIAudio = "https://platform.openai.com/docs/api-reference/audio/"

const vllmPooling = "https://docs.vllm.ai/en/latest/models/pooling_models.html"

var rerank = route{upstream: "Jina", reference: "https://jina.ai/reranker/", summary: "Order documents by their relevance for a query", body: generation("", object{"query": object{}, "documents": object{}, "top_n": object{"type": "integer"}})}

// adminRoutes describes each route of proxy/admin.
var adminRoutes = []route{
	{method: "get", path: "/healthz", summary: "200 while the process runs; needs no token", ok: 200, open: true, schema: statusSchema},
	{method: "get", path: "/readyz", summary: "200 if the proxy can serve a request now; needs no token", ok: 200, open: true, schema: statusSchema, codes: []openai.Code{openai.CodeNoTarget}},
	{method: "get", path: "/metrics", summary: "Metrics in the format of Prometheus", ok: 200,
		answer: object{"description": "Success", "content": object{"text/plain": object{"schema": text}}}},
	{method: "get", path: "/", summary: "The list of the endpoints; for clients that accept text/html, the dashboard, which needs no token", ok: 200,
		answer: object{"description": "Success", "content": object{
			"text/html": object{"schema": text},
			"application/json": object{"schema": object{"type": "object", "required": []string{"endpoints"}, "properties": object{"endpoints": object{"type": "array", "items": object{
				"type": "object", "required": []string{"endpoint", "does"}, "properties": object{"endpoint": text, "does": text}}}}}},
		}}},
	{method: "get", path: "/dashboard/{file}", summary: "A part of the dashboard; needs no token", ok: 200, open: true,
		answer: object{"description": "Success", "content": object{"text/javascript": object{"schema": text}, "text/css": object{"schema": text}, "image/svg+xml": object{"schema": text}}},
		codes:  []openai.Code{openai.CodeNotFound}},
	{method: "get", path: "/v1/dashboard/events", summary: "A snapshot of what the dashboard shows, each second", ok: 200,
		answer: object{"description": "Server-sent events of the type snapshot. The data of each is one JSON object.", "content": object{"text/event-stream": object{"schema": schemaOf[admin.Snapshot]()}}}},
	{method: "get", path: "/v1/dashboard/part", summary: "What this process alone contributes to a snapshot", ok: 200, schema: schemaOf[admin.DashboardPart]()},
	{method: "get", path: "/v1/dashboard/history", summary: "The traffic of the last three hours, or since the start of the process: a point each 2 s for the last 10 min, each 10 s for the last hour, and each 30 s before", ok: 200, schema: schemaOf[admin.DashboardHistory]()},
	{method: "get", path: "/v1/dashboard/requests", summary: "The requests that ran at some time of a period, of those that the processes still hold", ok: 200, schema: schemaOf[admin.DashboardRequests](), codes: []openai.Code{openai.CodeBadValue}},
	{method: "get", path: "/v1/engines", summary: "Engines with their state, load and facts", ok: 200, schema: schemaOf[[]admin.EngineRow]()},
	{method: "post", path: "/v1/engines", summary: "Add an engine; the body has the keys of [[engine]]", ok: 201, body: anyObject, schema: schemaOf[admin.EngineRow](), codes: []openai.Code{openai.CodeBadEngine}},
	{method: "delete", path: "/v1/engines/{name}", summary: "Drain and remove an engine", ok: 202, schema: nameSchema, codes: []openai.Code{openai.CodeBadValue, openai.CodeUnknownEngine}},
	{method: "post", path: "/v1/engines/{name}/drain", summary: "Drain an engine and keep it", ok: 200, schema: nameSchema, codes: []openai.Code{openai.CodeBadValue, openai.CodeUnknownEngine}},
	{method: "delete", path: "/v1/engines/{name}/drain", summary: "Send requests to a drained engine again", ok: 200, schema: nameSchema, codes: []openai.Code{openai.CodeUnknownEngine}},
	{method: "get", path: "/v1/pairs", summary: "Pairs of engines with their state", ok: 200, schema: schemaOf[[]engine.PairRow]()},
	{method: "get", path: "/v1/policies", summary: "Policies and filters with calls, failures and times", ok: 200, schema: schemaOf[[]admin.PolicyRow]()},
	{method: "post", path: "/v1/policies/{name}/reload", summary: "Load a policy or filter again", ok: 200, schema: doneSchema, others: silentWorkers, codes: []openai.Code{openai.CodeNotReloaded}},
	{method: "get", path: "/v1/exchanges", summary: "The requests that run now, the oldest first", ok: 200, schema: schemaOf[[]journal.RunningRow]()},
	{method: "get", path: "/v1/explain/{id}", summary: "The record of one request that has ended", ok: 200, schema: schemaOf[journal.Explanation](), codes: []openai.Code{openai.CodeUnknownRequest}},
	{method: "get", path: "/perf_metrics", summary: "The times of the requests that have ended", ok: 200, schema: schemaOf[[]journal.PerfRow]()},
	{method: "post", path: "/v1/drain", summary: "Drain the proxy", ok: 200, schema: doneSchema, others: silentWorkers},
	{method: "get", path: "/v1/sidecar", summary: "The coordination policies of a sidecar", ok: 200, schema: schemaOf[admin.SidecarRow](), codes: []openai.Code{openai.CodeNoSidecar}},
	{method: "put", path: "/v1/sidecar/policies", summary: "Change the order of the coordination policies", ok: 200, schema: schemaOf[admin.SidecarRow](), codes: []openai.Code{openai.CodeNoSidecar, openai.CodeBadValue},
		body: object{"type": "object", "required": []string{"policies"}, "properties": object{"policies": object{"type": "array", "items": text}}}},
	{method: "delete", path: "/v1/sidecar/policies", summary: "Use the configured order again", ok: 200, schema: schemaOf[admin.SidecarRow](), codes: []openai.Code{openai.CodeNoSidecar}},
	{method: "get", path: "/v1/workers", summary: "The workers of a coordinator", ok: 200, schema: schemaOf[[]fleet.WorkerRow](), codes: []openai.Code{openai.CodeNotFound}},
}

// A command of a fleet answers 504 if a worker gave no answer.
var (
	doneSchema = object{"type": "object", "properties": object{
		"name": text, "state": text, "status": text, "workers": object{"type": "integer"}, "silent_workers": object{"type": "integer"},
	}, "additionalProperties": false}
	silentWorkers = object{"504": object{"description": "Some workers of the fleet gave no answer.", "content": object{"application/json": object{"schema": doneSchema}}}}
)

// Codes that the parts of the proxy in front of an operation may answer with.
var (
	everywhere = []openai.Code{openai.CodeConnectionBroken, openai.CodeTooManyConnections}
	filtered   = []openai.Code{openai.CodePluginBusy, openai.CodePluginFailed, openai.CodePluginParked, openai.CodeAnswerTooLarge, openai.CodeDraining, openai.CodeMemoryLimit}
	keyed      = []openai.Code{openai.CodeInvalidAPIKey}
	withBody   = []openai.Code{
		openai.CodeBodyIncomplete, openai.CodeBodyTimeout, openai.CodeBodyTooLarge, openai.CodeReadingLimit, openai.CodeClientMemoryLimit,
		openai.CodeBadContentEncoding, openai.CodeUnsupportedContentEncoding, openai.CodeUnsupportedMediaType, openai.CodeOriginNotAllowed, openai.CodeFieldNotAllowed, openai.CodeBadHeader,
		openai.CodeClientLimit, openai.CodeRateLimitExceeded, openai.CodeTenantLimit, openai.CodeInvalidPriority, openai.CodeEvicted, openai.CodeQueueFull, openai.CodeQueueTimeout, openai.CodeSaturated, openai.CodeDeadlineExceeded, openai.CodeHeldByPolicy, openai.CodeNoEngineTimeout, openai.CodeInternal,
		openai.CodeMissingField, openai.CodeModelNotFound, openai.CodeNoTarget, openai.CodeProxyOverloaded, openai.CodeLegFailed, openai.CodeLegTimeout,
		openai.CodePickerFailed, openai.CodeRejectedByPicker,
	}
	stored = slices.Concat(filtered, keyed, []openai.Code{
		openai.CodeResponseNotFound, openai.CodeLegFailed, openai.CodeClientLimit, openai.CodeInvalidPriority, openai.CodeQueueFull, openai.CodeQueueTimeout, openai.CodeDeadlineExceeded, openai.CodeBadHeader, openai.CodeOriginNotAllowed, openai.CodeInternal,
	})
	twoLegs = []openai.Code{openai.CodeNotPairable, openai.CodeNoID, openai.CodeRejectedByPolicy}
	noRoute = []openai.Code{openai.CodeNotFound, openai.CodeMethodNotAllowed, openai.CodeOriginNotAllowed, openai.CodeUpgradeRequired, // of paths and methods that are no operation
		openai.CodeHeadTooLarge, openai.CodeInvalidHead, // of heads that name no operation, or that nobody reads
		openai.CodeResponseInProgress, openai.CodeUnsupportedMessage} // of WebSockets
)

// bodyCodes returns the codes with which the proxy refuses bodies of an API. It parses
// wrong bodies, so that a new rule of the parser is in the document.
func bodyCodes(t testing.TB, api openai.API) []openai.Code {
	bodies := []string{"", "[]", "{", `{"a":1,"a":2}`, `{"KV_transfer_params":1}`, "{}"}
	for _, field := range []string{
		"model", "stream", "stream_options", "prompt", "messages", "input", "text", "input_ids", "token_ids", "tokens",
		"sampling_params", "vllm_xargs", "n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens",
	} {
		for _, value := range []string{"true", "-1", "0", "[]", "{}", "99999999999999999999", `"` + strings.Repeat("x", openai.MaxModel+1) + `"`} {
			bodies = append(bodies, fmt.Sprintf(`{%q:%s}`, field, value))
		}
	}
	var codes []openai.Code
	for _, body := range bodies {
		var r openai.Request
		var refused *openai.Error
		if err := openai.ParseRequest(api, []byte(body), &r); err != nil {
			if !errors.As(err, &refused) {
				t.Fatal(err)
			}
			codes = append(codes, refused.Code)
		}
	}
	if api.TakesForm() {
		codes = append(codes, openai.CodeInvalidForm)
	}
	return codes
}

func publicAPI(t testing.TB) string {
	routes := slices.Clone(publicRoutes)
	for api := openai.Completions; api.Path() != ""; api++ {
		r, ok := engineRoutes[api]
		if !ok {
			t.Errorf("no description of %s", api.Path())
		}
		r.method, r.path, r.ok, r.form = "post", api.Path(), 200, api.TakesForm()
		r.codes = slices.Concat(filtered, keyed, withBody, bodyCodes(t, api))
		if api.Generates() {
			r.codes = append(r.codes, twoLegs...)
			r.answer = object{"description": "The answer of the engine, as " + r.upstream + " describes it.", "content": object{
				"application/json":  object{"schema": anyObject},
				"text/event-stream": object{"schema": object{"type": "string", "description": "With `stream`. An error after the first event is an event with the code stream_broken."}},
			}}
		} else {
			r.answer = object{"description": "The answer of the engine, as " + r.upstream + " describes it.", "content": object{"application/json": object{"schema": anyObject}}}
		}
		if api != openai.Completions && api != openai.Chat {
			r.codes = append(r.codes, openai.CodeNotImplemented)
		}
		r.errors = "Error"
		if api.Anthropic() {
			r.errors = "MessagesError"
		}
		routes = append(routes, r)
	}
	for i := range routes {
		routes[i].codes = append(routes[i].codes, everywhere...)
	}
	return document("pdproxy: public API", noOperation+preflight, "An API key, if server.auth.keys_file is set.", routes)
}

func adminAPI(testing.TB) string {
	routes := slices.Clone(adminRoutes)
	for i := range routes {
		r := &routes[i]
		r.codes = append(slices.Clone(r.codes), openai.CodeForbidden)
		if !r.open {
			r.codes = append(r.codes, openai.CodeInvalidToken)
		}
		if r.body != nil {
			r.codes = append(r.codes, openai.CodeUnsupportedMediaType)
		}
	}
	return document("pdproxy: admin API", noOperation, "The token of the admin address.", routes)
}

// noOperation describes the answers with the codes noRoute.
const noOperation = "A request to another path gets 404 `not_found`. A request to one of the paths with another method gets 405 `method_not_allowed`, and the header `Allow` lists the methods of the path. A request whose head is too large gets 431 `head_too_large`; other refused heads get `invalid_head` with 400, 417, 501 or 505. These answers have the schema Error."

// preflight describes the answers to preflight requests.
const preflight = " If `server.cors_origins` is set, each path also takes the preflight requests of browsers (`OPTIONS` with `Origin` and `Access-Control-Request-Method`): the answer is 204, or 403 `origin_not_allowed`. A `GET` of `/v1/responses` opens a WebSocket, whose messages may get `unsupported_message` and `response_in_progress`; where the proxy opens none, the answer is 426 `upgrade_required`."

// document returns an OpenAPI document.
func document(title, about, auth string, routes []route) string {
	paths := object{}
	for _, r := range routes {
		item, ok := paths[r.path].(object)
		if !ok {
			item = object{}
			paths[r.path] = item
		}
		item[r.method] = operation(r)
	}
	doc := object{
		"openapi":  "3.1.0",
		"info":     object{"title": title, "version": "1", "description": about, "license": object{"name": "Apache-2.0", "identifier": "Apache-2.0"}},
		"servers":  []any{object{"url": "/"}},
		"paths":    paths,
		"security": []any{object{}, object{"bearer": []string{}}},
		"components": object{
			"securitySchemes": object{"bearer": object{"type": "http", "scheme": "bearer", "description": auth}},
			"schemas":         errorSchemas,
		},
	}
	out, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		panic(err) // the document has only maps, lists and texts
	}
	return string(out) + "\n"
}

var (
	text         = object{"type": "string"}
	orNull       = object{"type": []string{"string", "null"}}
	errorSchemas = object{
		"Error":         errorSchema(object{}),
		"MessagesError": errorSchema(object{"type": object{"type": "string", "const": "error"}}),
	}
)

// errorSchema describes an error with further fields.
func errorSchema(fields object) object {
	fields["error"] = object{"type": "object", "required": []string{"message", "type", "param", "code"}, "properties": object{
		"message": text, "type": text, "param": orNull, "code": orNull,
	}}
	return object{"type": "object", "required": slices.Sorted(maps.Keys(fields)), "properties": fields}
}

// operation describes a route with its own errors.
func operation(r route) object {
	answer := r.answer
	if answer == nil {
		answer = object{"description": "Success", "content": object{"application/json": object{"schema": r.schema}}}
	}
	responses := object{strconv.Itoa(r.ok): answer}
	maps.Copy(responses, r.others)
	byStatus := map[int][]string{}
	for _, code := range r.codes {
		for _, status := range code.Info().Statuses {
			if code == openai.CodeUnknownEngine && status == 400 && strings.HasSuffix(r.path, "/drain") {
				continue // only an engine that cannot be removed has this status
			}
			if !slices.Contains(byStatus[status], code.String()) {
				byStatus[status] = append(byStatus[status], code.String())
			}
		}
	}
	kind := cmp.Or(r.errors, "Error")
	for status, codes := range byStatus {
		slices.Sort(codes)
		own := object{"properties": object{"error": object{"properties": object{"code": object{"enum": codes}}}}}
		schema := object{"allOf": []any{object{"$ref": "#/components/schemas/" + kind}, own}}
		description := "Error of the proxy: " + strings.Join(codes, ", ")
		if r.upstream != "" && status/100 == 4 {
			description += ". Or an error of the engine, unchanged"
			schema = object{"anyOf": []any{schema, anyObject}}
		}
		responses[strconv.Itoa(status)] = object{"description": description, "content": object{"application/json": object{"schema": schema}}}
	}
	o := object{"summary": r.summary, "operationId": operationID(r), "responses": responses}
	if r.upstream != "" {
		o["externalDocs"] = object{"url": r.reference, "description": r.upstream}
	}
	if r.body != nil {
		content := object{"application/json": object{"schema": r.body}}
		if r.form {
			content["multipart/form-data"] = object{"schema": r.body}
		}
		o["requestBody"] = object{"required": true, "content": content}
	}
	if parameters := parametersOf(r); parameters != nil {
		o["parameters"] = parameters
	}
	return o
}

func parametersOf(r route) []any {
	var list []any
	if i := strings.IndexByte(r.path, '{'); i >= 0 {
		list = append(list, object{"name": r.path[i+1 : strings.IndexByte(r.path, '}')], "in": "path", "required": true, "schema": text})
	}
	switch {
	case r.method == "delete" && r.path == "/v1/engines/{name}":
		list = append(list, object{"name": "drain", "in": "query", "description": "Time for running requests, such as 60s.", "schema": object{"type": "string", "default": "60s"}})
	case r.method == "post" && r.path == "/v1/engines/{name}/drain":
		list = append(list, object{"name": "move", "in": "query", "description": "Other engines go on with the open streams after retry.move_after, as far as retry.continue permits.", "schema": object{"type": "boolean", "default": false}})
	}
	if r.path == "/v1/dashboard/requests" {
		for _, name := range []string{"from", "to"} {
			list = append(list, object{"name": name, "in": "query", "required": true, "description": "One end of the period, in seconds since the Unix epoch.", "schema": object{"type": "number", "minimum": 0}})
		}
	}
	if r.path == "/v1/dashboard/part" {
		list = append(list, object{"name": "traffic", "in": "query", "description": "true: the lists of requests and policies are empty.", "schema": object{"type": "boolean", "default": false}})
		list = append(list, object{"name": "after", "in": "query", "description": "PROCESS.NEXT of an earlier answer of each process, to get only the requests that have ended since.", "schema": object{"type": "array", "items": text}})
	}
	return list
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

// TestEveryCodeHasAnOperation: each code is listed by an operation, is an event of a stream,
// or answers paths and methods that are no operation.
func TestEveryCodeHasAnOperation(t *testing.T) {
	documents := publicAPI(t) + adminAPI(t)
	for _, code := range openai.Codes() {
		listed := strings.Contains(documents, `"`+code.String()+`"`)
		if slices.Contains(noRoute, code) {
			listed = strings.Contains(documents, "`"+code.String()+"`")
		}
		if ofStream := len(code.Info().Statuses) == 0; listed == ofStream {
			t.Errorf("%s: listed by an operation: %v", code, listed)
		}
	}
}
