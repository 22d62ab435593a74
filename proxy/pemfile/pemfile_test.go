package pemfile

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestErrors: each file that cannot be used has an error with its key, and the error contains
// nothing of the file.
func TestErrors(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"text": "sk-secret", "empty": "",
		"key":  "-----BEGIN PRIVATE KEY-----\nc2stc2VjcmV0\n-----END PRIVATE KEY-----\n",
		"cert": "-----BEGIN CERTIFICATE-----\nc2stc2VjcmV0\n-----END CERTIFICATE-----\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct{ cert, key, ca, want string }{
		{"none", "none", "none", "c: open DIR/none: no such file or directory; k: open DIR/none: no such file or directory; a: open DIR/none: no such file or directory"},
		{"text", "text", "text", "c: no certificate (PEM) in DIR/text; k: no private key (PEM) in DIR/text; a: no certificate (PEM) in DIR/text"},
		{"empty", "empty", "empty", "c: no certificate (PEM) in DIR/empty; k: no private key (PEM) in DIR/empty; a: no certificate (PEM) in DIR/empty"},
		{"cert", "key", "cert", "c: DIR/cert: x509: "},
	} {
		var r Reader
		file := func(key, name string) File { return File{key, filepath.Join(dir, name)} }
		r.Pair(file("c", tt.cert), file("k", tt.key))
		r.Pool(file("a", tt.ca))
		_, err := r.Sum()
		var each Errors
		if !errors.As(err, &each) {
			t.Fatalf("%+v: error %v", tt, err)
		}
		got := strings.ReplaceAll(err.Error(), dir, "DIR")
		if !strings.HasPrefix(got, tt.want) || strings.Contains(got, "secret") || strings.Contains(got, "c2st") {
			t.Errorf("%+v: got %s", tt, got)
		}
	}
}

// TestSum: the sum depends on the content and its division into files.
func TestSum(t *testing.T) {
	dir := t.TempDir()
	seen := map[[32]byte]string{}
	for _, texts := range [][2]string{{"ab", "c"}, {"a", "bc"}, {"", "abc"}} {
		var r Reader
		for i, text := range texts {
			path := filepath.Join(dir, string(rune('0'+i)))
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			r.read(File{"k", path})
		}
		sum, err := r.Sum()
		if err != nil || seen[sum] != "" {
			t.Errorf("%q: sum of %q, error %v", texts, seen[sum], err)
		}
		seen[sum] = strings.Join(texts[:], "|")
	}
	if sum, err := new(Reader).Sum(); err != nil || sum != [32]byte{} {
		t.Errorf("no file: %x, %v", sum, err)
	}
}
