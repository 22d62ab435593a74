package docs

import (
	"fmt"
	"go/ast"
	"slices"
	"strings"
	"testing"
)

// errorCode describes one value of error.code. The table below is the text of the page.
type errorCode struct {
	code     string
	statuses []int // none: an event of a stream that has begun
	meaning  string
	action   string
}

// publicCodes are the codes that clients of the API may see.
var publicCodes = []errorCode{
	{"bad_content_encoding", []int{400}, "The body is not what its Content-Encoding says.", "Send the body again, without a coding or with a valid one."},
	{"bad_header", []int{400, 403}, "A header of a sidecar has a wrong value, or names an engine that the sidecar does not know.", "See [the headers of a sidecar](../howto/sidecar.md#headers)."},
	{"body_incomplete", []int{400}, "The body ended early.", "Check the client and the network, and send the request again."},
	{"body_timeout", []int{408}, "The body came too slowly.", "See `server.read_timeout` and `server.min_body_rate`."},
	{"body_too_large", []int{413}, "The body is larger than the limit, or does not fit in the memory for requests.", "See `server.max_body` and `limits.buffer_memory`."},
	{"client_limit", []int{429}, "The client has too many requests open.", "Wait for an answer. See `limits.per_client`."},
	{"client_memory_limit", []int{429}, "The requests of the client hold as much memory as one client may hold.", "Wait for an answer. See `limits.buffer_memory`."},
	{"draining", []int{503}, "The proxy is shutting down.", "Send the request again; a load balancer sends it to another proxy."},
	{"empty_array", []int{400}, "A list of the request is empty.", "Correct the field that `param` names."},
	{"integer_above_max_value", []int{400}, "A number of the request is too large.", "Correct the field that `param` names."},
	{"integer_below_min_value", []int{400}, "A number of the request is too small.", "Correct the field that `param` names."},
	{"internal", []int{500}, "The proxy has a fault.", "Report it with the lines of the log for this request id."},
	{"invalid_api_key", []int{401}, "The request has no valid API key.", "Send `Authorization: Bearer KEY`. See [keys](../howto/keys.md)."},
	{"invalid_json", []int{400}, "The body is not one JSON object, or two parsers could read the body differently.", "Correct the body. Duplicate keys, broken UTF-8 and trailing bytes are not allowed."},
	{"invalid_name", []int{400}, "A field has a name with capital letters that the engines reserve in lower case.", "Write the name in lower case."},
	{"invalid_type", []int{400}, "A field has the wrong type.", "Correct the field that `param` names."},
	{"leg_failed", []int{400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 502, 503, 504}, "An engine failed, and no retry was left. The usual status is 502.", "`pdproxy explain` with the request id shows each attempt."},
	{"leg_timeout", []int{504}, "An engine did not answer in time, and no retry was left.", "See [timeouts](../concepts/request.md) and `pdproxy explain`."},
	{"memory_limit", []int{503}, "The memory of the proxy for requests and answers is full.", "Send the request again later. See `limits.buffer_memory`."},
	{"method_not_allowed", []int{405}, "The endpoint takes another method. The `Allow` header names the method.", "Use this method."},
	{"missing_field", []int{400}, "The field `model` is needed, because the engines serve more than one model.", "Set `model`."},
	{"missing_required_parameter", []int{400}, "A field is missing.", "Add the field that `param` names."},
	{"model_not_found", []int{404}, "No engine serves the model.", "`GET /v1/models` lists the models."},
	{"no_engine_timeout", []int{503}, "No engine became ready for the request in time.", "Wait as `Retry-After` says. See `limits.no_engine_timeout`."},
	{"no_id", []int{503}, "The request needs a disagg id, and no id is left because the coordinator is away.", "See [disagg ids](../concepts/ids.md)."},
	{"no_target", []int{503}, "No engine can serve the request now.", "See [503 though engines run](../troubleshooting.md#503-although-engines-run)."},
	{"not_found", []int{404}, "There is no such endpoint.", "The [list of routes](http-api.md) has the endpoints."},
	{"not_implemented", []int{501}, "The engines of this model cannot serve this API.", "Use another API, or another engine."},
	{"not_pairable", []int{400}, "The form of the request excludes two legs, and no engine can serve it whole.", "Change the field that `param` names, or add an engine of role `both`."},
	{"plugin_busy", []int{503}, "All instances of a filter were busy.", "Send the request again. See [the limits of plugins](../howto/plugins.md#limits)."},
	{"plugin_failed", []int{500, 502, 503}, "A filter failed, or made an invalid request or answer.", "The log of the proxy has the reason."},
	{"plugin_parked", []int{503}, "A filter failed too often, and the proxy does not call it.", "Correct the filter and load it again."},
	{"proxy_overloaded", []int{503}, "The proxy has no descriptor, port or memory for a connection to an engine.", "Raise the limit of descriptors, or lower `limits.max_exchanges`."},
	{"queue_full", []int{429}, "Too many requests run and wait.", "Wait as `Retry-After` says. See `limits.queue`."},
	{"queue_timeout", []int{503}, "No place became free in time.", "Wait as `Retry-After` says. See `limits.queue_timeout`."},
	{"reading_limit", []int{408}, "Too many bodies arrive at the same time, and this body was the slowest.", "Send the request again. See `limits.max_reading`."},
	{"rejected_by_policy", []int{429, 503}, "The plan policy rejected the request. The policy chooses the status.", "Ask the author of the policy."},
	{"stream_broken", nil, "The stream of the engine broke off after its beginning, so the answer is not complete.", "Send the request again."},
	{"string_above_max_length", []int{400}, "A text of the request is too long.", "Correct the field that `param` names."},
	{"unsupported_content_encoding", []int{415}, "The proxy cannot decode this Content-Encoding.", "Use `gzip`, `zstd`, or no coding."},
}

// adminCodes are the codes of the admin address.
var adminCodes = []errorCode{
	{"bad_engine", []int{400}, "The engine of the request has a wrong or forbidden key, or cannot be added.", "Correct the key that `param` names."},
	{"bad_value", []int{400}, "A parameter or a list of policies is wrong.", "Correct the value that `param` names."},
	{"forbidden", []int{403}, "A web page sent the request, or the `Host` of the request is not allowed.", "See [web pages](../howto/admin.md#web-pages)."},
	{"invalid_token", []int{401}, "The request has no valid token.", "Send `Authorization: Bearer` and the text that `pdproxy admin-token` prints."},
	{"no_sidecar", []int{404}, "This proxy is not a sidecar.", "Set `sidecar.local`, or ask the sidecar."},
	{"not_reloaded", []int{404, 409}, "The policy is unknown, or its new version cannot be used. The old version serves.", "The message has the reason."},
	{"unknown_engine", []int{400, 404}, "The engine is unknown, or cannot be removed.", "`GET /v1/engines` lists the engines."},
	{"unknown_request", []int{404}, "The request is not among the last 4,096 requests that ended.", "Check the id. A restart of the proxy loses the records."},
	{"unsupported_media_type", []int{415}, "The body is not JSON.", "Send `Content-Type: application/json`."},
}

// errorsPage lists all codes.
func errorsPage(testing.TB) string {
	var b strings.Builder
	b.WriteString(notice + "# Error codes\n\n" +
		"An error has the form of OpenAI: `{\"error\": {\"message\": ..., \"type\": ..., \"param\": ..., \"code\": ...}}`. " +
		"On `/v1/messages` it also has `\"type\": \"error\"`, as Anthropic's clients expect. " +
		"An engine's own error with a status of 4xx reaches the client unchanged, so its code may be missing here.\n\n" +
		"Every answer has `x-request-id`. `pdproxy explain REQUEST_ID` shows the attempts of this request.\n")
	for _, part := range []struct {
		title string
		codes []errorCode
	}{{"Public API", publicCodes}, {"Admin address", adminCodes}} {
		fmt.Fprintf(&b, "\n## %s\n", part.title)
		for _, c := range part.codes {
			var statuses []string
			for _, s := range c.statuses {
				statuses = append(statuses, fmt.Sprint(s))
			}
			status := "an event of the stream"
			if len(statuses) > 0 {
				status = strings.Join(statuses, ", ")
			}
			fmt.Fprintf(&b, "\n### %s\n\n- **Status:** %s\n- **Meaning:** %s\n- **Action:** %s\n", c.code, status, c.meaning, c.action)
		}
	}
	return b.String()
}

// sourceCodes finds each code in the source: the field Code of an openai.Error, the
// arguments of the functions that make one, and the variables named code.
func sourceCodes(t testing.TB) map[string]bool {
	codes := map[string]bool{}
	add := func(list ...ast.Expr) {
		for _, s := range literals(list) {
			if !strings.ContainsAny(s, " .:") {
				codes[s] = true
			}
		}
	}
	for _, file := range productFiles(t) {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CompositeLit:
				if nameOf(n.Type) != "Error" {
					return true
				}
				for _, e := range n.Elts {
					if kv, ok := e.(*ast.KeyValueExpr); ok && nameOf(kv.Key) == "Code" {
						add(kv.Value)
					}
				}
			case *ast.CallExpr:
				if nameOf(n.Fun) == "fieldError" && len(n.Args) > 1 {
					add(n.Args[1])
				}
			case *ast.AssignStmt:
				for i, left := range n.Lhs {
					if nameOf(left) != "code" || len(n.Rhs) != len(n.Lhs) {
						continue
					}
					add(n.Rhs[i])
					if index, ok := n.Rhs[i].(*ast.IndexExpr); ok { // of a map from status to code
						if table, ok := index.X.(*ast.CompositeLit); ok {
							for _, e := range table.Elts {
								add(e.(*ast.KeyValueExpr).Value)
							}
						}
					}
				}
			}
			return true
		})
	}
	return codes
}

// TestEveryErrorCodeIsListed compares the codes in the source with the codes of the page
// and of the OpenAPI documents.
func TestEveryErrorCodeIsListed(t *testing.T) {
	found := sourceCodes(t)
	if len(found) < 30 {
		t.Fatalf("found only %d codes", len(found))
	}
	listed := map[string]bool{}
	for _, c := range slices.Concat(publicCodes, adminCodes) {
		if listed[c.code] {
			t.Errorf("%s is listed twice", c.code)
		}
		listed[c.code] = true
		if !found[c.code] {
			t.Errorf("%s is listed, but the source does not have it", c.code)
		}
	}
	for code := range found {
		if !listed[code] {
			t.Errorf("the source has the code %s, which is not listed", code)
		}
	}
	for _, c := range publicCodes {
		if !strings.Contains(publicAPI(t), `"`+c.code+`"`) {
			t.Errorf("openapi.json does not have %s", c.code)
		}
	}
	for _, c := range adminCodes {
		if !strings.Contains(adminAPI(t), `"`+c.code+`"`) {
			t.Errorf("openapi-admin.json does not have %s", c.code)
		}
	}
}
