package docs

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// actions has, for each error code, the advice for the reader of the page.
var actions = map[openai.Code]string{
	openai.CodeAnswerTooLarge:             "Raise `plugin.memory` of the filter, or use a filter that does not keep the answer.",
	openai.CodeBadContentEncoding:         "Send the body again, without a coding or with a valid one.",
	openai.CodeBadHeader:                  "See [the headers of a sidecar](../howto/sidecar.md#headers).",
	openai.CodeBodyIncomplete:             "Check the client and the network, and send the request again.",
	openai.CodeBodyTimeout:                "See `server.read_timeout` and `server.min_body_rate`.",
	openai.CodeBodyTooLarge:               "See `server.max_body` and `limits.buffer_memory`.",
	openai.CodeClientLimit:                "Wait for an answer. See `limits.per_client`.",
	openai.CodeClientMemoryLimit:          "Wait for an answer. See `limits.buffer_memory`.",
	openai.CodeConnectionBroken:           "Send the request again on a new connection.",
	openai.CodeDeadlineExceeded:           "Send the request again later, or with more time. See [deadlines](../howto/priorities.md#deadlines).",
	openai.CodeDraining:                   "Send the request again; a load balancer sends it to another proxy.",
	openai.CodeDuplicateKey:               "Remove one of the keys. `param` names the field.",
	openai.CodeEmptyArray:                 "Correct the field that `param` names.",
	openai.CodeEvicted:                    "Wait as `Retry-After` says. See [eviction](../howto/priorities.md#eviction).",
	openai.CodeFieldNotAllowed:            "Leave the field that `param` names out, or set `server.trust_engine_fields`.",
	openai.CodeHeadTooLarge:               "Send fewer or shorter header lines. See `server.max_header`.",
	openai.CodeHeldByPolicy:               "Send the request again later. The plan policy decides when requests wait.",
	openai.CodeIntegerAboveMaxValue:       "Correct the field that `param` names.",
	openai.CodeIntegerBelowMinValue:       "Correct the field that `param` names.",
	openai.CodeInternal:                   "Report it with the lines of the log for this request id.",
	openai.CodeInvalidAPIKey:              "Send `Authorization: Bearer KEY`. See [keys](../howto/keys.md).",
	openai.CodeInvalidForm:                "Send the form with a common client library, and names without escapes.",
	openai.CodeInvalidHead:                "Check the client and the proxies in front of this one. The status and the message name the fault.",
	openai.CodeInvalidJSON:                "Correct the body. Broken UTF-8 and trailing bytes are not allowed.",
	openai.CodeInvalidName:                "Write the name in lower case.",
	openai.CodeInvalidPriority:            "Send the name of a class that you may use in the line, or no line. See `limits.priority_header`.",
	openai.CodeInvalidType:                "Correct the field that `param` names.",
	openai.CodeLegFailed:                  "`pdproxy explain` with the request id shows each attempt.",
	openai.CodeLegTimeout:                 "See [timeouts](../concepts/request.md) and `pdproxy explain`.",
	openai.CodeMemoryLimit:                "Send the request again later. See `limits.buffer_memory`.",
	openai.CodeMethodNotAllowed:           "Use this method.",
	openai.CodeMissingField:               "Set `model`.",
	openai.CodeMissingRequiredParameter:   "Add the field that `param` names.",
	openai.CodeModelNotFound:              "`GET /v1/models` lists the models.",
	openai.CodeNoEngineTimeout:            "Wait as `Retry-After` says. See `limits.no_engine_timeout`.",
	openai.CodeNoID:                       "See [disagg ids](../concepts/ids.md).",
	openai.CodeNoTarget:                   "See [503 though engines run](../troubleshooting.md#503-although-engines-run).",
	openai.CodeNotFound:                   "The [list of routes](http-api.md) has the endpoints.",
	openai.CodeNotImplemented:             "Use another API, or another engine.",
	openai.CodeNotPairable:                "Change the field that `param` names, or add an engine of role `both`.",
	openai.CodeOriginNotAllowed:           "Add the origin to `server.cors_origins`.",
	openai.CodePickerFailed:               "The message has the reason. See [the failure mode](../howto/sidecar.md#without-an-answer-of-the-picker).",
	openai.CodePluginBusy:                 "Send the request again. See [the limits of plugins](plugin-limits.md).",
	openai.CodePluginFailed:               "The log of the proxy has the reason.",
	openai.CodePluginParked:               "Correct the filter and load it again.",
	openai.CodeProxyOverloaded:            "Raise the limit of descriptors, or lower `limits.max_exchanges`.",
	openai.CodeQueueFull:                  "Wait as `Retry-After` says. See `limits.queue`.",
	openai.CodeRateLimitExceeded:          "Wait as `Retry-After` says, or raise the limits of the tenant. See [tenants](../howto/tenants.md).",
	openai.CodeTenantLimit:                "Send fewer requests at the same time, or raise `max_exchanges` of the tenant. See [tenants](../howto/tenants.md).",
	openai.CodeQueueTimeout:               "Wait as `Retry-After` says. See `limits.queue_timeout`.",
	openai.CodeSaturated:                  "Wait as `Retry-After` says. See [saturation](../howto/priorities.md#saturation).",
	openai.CodeReadingLimit:               "Send the request again. See `limits.max_reading`.",
	openai.CodeRejectedByPicker:           "The message has the text of the picker. Send the request again after `Retry-After`.",
	openai.CodeRejectedByPolicy:           "Ask the author of the policy.",
	openai.CodeResponseInProgress:         "Wait for the last event of the response, or open another WebSocket.",
	openai.CodeResponseNotFound:           "Check the id. An engine loses its responses when it restarts, and stores a response only with `store`.",
	openai.CodeStreamBroken:               "Send the request again.",
	openai.CodeStringAboveMaxLength:       "Correct the field that `param` names.",
	openai.CodeTooManyConnections:         "Use connections again, or wait. See `limits.max_connections` and `limits.max_connections_per_address`.",
	openai.CodeUnsupportedContentEncoding: "Use `gzip`, `zstd`, or no coding.",
	openai.CodeUnsupportedMessage:         "Send texts as [WebSockets](http-api.md) describes. `param` names the field or the header.",
	openai.CodeUpgradeRequired:            "Send the request with POST. Clients such as Codex do so after this answer.",
	openai.CodeBadEngine:                  "Correct the key that `param` names.",
	openai.CodeBadValue:                   "Correct the value that `param` names.",
	openai.CodeForbidden:                  "See [web pages](../howto/admin.md#web-pages).",
	openai.CodeInvalidToken:               "Send `Authorization: Bearer` and the text that `pdproxy admin-token` prints.",
	openai.CodeNoSidecar:                  "Set `sidecar.local`, or ask the sidecar.",
	openai.CodeNotReloaded:                "The message has the reason.",
	openai.CodeUnknownEngine:              "`GET /v1/engines` lists the engines.",
	openai.CodeUnknownRequest:             "Check the id. A restart of the proxy loses the records.",
	openai.CodeUnsupportedMediaType:       "Send `Content-Type: application/json`, or a form (`multipart/form-data`) where the endpoint takes one.",
}

// errorsPage lists the codes of package openai, which are all codes that the proxy can send.
func errorsPage(t testing.TB) string {
	var b strings.Builder
	b.WriteString(notice + "# Error codes\n\n" +
		"An error has the form of OpenAI: `{\"error\": {\"message\": ..., \"type\": ..., \"param\": ..., \"code\": ...}}`. " +
		"On `/v1/messages` and `/v1/messages/count_tokens` it also has `\"type\": \"error\"`, as Anthropic's clients expect. " +
		"An engine's own error with a status of 4xx, and the 503 of an engine whose queue is full, reach the client unchanged, so their codes may be missing here.\n\n" +
		"Every answer has `x-request-id`. `pdproxy explain REQUEST_ID` shows the attempts of this request. " +
		"The [OpenAPI documents](http-api.md) list the codes of each endpoint.\n")
	for _, part := range []struct {
		title string
		admin bool
	}{{"Public API", false}, {"Admin address", true}} {
		fmt.Fprintf(&b, "\n## %s\n", part.title)
		for _, code := range openai.Codes() {
			if code.Admin() != part.admin {
				continue
			}
			info := code.Info()
			status := strings.Trim(strings.ReplaceAll(fmt.Sprint(info.Statuses), " ", ", "), "[]")
			if status == "" {
				status = "an event of the stream"
			}
			if info.Meaning == "" || actions[code] == "" {
				t.Errorf("the code %q has no meaning or no action", code)
			}
			fmt.Fprintf(&b, "\n### %s\n\n- **Status:** %s\n- **Meaning:** %s\n- **Action:** %s\n", code, status, info.Meaning, actions[code])
		}
	}
	return b.String()
}
