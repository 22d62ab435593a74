package dashboard

import (
	"io/fs"
	"net/http"
	"net/http/httptest"
	"path"
	"regexp"
	"strings"
	"testing"
)

// TestPage: the page and its parts have a type and a policy. All parts that a file names
// exist, and no file names another host or makes HTML from text.
func TestPage(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { Page(w) })
	mux.HandleFunc("GET "+Folder+"{file}", func(w http.ResponseWriter, r *http.Request) {
		if !Part(w, r.PathValue("file")) {
			w.WriteHeader(http.StatusNotFound)
		}
	})
	get := func(path string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		return w
	}
	named := regexp.MustCompile(`(?:src|href|from) ?=? ?["'](?:/dashboard/|\./)([^"'/]+)["']`)
	seen := map[string]bool{}
	var visit func(url string)
	visit = func(url string) {
		w := get(url)
		text := w.Body.String()
		head := w.Header()
		if w.Code != 200 || head.Get("Content-Type") == "" || !strings.Contains(head.Get("Content-Security-Policy"), "frame-ancestors 'none'") {
			t.Errorf("%s: %d %v", url, w.Code, head)
		}
		for _, bad := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=", "onclick=", "https://"} {
			if strings.Contains(text, bad) {
				t.Errorf("%s has %s", url, bad)
			}
		}
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			if part := Folder + m[1]; !seen[part] {
				seen[part] = true
				visit(part)
			}
		}
	}
	visit("/")
	all, err := fs.Glob(files, "page/*")
	if err != nil || len(seen) != len(all)-1 {
		t.Errorf("the page names %d of %d parts: %v, %v", len(seen), len(all)-1, seen, err)
	}
	for _, file := range all {
		if types[path.Ext(file)] == "" {
			t.Errorf("%s has no media type", file)
		}
	}
	for _, url := range []string{Folder + "nothing.js", Folder + "..%2fpage.go", Folder + "%2e%2e", Folder + "x%00"} {
		if w := get(url); w.Code != 404 {
			t.Errorf("%s: %d", url, w.Code)
		}
	}
}

func TestAccepted(t *testing.T) {
	for accept, want := range map[string]bool{
		"": false, "*/*": false, "application/json": false,
		"text/html": true, "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8": true,
	} {
		r := httptest.NewRequest("GET", "/", nil)
		if accept != "" {
			r.Header.Set("Accept", accept)
		}
		if got := Accepted(r); got != want {
			t.Errorf("%q: %v", accept, got)
		}
	}
}
