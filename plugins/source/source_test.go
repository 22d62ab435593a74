package source

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// digestOfABC is from FIPS 180-2, appendix B.1.
const digestOfABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

func file(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "m.wasm")
	write(t, path, content)
	return path
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestRead(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/abc", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "abc") })
	mux.HandleFunc("/huge", func(w http.ResponseWriter, _ *http.Request) {
		chunk := make([]byte, 1<<20)
		for range MaxSize>>20 + 1 {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	abc, empty, dir := file(t, "abc"), file(t, ""), t.TempDir()
	huge := file(t, "x")
	if err := os.Truncate(huge, MaxSize+1); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		location, pin, want string
	}{
		"file":           {abc, "", ""},
		"file with pin":  {abc, digestOfABC, ""},
		"pin upper case": {abc, strings.ToUpper(digestOfABC), ""},
		"other pin":      {abc, strings.Repeat("0", 64), "pinned sha256"},
		"no file":        {filepath.Join(dir, "none"), "", "no such file"},
		"directory":      {dir, "", "not a regular file"},
		"empty file":     {empty, "", "empty"},
		"huge file":      {huge, "", "larger than"},
		"URL":            {server.URL + "/abc", digestOfABC, ""},
		"URL other pin":  {server.URL + "/abc", strings.Repeat("f", 64), "pinned sha256"},
		"URL not found":  {server.URL + "/none", "", "status 404"},
		"URL huge":       {server.URL + "/huge", "", "larger than"},
		"URL no server":  {"http://127.0.0.1:1/secret?token=t0p", "", "refused"},
		"URL nonsense":   {"http://[::1/secret?token=t0p", "", "invalid URL"},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := Source{Location: tt.location, SHA256: tt.pin}.Read(t.Context(), "")
			if tt.want == "" {
				if err != nil || string(c.Wasm) != "abc" || c.SHA256 != digestOfABC {
					t.Fatalf("got %+v, %v", c, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "t0p") {
				t.Errorf("got error %v, want one with %q", err, tt.want)
			}
		})
	}
	if _, err := (Source{Location: abc, SHA256: strings.Repeat("0", 64)}).Read(t.Context(), ""); !errors.Is(err, ErrDigest) {
		t.Errorf("error for another digest: %v", err)
	}
}

func TestReadCancelled(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer server.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := (Source{Location: server.URL}).Read(ctx, ""); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestWatch(t *testing.T) {
	path := file(t, "abc")
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	replace := func(content string) {
		other := path + ".new"
		write(t, other, content)
		if err := os.Rename(other, path); err != nil {
			t.Fatal(err)
		}
	}
	w := NewWatch(Source{Location: path}, digestOfABC)
	for _, step := range []struct {
		name string
		do   func()
		want bool
	}{
		{"nothing", func() {}, false},
		{"still nothing", func() {}, false},
		{"same bytes again", func() { replace("abc") }, false},
		{"touched", func() { os.Chtimes(path, time.Time{}, time.Now().Add(time.Hour)) }, false},
		{"other bytes of the same size and time", func() {
			write(t, path, "abd")
			os.Chtimes(path, info.ModTime(), info.ModTime())
		}, false},
		{"they rest", func() {}, true},
		{"they are known", func() {}, false},
		{"half written", func() { write(t, path, "ab") }, false},
		{"written further", func() { write(t, path, "abcd") }, false},
		{"it rests", func() {}, true},
		{"gone", func() { os.Remove(path) }, false},
		{"still gone", func() {}, false},
		{"renamed into place", func() { replace("xyz") }, false},
		{"it rests again", func() {}, true},
		{"back before it rested", func() { replace("zyx") }, false},
		{"as it was", func() { replace("xyz") }, false},
		{"and rests", func() {}, false},
	} {
		step.do()
		if got := w.Changed(); got != step.want {
			t.Fatalf("%s: changed %v", step.name, got)
		}
	}
	remote := NewWatch(Source{Location: "http://127.0.0.1:1/m"}, "")
	for range 2 {
		if remote.Changed() {
			t.Error("a remote source changed")
		}
	}
}
