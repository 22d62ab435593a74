package plugins

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"strings"
	"sync"
	"testing"
	"time"
)

// fakeRegistry answers every tag with an artifact that has one module.
type fakeRegistry struct {
	location string // of an artifact

	mu     sync.Mutex
	module []byte
	fail   http.HandlerFunc // answers in place of the registry; nil: nothing fails
}

func startRegistry(t *testing.T, module []byte) *fakeRegistry {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir()) // no credentials of this user
	f := &fakeRegistry{module: module}
	server := httptest.NewServer(f)
	t.Cleanup(server.Close)
	f.location = "oci://" + strings.TrimPrefix(server.URL, "http://") + "/plugins/p:1"
	return f
}

func (f *fakeRegistry) set(module []byte, fail http.HandlerFunc) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.module, f.fail = module, fail
}

func (f *fakeRegistry) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	module, fail := f.module, f.fail
	f.mu.Unlock()
	if fail != nil {
		fail(w, r)
		return
	}
	sum := sha256.Sum256(module)
	answer := module
	if strings.Contains(r.URL.Path, "/manifests/") {
		w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
		answer = fmt.Appendf(nil, `{"schemaVersion":2,"layers":[{"mediaType":"application/wasm","digest":"sha256:%x","size":%d}]}`, sum, len(module))
	} else if path.Base(r.URL.Path) != "sha256:"+hex.EncodeToString(sum[:]) {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Docker-Content-Digest", fmt.Sprintf("sha256:%x", sha256.Sum256(answer)))
	w.Header().Set("Content-Length", fmt.Sprint(len(answer)))
	if r.Method == http.MethodGet {
		_, _ = w.Write(answer)
	}
}

// onBlobs fails the requests for layers, after a manifest that is right.
func onBlobs(f *fakeRegistry, fail http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/blobs/") {
			fail(w, r)
			return
		}
		(&fakeRegistry{module: f.module}).ServeHTTP(w, r)
	}
}

// newRegistryWorld serves a plugin from a registry.
func newRegistryWorld(t *testing.T) (*world, *fakeRegistry) {
	t.Helper()
	spec := guest(t, "")
	module, err := os.ReadFile(spec.Source.Location)
	if err != nil {
		t.Fatal(err)
	}
	f := startRegistry(t, module)
	spec.Source.Location = f.location
	w := newWorld(t, spec)
	w.config.Place = "p"
	w.apply()
	return w, f
}

// version returns another version of a module, which no cache has: its last section is a
// custom one with a random name.
func version(module []byte) []byte {
	name := rand.Text()
	section := append([]byte{0, byte(2 + len(name)), byte(len(name))}, name...)
	return append(append(module[:len(module):len(module)], section...), 0)
}

// servesVersion checks that the version with the digest sha decides.
func (w *world) servesVersion(sha string) {
	w.t.Helper()
	if _, by, ok := w.place(""); by != "p" || !ok {
		w.t.Errorf("the plugin does not decide: %q, %v", by, ok)
	}
	if r := w.row("p", "place"); r.SHA256 != sha {
		w.t.Errorf("row %+v, want the version %s", r, sha)
	}
}

// TestRegistryFailsAtReload: whatever a registry answers when a plugin is loaded again, the
// running version stays, by POST .../reload and by SIGHUP.
func TestRegistryFailsAtReload(t *testing.T) {
	w, f := newRegistryWorld(t)
	second := version(f.module)
	sha := w.row("p", "place").SHA256
	answer := func(status int, contentType, text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", contentType)
			w.WriteHeader(status)
			_, _ = w.Write([]byte(text))
		}
	}
	const manifest = "application/vnd.oci.image.manifest.v1+json"
	abort := func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }
	for name, tt := range map[string]struct {
		module []byte
		fail   http.HandlerFunc
		want   string
	}{
		"away":            {second, answer(503, "text/plain", "away"), "503"},
		"needs a login":   {second, answer(401, "application/json", `{"errors":[{"code":"UNAUTHORIZED"}]}`), "401"},
		"hangs up":        {second, abort, "EOF"},
		"a web page":      {second, answer(200, "text/html", "<!doctype html>Sign in"), ""},
		"no JSON":         {second, answer(200, manifest, "\x00\x01"), ""},
		"no layers":       {second, answer(200, manifest, `{"schemaVersion":2}`), ""},
		"layer is absent": {second, onBlobs(f, http.NotFound), "not found"},
		"layer ends":      {second, onBlobs(f, abort), "EOF"},
		"other layer":     {second, onBlobs(f, answer(200, "application/octet-stream", string(second[1:])+"x")), "mismatch"},
		"no module":       {[]byte("no WebAssembly"), nil, "not WebAssembly"},
	} {
		t.Run(name, func(t *testing.T) {
			f.set(tt.module, tt.fail)
			if err := w.Reload(t.Context(), "p"); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("reload: %v, want %q", err, tt.want)
			}
			if r := w.row("p", "place"); r.State != "failed" {
				t.Errorf("row %+v", r)
			}
			if err := w.Apply(t.Context(), w.config); err == nil || !strings.Contains(err.Error(), "plugin[0]") {
				t.Errorf("apply: %v", err)
			}
			w.servesVersion(sha)
		})
	}
	f.set(second, nil)
	if err := w.Reload(t.Context(), "p"); err != nil {
		t.Fatal(err)
	}
	if r := w.row("p", "place"); r.State != "active" || r.SHA256 == sha {
		t.Errorf("row %+v", r)
	}
}

// TestRegistryHangsAtReload: while registries do not answer, the running versions decide, a
// trial can end and the Set can close. Each plugin's registry is asked at the same time, so
// that the limit of one download is the limit of all.
func TestRegistryHangsAtReload(t *testing.T) {
	w, f := newRegistryWorld(t)
	other := w.config.Plugins[0]
	other.Name = "q"
	w.config.Plugins = append(w.config.Plugins, other)
	w.apply()
	sha := w.row("p", "place").SHA256
	arrived := make(chan struct{}, 4)
	f.set(f.module, func(_ http.ResponseWriter, r *http.Request) {
		arrived <- struct{}{}
		<-r.Context().Done()
	})
	for name, load := range map[string]func(context.Context) error{
		"apply":  func(ctx context.Context) error { return w.Apply(ctx, w.config) },
		"reload": func(ctx context.Context) error { return w.Reload(ctx, "p") },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- load(ctx) }()
		requests := 1
		if name == "apply" {
			requests = 2
		}
		for range requests {
			select {
			case <-arrived:
			case err := <-done:
				t.Fatalf("%s ended before every registry got a request: %v", name, err)
			}
		}
		w.servesVersion(sha)
		w.endTrials(time.Now())
		cancel()
		if err := <-done; err == nil || !strings.Contains(err.Error(), context.Canceled.Error()) {
			t.Errorf("%s: %v", name, err)
		}
		w.servesVersion(sha)
	}
	done := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() { done <- w.Reload(ctx, "p") }()
	<-arrived
	if err := w.Close(ctx); err != nil {
		t.Error(err)
	}
	cancel()
	if err := <-done; err == nil {
		t.Error("a closed Set loaded a plugin")
	}
}
