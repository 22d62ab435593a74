package testbed

import (
	"net/http"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/admintoken"
)

// Authorize adds the token that the proxy at an admin address has made to a
// request, and gives the request's body the type of JSON.
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
