package upstream

import "net/http"

// RequestAtFault reports whether an engine's status blames the request, so that every other engine
// would answer the same: a 4xx except 408 and 429, which depend on the engine's state.
func RequestAtFault(status int) bool {
	return status/100 == 4 && status != http.StatusRequestTimeout && status != http.StatusTooManyRequests
}
