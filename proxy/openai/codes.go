package openai

// Code is the machine-readable reason of an [Error]. The constants below are all codes of the
// proxy; docs/reference/errors.md and the OpenAPI documents are generated from their table.
// The zero value means that the error has no code.
type Code uint8

// The codes of the public address.
const (
	CodeNone Code = iota
	CodeAnswerTooLarge
	CodeBadContentEncoding
	CodeBadHeader
	CodeBodyIncomplete
	CodeBodyTimeout
	CodeBodyTooLarge
	CodeClientLimit
	CodeClientMemoryLimit
	CodeConnectionBroken
	CodeDeadlineExceeded
	CodeDraining
	CodeDuplicateKey
	CodeEmptyArray
	CodeEvicted
	CodeFieldNotAllowed
	CodeHeadTooLarge
	CodeHeldByPolicy
	CodeIntegerAboveMaxValue
	CodeIntegerBelowMinValue
	CodeInternal
	CodeInvalidAPIKey
	CodeInvalidForm
	CodeInvalidHead
	CodeInvalidJSON
	CodeInvalidName
	CodeInvalidPriority
	CodeInvalidType
	CodeLegFailed
	CodeLegTimeout
	CodeMemoryLimit
	CodeMethodNotAllowed
	CodeMissingField
	CodeMissingRequiredParameter
	CodeModelNotFound
	CodeNoEngineTimeout
	CodeNoID
	CodeNoTarget
	CodeNotFound
	CodeNotImplemented
	CodeNotPairable
	CodeOriginNotAllowed
	CodePickerFailed
	CodePluginBusy
	CodePluginFailed
	CodePluginParked
	CodeProxyOverloaded
	CodeQueueFull
	CodeQueueTimeout
	CodeRateLimitExceeded
	CodeReadingLimit
	CodeRejectedByPicker
	CodeRejectedByPolicy
	CodeResponseInProgress
	CodeResponseNotFound
	CodeSaturated
	CodeStreamBroken
	CodeStringAboveMaxLength
	CodeTenantLimit
	CodeTooManyConnections
	CodeUnsupportedContentEncoding
	CodeUnsupportedMessage
	CodeUnsupportedMediaType
	CodeUpgradeRequired
)

// The codes of the admin address.
const (
	CodeBadEngine Code = CodeUpgradeRequired + 1 + iota
	CodeBadValue
	CodeForbidden
	CodeInvalidToken
	CodeNoSidecar
	CodeNotReloaded
	CodeUnknownEngine
	CodeUnknownRequest
	codeCount
)

// CodeInfo describes a code.
type CodeInfo struct {
	// Name is the text of error.code.
	Name string
	// Statuses are the HTTP statuses of answers with the code, the usual one first. A code
	// without statuses occurs only in an event of a stream that has begun.
	Statuses []int
	// Type is the text of error.type; empty: the default for the status.
	Type string
	// Meaning is one sentence for the documents.
	Meaning string
}

const overloaded = "overloaded_error"

var codes = [codeCount]CodeInfo{
	CodeAnswerTooLarge:             {"answer_too_large", []int{500}, "", "A filter reads the whole answer, and the answer is larger than a filter may hold."},
	CodeBadContentEncoding:         {"bad_content_encoding", []int{400}, "", "The body does not match its Content-Encoding."},
	CodeBadHeader:                  {"bad_header", []int{400, 403}, "", "A header for a sidecar has a wrong value, or names an engine that the sidecar does not know. Or the header limits.deadline_header is not a number of milliseconds, or epp.model_header names no model."},
	CodeBodyIncomplete:             {"body_incomplete", []int{400}, "", "The body ended early."},
	CodeBodyTimeout:                {"body_timeout", []int{408}, "", "The body arrived too slowly."},
	CodeBodyTooLarge:               {"body_too_large", []int{413}, "", "The body is larger than the limit, or does not fit in the memory for requests."},
	CodeClientLimit:                {"client_limit", []int{429}, "", "The client has too many requests open, or the request waited and a new one of the client of a higher priority class needed its place."},
	CodeClientMemoryLimit:          {"client_memory_limit", []int{429}, "", "The requests of the client hold as much memory as one client may hold."},
	CodeConnectionBroken:           {"connection_broken", []int{503}, overloaded, "The proxy stopped reading the body of an earlier request of this connection, so the connection cannot serve further requests. The proxy closes this connection."},
	CodeDeadlineExceeded:           {"deadline_exceeded", []int{503}, overloaded, "The deadline of the request passed while the request waited for a place or for an engine."},
	CodeDraining:                   {"draining", []int{503}, overloaded, "The proxy is shutting down."},
	CodeDuplicateKey:               {"duplicate_key", []int{400}, "", "An object of the body has the same key twice, so two parsers could read the body differently."},
	CodeEmptyArray:                 {"empty_array", []int{400}, "", "A list of the request is empty."},
	CodeEvicted:                    {"evicted", []int{429}, "", "The request ran, and the proxy ended it because a request of a higher priority class needs its place. `Retry-After` names the time until a new request may succeed. A stream that has begun ends with an event with this code."},
	CodeFieldNotAllowed:            {"field_not_allowed", []int{400}, "", "A field changes the engine, runs code in it, or selects an adapter by a file or a number, and the configuration does not allow the field (`server.trust_engine_fields`)."},
	CodeHeadTooLarge:               {"head_too_large", []int{431}, "", "The request line and the header lines are larger than the limit. Over HTTP/1.1 the proxy closes this connection."},
	CodeHeldByPolicy:               {"held_by_policy", []int{503}, overloaded, "The plan policy held the request until the limit of the wait."},
	CodeIntegerAboveMaxValue:       {"integer_above_max_value", []int{400}, "", "A number of the request is too large."},
	CodeIntegerBelowMinValue:       {"integer_below_min_value", []int{400}, "", "A number of the request is too small."},
	CodeInternal:                   {"internal", []int{500}, "internal_error", "The proxy has a fault."},
	CodeInvalidAPIKey:              {"invalid_api_key", []int{401}, "", "The request has no valid API key."},
	CodeInvalidForm:                {"invalid_form", []int{400}, "", "The body is not a valid form (multipart/form-data), or parsers could read it in different ways."},
	CodeInvalidHead:                {"invalid_head", []int{400, 417, 501, 505}, "invalid_request_error", "The request line or a header line is not valid HTTP/1.1, or asks for something that the proxy does not support. The proxy closes this connection."},
	CodeInvalidJSON:                {"invalid_json", []int{400}, "", "The body is not one valid JSON object."},
	CodeInvalidName:                {"invalid_name", []int{400}, "", "A field has a name with capital letters that the engines reserve in lower case."},
	CodeInvalidPriority:            {"invalid_priority", []int{400}, "", "The header limits.priority_header names a priority class or an InferenceObjective that is more urgent than the class of the client."},
	CodeInvalidType:                {"invalid_type", []int{400}, "", "A field has the wrong type."},
	CodeLegFailed:                  {"leg_failed", []int{502}, "upstream_error", "An engine failed, and no retry was left."},
	CodeLegTimeout:                 {"leg_timeout", []int{504}, "upstream_error", "An engine did not answer in time, and no retry was left."},
	CodeMemoryLimit:                {"memory_limit", []int{503}, overloaded, "The memory of the proxy for requests and answers is full."},
	CodeMethodNotAllowed:           {"method_not_allowed", []int{405}, "", "The endpoint takes another method. The `Allow` header names the method."},
	CodeMissingField:               {"missing_field", []int{400}, "", "The field `model` is needed, because the engines serve more than one model."},
	CodeMissingRequiredParameter:   {"missing_required_parameter", []int{400}, "", "A field is missing."},
	CodeModelNotFound:              {"model_not_found", []int{404}, "", "No engine serves the model, or the client may not use it."},
	CodeNoEngineTimeout:            {"no_engine_timeout", []int{503}, overloaded, "No engine became ready for the request in time."},
	CodeNoID:                       {"no_id", []int{503}, overloaded, "The request needs a disagg id, and no id is left because the coordinator is away."},
	CodeNoTarget:                   {"no_target", []int{503}, overloaded, "No engine can serve the request now."},
	CodeNotFound:                   {"not_found", []int{404}, "", "There is no such endpoint."},
	CodeNotImplemented:             {"not_implemented", []int{501}, "invalid_request_error", "The engines of this model cannot serve this API."},
	CodeNotPairable:                {"not_pairable", []int{400}, "", "The form of the request excludes two legs, and no engine can serve it whole."},
	CodeOriginNotAllowed:           {"origin_not_allowed", []int{403}, "", "A web page of another origin sent a request without an API key, opened a WebSocket, or asked if it may use the API, and the configuration does not list the origin of the page."},
	CodePickerFailed:               {"picker_failed", []int{503}, "", "The endpoint picker gave no usable answer, and the configuration fails closed."},
	CodePluginBusy:                 {"plugin_busy", []int{503}, "", "All instances of a filter were busy."},
	CodePluginFailed:               {"plugin_failed", []int{503, 502}, "", "A filter failed, or made an invalid request or answer."},
	CodePluginParked:               {"plugin_parked", []int{503}, "", "A filter failed too often, and the proxy does not call it."},
	CodeProxyOverloaded:            {"proxy_overloaded", []int{503}, overloaded, "The proxy has no descriptor, port or memory for a connection to an engine."},
	CodeQueueFull:                  {"queue_full", []int{429}, "", "Too many requests run and wait. A waiting request gets the error if a new one of a higher priority class needs its place."},
	CodeQueueTimeout:               {"queue_timeout", []int{503}, overloaded, "No place became free in time."},
	CodeRateLimitExceeded:          {"rate_limit_exceeded", []int{429}, "", "The tenant of the client has used its requests or tokens of the minute. The type of the error is `requests` or `tokens`, and `Retry-After` names the time until the next request may succeed."},
	CodeReadingLimit:               {"reading_limit", []int{408}, "rate_limit_error", "Too many bodies arrive at the same time, and this body was the slowest."},
	CodeRejectedByPicker:           {"rejected_by_picker", []int{503, 429}, overloaded, "The endpoint picker refused the request. The picker may choose another status of 400 to 599."},
	CodeRejectedByPolicy:           {"rejected_by_policy", []int{503, 429}, overloaded, "The plan policy rejected the request. The policy may choose another status of 400 to 599."},
	CodeResponseInProgress:         {"response_in_progress", []int{409}, "", "A message of a WebSocket asks for a response while another response of this WebSocket runs."},
	CodeResponseNotFound:           {"response_not_found", []int{404}, "", "No engine holds a response of this id."},
	CodeSaturated:                  {"saturated", []int{503}, overloaded, "The engines of the model have so much work that the request could not begin before its deadline or before the end of limits.queue_timeout. `Retry-After` names the estimated delay."},
	CodeStreamBroken:               {"stream_broken", nil, "upstream_error", "The stream of the engine broke off after its beginning, so the answer is not complete."},
	CodeStringAboveMaxLength:       {"string_above_max_length", []int{400}, "", "A text of the request is too long."},
	CodeTenantLimit:                {"tenant_limit", []int{429}, "", "As many requests of the client's tenant run or wait as may."},
	CodeTooManyConnections:         {"too_many_connections", []int{503}, overloaded, "The client or all clients together have too many connections open. The proxy closes this connection."},
	CodeUnsupportedContentEncoding: {"unsupported_content_encoding", []int{415}, "", "The proxy cannot decode this Content-Encoding."},
	CodeUnsupportedMessage:         {"unsupported_message", []int{400}, "", "The proxy cannot open this WebSocket, or does not know this kind of message."},
	CodeUnsupportedMediaType:       {"unsupported_media_type", []int{415}, "", "The `Content-Type` of the request is not that of JSON, or of a form where the endpoint takes forms."},
	CodeUpgradeRequired:            {"upgrade_required", []int{426}, "invalid_request_error", "The request opens a WebSocket, and the endpoint takes only POST from this client or over this version of HTTP."},

	CodeBadEngine:      {"bad_engine", []int{400}, "", "The engine of the request has a wrong or forbidden key, or cannot be added."},
	CodeBadValue:       {"bad_value", []int{400}, "", "A parameter or a list of policies is wrong."},
	CodeForbidden:      {"forbidden", []int{403}, "", "A web page sent the request, or the `Host` of the request is not allowed."},
	CodeInvalidToken:   {"invalid_token", []int{401}, "", "The request has no valid token."},
	CodeNoSidecar:      {"no_sidecar", []int{404}, "", "This proxy is not a sidecar."},
	CodeNotReloaded:    {"not_reloaded", []int{409, 404}, "", "The policy is unknown, or its new version cannot be used. The old version serves."},
	CodeUnknownEngine:  {"unknown_engine", []int{404, 400}, "", "The engine is unknown, or cannot be removed."},
	CodeUnknownRequest: {"unknown_request", []int{404}, "", "The request is not among the last 4,096 requests that ended."},
}

// Codes returns all codes in the order of their constants.
func Codes() []Code {
	list := make([]Code, 0, codeCount-1)
	for c := CodeNone + 1; c < codeCount; c++ {
		list = append(list, c)
	}
	return list
}

// Info describes the code.
func (c Code) Info() CodeInfo { return codes[c] }

// String returns the text of error.code; empty for CodeNone.
func (c Code) String() string { return codes[c].Name }

// Admin reports whether only the admin address answers with the code.
func (c Code) Admin() bool { return c >= CodeBadEngine }

// NewError returns an error with the usual status of the code. The message is one sentence for
// the client. Where a code has several statuses, the caller may change Status.
func NewError(code Code, message string) *Error {
	e := &Error{Code: code, Message: message}
	if statuses := codes[code].Statuses; len(statuses) > 0 {
		e.Status = statuses[0]
	}
	return e
}
