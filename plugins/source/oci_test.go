package source

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"aead.dev/minisign"
)

// fakeRegistry has the parts of the distribution protocol that pull and push use.
// conformance/plugins uses a real registry.
type fakeRegistry struct {
	mu    sync.Mutex
	blobs map[string][]byte // by digest
	tags  map[string]string // digest of a manifest by tag
	reads int               // of manifests and blobs
	down  bool
	moved string // digest of a blob that is somewhere else
}

// put stores a manifest with these layers, in JSON, under a tag.
func (f *fakeRegistry) put(tag, layers string) {
	b := []byte(`{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","layers":[` + layers + `]}`)
	f.blobs[digestOf(b)], f.tags[tag] = b, digestOf(b)
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func (f *fakeRegistry) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	name := path.Base(r.URL.Path)
	manifest := strings.Contains(r.URL.Path, "/manifests/")
	switch {
	case f.down:
		w.WriteHeader(http.StatusServiceUnavailable)
	case name == f.moved:
		http.Redirect(w, r, "/elsewhere?signature=secret", http.StatusTemporaryRedirect)
	case r.Method == http.MethodPost:
		w.Header().Set("Location", r.URL.Path+"upload")
		w.WriteHeader(http.StatusAccepted)
	case r.Method == http.MethodPut:
		b, _ := io.ReadAll(r.Body)
		digest := digestOf(b)
		f.blobs[digest] = b
		if manifest {
			f.tags[name] = digest
		}
		w.Header().Set("Docker-Content-Digest", digest)
		w.WriteHeader(http.StatusCreated)
	default:
		if tagged, ok := f.tags[name]; ok {
			name = tagged
		}
		b, ok := f.blobs[name]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		if manifest {
			w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
		}
		w.Header().Set("Docker-Content-Digest", name)
		w.Header().Set("Content-Length", fmt.Sprint(len(b)))
		if r.Method == http.MethodGet {
			f.reads++
			_, _ = w.Write(b)
		}
	}
}

func startRegistry(t *testing.T) (*fakeRegistry, string) {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir()) // no credentials of this user
	f := &fakeRegistry{blobs: map[string][]byte{}, tags: map[string]string{}}
	server := httptest.NewServer(f)
	t.Cleanup(server.Close)
	return f, "oci://" + strings.TrimPrefix(server.URL, "http://") + "/plugins/p"
}

func TestRegistry(t *testing.T) {
	f, repository := startRegistry(t)
	public, private, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	module := []byte("\x00asm module")
	digest, err := Push(t.Context(), repository+":1", module, minisign.Sign(private, module))
	if err != nil {
		t.Fatal(err)
	}
	f.reads = 0
	cache := t.TempDir()
	s := Source{Location: repository + ":1", PublicKey: public.String(), SHA256: strings.TrimPrefix(digestOf(module), "sha256:")}
	for range 2 {
		c, err := s.Read(t.Context(), cache)
		if err != nil || string(c.Wasm) != string(module) {
			t.Fatalf("%q, %v", c.Wasm, err)
		}
	}
	if f.reads != 4 { // twice the manifest of the tag, once each of the two layers
		t.Errorf("got %d reads", f.reads)
	}
	// A digest names the same content always, so the registry is not needed again.
	f.mu.Lock()
	f.down = true
	f.mu.Unlock()
	s.Location = repository + "@" + digest
	if _, err := s.Read(t.Context(), cache); err != nil {
		t.Error(err)
	}
	s.Location = repository + ":1"
	if _, err := s.Read(t.Context(), cache); err == nil || !strings.Contains(err.Error(), "503") {
		t.Errorf("a registry that is down: %v", err)
	}
}

// TestDamagedCache: a file in the cache with other content is downloaded again.
func TestDamagedCache(t *testing.T) {
	_, repository := startRegistry(t)
	module := []byte("\x00asm module")
	if _, err := Push(t.Context(), repository+":1", module, nil); err != nil {
		t.Fatal(err)
	}
	cache := t.TempDir()
	s := Source{Location: repository + ":1"}
	if _, err := s.Read(t.Context(), cache); err != nil {
		t.Fatal(err)
	}
	kept := filepath.Join(cache, "oci", strings.Replace(digestOf(module), ":", "-", 1))
	if err := os.WriteFile(kept, []byte("\x00asm forged"), 0o600); err != nil {
		t.Fatal(err)
	}
	if c, err := s.Read(t.Context(), cache); err != nil || string(c.Wasm) != string(module) {
		t.Errorf("%q, %v", c.Wasm, err)
	}
}

func TestRegistryRefusals(t *testing.T) {
	f, repository := startRegistry(t)
	module := []byte("\x00asm module")
	if _, err := Push(t.Context(), repository+":unsigned", module, nil); err != nil {
		t.Fatal(err)
	}
	public, _, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	layer := func(mediaType string, size int) string {
		return fmt.Sprintf(`{"mediaType":%q,"digest":%q,"size":%d}`, mediaType, digestOf(module), size)
	}
	moved := []byte("elsewhere")
	f.put("moved", fmt.Sprintf(`{"mediaType":%q,"digest":%q,"size":%d}`, moduleType, digestOf(moved), len(moved)))
	f.moved = digestOf(moved)
	f.put("image", layer("application/vnd.oci.image.layer.v1.tar+gzip", len(module)))
	f.put("two", layer(moduleType, len(module))+","+layer(moduleType, len(module)))
	f.put("huge", layer(moduleType, MaxSize+1))
	f.put("longer", layer(moduleType, len(module)-1))
	for name, tt := range map[string]struct {
		source Source
		want   string
	}{
		"no signature": {Source{Location: repository + ":unsigned", PublicKey: public.String()}, "the artifact has no signature"},
		"other pin":    {Source{Location: repository + ":unsigned", SHA256: strings.Repeat("0", 64)}, "pinned sha256"},
		"no such tag":  {Source{Location: repository + ":absent"}, "not found"},
		"no tag":       {Source{Location: repository}, "the tag or the digest is missing"},
		"no repo":      {Source{Location: "oci://localhost"}, "want oci://"},
		"an image":     {Source{Location: repository + ":image"}, "0 layers of type application/wasm"},
		"two modules":  {Source{Location: repository + ":two"}, "2 layers"},
		"moved":        {Source{Location: repository + ":moved"}, "not found"},
		"huge":         {Source{Location: repository + ":huge"}, "want 1 to"},
		"wrong size":   {Source{Location: repository + ":longer"}, "mismatch"},
	} {
		t.Run(name, func(t *testing.T) {
			f.reads = 0
			if _, err := tt.source.Read(t.Context(), ""); err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "secret") {
				t.Errorf("got error %v, want %q", err, tt.want)
			}
			if name == "two modules" && f.reads != 1 {
				t.Errorf("got %d reads, want the manifest only", f.reads)
			}
		})
	}
	for location, want := range map[string]string{
		"http://127.0.0.1/p:1": "want oci://", repository + "@" + digestOf(module): "name a tag", repository: "missing",
	} {
		if _, err := Push(t.Context(), location, module, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("push to %s: %v", location, err)
		}
	}
}

func TestSignature(t *testing.T) {
	public, private, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	other, otherPrivate, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	module := []byte("\x00asm module")
	for name, tt := range map[string]struct {
		key       string
		signature []byte // nil: no file
		want      string // "": accepted
	}{
		"valid":         {public.String(), minisign.Sign(private, module), ""},
		"no key":        {"", nil, ""},
		"no file":       {public.String(), nil, "read signature"},
		"other key":     {other.String(), minisign.Sign(private, module), "the signature is by key"},
		"other signer":  {public.String(), minisign.Sign(otherPrivate, module), "the signature is by key"},
		"other file":    {public.String(), minisign.Sign(private, []byte("other")), "is of another file"},
		"not minisign":  {public.String(), []byte("-----BEGIN PGP SIGNATURE-----\n"), "not a minisign signature"},
		"too large":     {public.String(), make([]byte, maxSignature+1), "larger than"},
		"no public key": {"RW", minisign.Sign(private, module), "public_key"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			files := map[string][]byte{"p.wasm": module}
			if tt.signature != nil {
				files["p.wasm.minisig"], files["else"] = tt.signature, tt.signature
			}
			for name, b := range files {
				if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			server := httptest.NewServer(http.FileServer(http.Dir(dir)))
			defer server.Close()
			for _, s := range []Source{
				{Location: filepath.Join(dir, "p.wasm"), PublicKey: tt.key},
				{Location: filepath.Join(dir, "p.wasm"), PublicKey: tt.key, Signature: filepath.Join(dir, "else")},
				{Location: server.URL + "/p.wasm?token=secret", PublicKey: tt.key},
				{Location: server.URL + "/p.wasm", PublicKey: tt.key, Signature: server.URL + "/else"},
			} {
				_, err := s.Read(t.Context(), "")
				switch {
				case tt.want == "" && err != nil:
					t.Error(err)
				case tt.want != "" && (!errors.Is(err, ErrSignature) || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "secret")):
					t.Errorf("got error %v, want %q", err, tt.want)
				}
			}
		})
	}
}

// TestWatchSignature: a signature that arrives after its module is new content.
func TestWatchSignature(t *testing.T) {
	public, private, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	place := filepath.Join(t.TempDir(), "p.wasm")
	write := func(path string, b []byte) {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(place, []byte("old"))
	write(place+".minisig", minisign.Sign(private, []byte("old")))
	s := Source{Location: place, PublicKey: public.String()}
	c, err := s.Read(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	w := NewWatch(s, c.SHA256)
	changes := func() bool { // the second poll sees the same content as the first
		if w.Changed() {
			return true
		}
		return w.Changed()
	}
	if changes() {
		t.Error("nothing has changed")
	}
	write(place, []byte("new"))
	if !changes() {
		t.Error("a new module was not noticed")
	}
	if _, err := s.Read(t.Context(), ""); !errors.Is(err, ErrSignature) {
		t.Errorf("the old signature: %v", err)
	}
	write(place+".minisig", minisign.Sign(private, []byte("new")))
	if !changes() {
		t.Error("the new signature was not noticed")
	}
	if _, err := s.Read(t.Context(), ""); err != nil {
		t.Error(err)
	}
}
