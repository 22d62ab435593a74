package upstream

import "testing"

// TestRequestAtFault: only a 4xx that another engine would answer as well ends a request.
func TestRequestAtFault(t *testing.T) {
	for status, want := range map[int]bool{
		200: false, 399: false, 400: true, 401: true, 404: true, 407: true, 408: false, 409: true, 422: true, 428: true, 429: false, 430: true, 499: true, 500: false, 503: false,
	} {
		if got := RequestAtFault(status); got != want {
			t.Errorf("%d: RequestAtFault(status) = %v, want %v", status, got, want)
		}
	}
}
