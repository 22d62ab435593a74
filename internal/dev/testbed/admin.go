package testbed

import (
	"net/http"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/admintoken"
)

// Authorize adds two headers to a request to an admin address: the token that the proxy
// has made, and the content type JSON if the request has a body.
func Authorize(t testing.TB, r *http.Request) {
	t.Helper()
	token, err := admintoken.Find(r.URL.Host)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+token)
	if r.ContentLength != 0 {
		r.Header.Set("Content-Type", "application/json")
	}
}
