package source

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"path"
	"strconv"
	"strings"
	"testing"
)

// FuzzArtifact: a registry answers any manifest, of any type, and any layers. Read returns the
// bytes of the module that the manifest names, or an error, and the cache changes nothing.
// In the manifest, DIGEST and SIZE stand for those of the layer, because no mutation finds them.
func FuzzArtifact(f *testing.F) {
	const manifestType = "application/vnd.oci.image.manifest.v1+json"
	f.Setenv("DOCKER_CONFIG", f.TempDir())
	module := `{"mediaType":"application/wasm","digest":"DIGEST","size":SIZE}`
	signature := `{"mediaType":"application/vnd.pdproxy.minisign","digest":"DIGEST","size":SIZE}`
	for _, layers := range []string{
		module, module + "," + signature, module + "," + module, signature, "", "null", `{"mediaType":"application/wasm"}`,
		strings.Replace(module, "SIZE", "-1", 1), strings.Replace(module, "SIZE", "67108865", 1), strings.Replace(module, "SIZE", "1e999", 1),
		strings.Replace(module, "DIGEST", "sha256:..", 1), strings.Replace(module, "DIGEST", "sha512:00", 1), strings.Replace(module, "DIGEST", "../../x", 1),
	} {
		f.Add(manifestType, []byte(`{"schemaVersion":2,"mediaType":"`+manifestType+`","layers":[`+layers+`]}`), []byte("\x00asm module"))
	}
	f.Add("application/vnd.oci.image.index.v1+json", []byte(`{"manifests":[{"digest":"DIGEST","size":SIZE}]}`), []byte("x"))
	f.Add("text/html", []byte("<!doctype html><title>Sign in</title>"), []byte("x"))
	f.Add("", []byte{}, []byte{})

	var contentType string
	var manifest, layer []byte
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer := layer
		if strings.Contains(r.URL.Path, "/manifests/") {
			w.Header().Set("Content-Type", contentType)
			answer = manifest
		} else if path.Base(r.URL.Path) != digestOf(layer) {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Docker-Content-Digest", digestOf(answer))
		w.Header().Set("Content-Length", strconv.Itoa(len(answer)))
		if r.Method == http.MethodGet {
			_, _ = w.Write(answer)
		}
	}))
	f.Cleanup(server.Close)
	location := "oci://" + strings.TrimPrefix(server.URL, "http://") + "/p:1"
	f.Fuzz(func(t *testing.T, kind string, text, blob []byte) {
		contentType, layer = strings.Map(func(r rune) rune { // what a header can carry
			if r < ' ' || r > '~' {
				return -1
			}
			return r
		}, kind), blob
		manifest = bytes.ReplaceAll(bytes.ReplaceAll(text, []byte("DIGEST"), []byte(digestOf(blob))), []byte("SIZE"), []byte(strconv.Itoa(len(blob))))
		cache := t.TempDir()
		first, err := Source{Location: location}.Read(t.Context(), cache)
		if err == nil && (!bytes.Equal(first.Wasm, blob) || "sha256:"+first.SHA256 != digestOf(blob)) {
			t.Errorf("read %q with digest %s, want %q", first.Wasm, first.SHA256, blob)
		}
		again, cached := Source{Location: location}.Read(t.Context(), cache)
		if (err == nil) != (cached == nil) || !bytes.Equal(first.Wasm, again.Wasm) {
			t.Errorf("first %q, %v; with the cache %q, %v", first.Wasm, err, again.Wasm, cached)
		}
	})
}
