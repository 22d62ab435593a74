package openai

import (
	"strings"
	"testing"
)

func TestStoredResponseAt(t *testing.T) {
	for path, want := range map[string]StoredResponse{
		"/v1/responses/resp_1-a":                    {ID: "resp_1-a"},
		"/v1/responses/resp_1/cancel":               {ID: "resp_1", Cancel: true},
		"/v1/responses/cancel":                      {ID: "cancel"},
		"/v1/responses/cancel/cancel":               {ID: "cancel", Cancel: true},
		"/v1/responses":                             {},
		"/v1/responses/":                            {},
		"/v1/responses//cancel":                     {},
		"/v1/responses/a/b":                         {},
		"/v1/responses/a/b/cancel":                  {},
		"/v1/responses/..":                          {},
		"/v1/responses/a?b":                         {},
		"/v1/responses/a\r\nX: y":                   {},
		"/v1/responses/\u00e4":                      {},
		"/v1/responsesa":                            {},
		"/v1/chat/completions/a":                    {},
		"/v1/responses/" + strings.Repeat("a", 257): {},
	} {
		s, ok := StoredResponseAt(path)
		if ok != (want.ID != "") || ok && (s != want || s.Path() != path) {
			t.Errorf("%.60q: got %+v, %v", path, s, ok)
		}
		if ok && (s.Takes("POST") != s.Cancel || s.Takes("GET") == s.Cancel || s.Takes("DELETE") == s.Cancel || s.Takes("PUT") || !strings.Contains(s.Methods(), map[bool]string{true: "POST", false: "GET, DELETE"}[s.Cancel])) {
			t.Errorf("%s takes %s", path, s.Methods())
		}
	}
}
