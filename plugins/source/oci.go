package source

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/content"
	"oras.land/oras-go/v2/registry"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/credentials"
)

// ociPrefix begins the location of a module in a registry of OCI artifacts.
const ociPrefix = "oci://"

// The media types of the layers of an artifact. Artifacts have one module, and at
// most one signature. Other tools use the other types for a module.
const (
	moduleType    = "application/wasm"
	signatureType = "application/vnd.pdproxy.minisign"
	artifactType  = "application/vnd.pdproxy.plugin.v1"
)

var moduleTypes = []string{moduleType, "application/vnd.wasm.content.layer.v1+wasm", "application/vnd.module.wasm.content.layer.v1+wasm"}

// maxManifest is the largest manifest that is read, in bytes.
const maxManifest = 1 << 20

// parseOCI parses a location oci://REGISTRY/REPOSITORY:TAG or @sha256:DIGEST.
func parseOCI(location string) (registry.Reference, error) {
	ref, err := registry.ParseReference(strings.TrimPrefix(location, ociPrefix))
	if err != nil {
		return ref, fmt.Errorf("%s: want oci://REGISTRY/REPOSITORY:TAG or @sha256:DIGEST: %w", location, err)
	}
	if ref.Reference == "" {
		return ref, fmt.Errorf("%s: the tag or the digest is missing", location)
	}
	return ref, nil
}

// repository returns the repository of ref, with the credentials of Docker's configuration file. A
// registry on this host is reached over plain HTTP, as Docker does; every other registry over
// HTTPS. The caller calls the returned function at the end.
func repository(ref registry.Reference) (*remote.Repository, func(), error) {
	repo, err := remote.NewRepository(ref.Registry + "/" + ref.Repository)
	if err != nil {
		return nil, nil, err
	}
	host, _, err := net.SplitHostPort(ref.Registry)
	if err != nil {
		host = ref.Registry
	}
	ip := net.ParseIP(host)
	repo.PlainHTTP = host == "localhost" || ip != nil && ip.IsLoopback()
	repo.MaxMetadataBytes = maxManifest
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, ForceAttemptHTTP2: true}
	client := &auth.Client{Client: &http.Client{Transport: transport}, Cache: auth.NewCache(), Header: http.Header{"User-Agent": {"pdproxy"}}}
	store, err := credentials.NewStoreFromDocker(credentials.StoreOptions{})
	if err != nil {
		return nil, nil, fmt.Errorf("read Docker's configuration: %w", err)
	}
	client.Credential = credentials.Credential(store)
	repo.Client = client
	return repo, transport.CloseIdleConnections, nil
}

// pull reads the module of an artifact, and its signature if it has one. cache is a
// private folder for modules by their digest, "" for none.
func (s Source) pull(ctx context.Context, cache string) (wasm, signature []byte, err error) {
	ref, err := parseOCI(s.Location)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, downloadTimeout)
	defer cancel()
	repo, closeIdle, err := repository(ref)
	if err != nil {
		return nil, nil, err
	}
	defer closeIdle()
	desc, manifest, err := fetchManifest(ctx, repo, ref.Reference, cache)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", s.Location, withoutQuery(err))
	}
	if desc.MediaType == ocispec.MediaTypeImageIndex {
		return nil, nil, fmt.Errorf("%s is an index of several artifacts; name one of them", s.Location)
	}
	module, signed, err := layers(manifest)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", s.Location, err)
	}
	if wasm, err = fetchBlob(ctx, repo, module, MaxSize, cache); err == nil && signed != nil {
		signature, err = fetchBlob(ctx, repo, *signed, maxSignature, cache)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", s.Location, withoutQuery(err))
	}
	return wasm, signature, nil
}

// layers returns the descriptor of the module in a manifest, and that of its signature, nil
// for none. The manifest may list layers of other types.
func layers(manifest []byte) (module ocispec.Descriptor, signature *ocispec.Descriptor, err error) {
	var m ocispec.Manifest
	if err := json.Unmarshal(manifest, &m); err != nil {
		return module, nil, fmt.Errorf("read manifest: %w", err)
	}
	modules, signatures := 0, 0
	for i, layer := range m.Layers {
		switch {
		case slices.Contains(moduleTypes, layer.MediaType):
			modules, module = modules+1, layer
		case layer.MediaType == signatureType:
			signatures, signature = signatures+1, &m.Layers[i]
		}
	}
	if modules != 1 || signatures > 1 {
		return module, nil, fmt.Errorf("the artifact has %d layers of type %s and %d signatures, want one module and at most one signature (pdproxy plugin push makes such artifacts)", modules, moduleType, signatures)
	}
	return module, signature, nil
}

// withoutQuery removes the queries of URLs from the text of an error: a registry may
// redirect to a URL whose query is a secret.
func withoutQuery(err error) error {
	if text := queries.ReplaceAllString(err.Error(), ""); text != err.Error() {
		return errors.New(text)
	}
	return err
}

var queries = regexp.MustCompile(`\?[^\s"]*`)

// fetchManifest returns the manifest of a tag or a digest. A manifest that is named by
// its digest comes from the cache if it is there.
func fetchManifest(ctx context.Context, repo *remote.Repository, reference, cache string) (ocispec.Descriptor, []byte, error) {
	if want := digest.Digest(reference); want.Validate() == nil {
		if b := readCache(cache, want); b != nil {
			var media struct{ MediaType string }
			_ = json.Unmarshal(b, &media) // the caller reads the manifest and reports the error
			return ocispec.Descriptor{MediaType: media.MediaType, Digest: want, Size: int64(len(b))}, b, nil
		}
	}
	desc, b, err := oras.FetchBytes(ctx, repo, reference, oras.FetchBytesOptions{MaxBytes: maxManifest})
	if err == nil {
		writeCache(cache, desc.Digest, b)
	}
	return desc, b, err
}

// fetchBlob returns a layer of at most limit bytes, from the cache if it is there.
func fetchBlob(ctx context.Context, repo *remote.Repository, layer ocispec.Descriptor, limit int64, cache string) ([]byte, error) {
	if layer.Size > limit || layer.Size <= 0 {
		return nil, fmt.Errorf("a layer of %d bytes, want 1 to %d", layer.Size, limit)
	}
	if err := layer.Digest.Validate(); err != nil {
		return nil, err
	}
	if b := readCache(cache, layer.Digest); b != nil {
		return b, nil
	}
	body, err := repo.Fetch(ctx, layer)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	b, err := content.ReadAll(body, layer) // checks size and digest
	if err == nil {
		writeCache(cache, layer.Digest, b)
	}
	return b, err
}

// readCache returns the content with the digest, nil if the cache has none.
func readCache(cache string, want digest.Digest) []byte {
	if cache == "" || want.Algorithm() != digest.SHA256 {
		return nil
	}
	f, err := os.Open(cachePath(cache, want))
	if err != nil {
		return nil
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, MaxSize+1))
	if err != nil || want.Algorithm().FromBytes(b) != want {
		return nil
	}
	return b
}

// writeCache keeps content. A failure only means another download.
func writeCache(cache string, is digest.Digest, b []byte) {
	if cache == "" || is.Algorithm() != digest.SHA256 {
		return
	}
	path := cachePath(cache, is)
	if os.MkdirAll(filepath.Dir(path), 0o700) != nil {
		return
	}
	f, err := os.CreateTemp(filepath.Dir(path), "new-*")
	if err != nil {
		return
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
}

func cachePath(cache string, d digest.Digest) string {
	return filepath.Join(cache, "oci", d.Algorithm().String()+"-"+d.Encoded())
}

// Push stores a module, and its signature if there is one, in a registry as one
// artifact. It returns the digest of the artifact's manifest.
func Push(ctx context.Context, location string, wasm, signature []byte) (string, error) {
	if !strings.HasPrefix(location, ociPrefix) {
		return "", fmt.Errorf("%s: want oci://REGISTRY/REPOSITORY:TAG", location)
	}
	ref, err := parseOCI(location)
	if err != nil {
		return "", err
	}
	if ref.ValidateReferenceAsDigest() == nil {
		return "", fmt.Errorf("%s: name a tag; the digest results from the content", location)
	}
	repo, closeIdle, err := repository(ref)
	if err != nil {
		return "", err
	}
	defer closeIdle()
	ctx, cancel := context.WithTimeout(ctx, pushTimeout)
	defer cancel()
	var layers []ocispec.Descriptor
	for _, part := range []struct {
		mediaType string
		data      []byte
	}{{moduleType, wasm}, {signatureType, signature}} {
		if len(part.data) == 0 {
			continue
		}
		layer, err := oras.PushBytes(ctx, repo, part.mediaType, part.data)
		if err != nil {
			return "", fmt.Errorf("push %s: %w", location, withoutQuery(err))
		}
		layers = append(layers, layer)
	}
	desc, err := oras.PackManifest(ctx, repo, oras.PackManifestVersion1_1, artifactType, oras.PackManifestOptions{
		Layers: layers,
		// A fixed time: the same module has the same digest.
		ManifestAnnotations: map[string]string{ocispec.AnnotationCreated: "1970-01-01T00:00:00Z"},
	})
	if err == nil {
		err = repo.Tag(ctx, desc, ref.Reference)
	}
	if err != nil {
		return "", fmt.Errorf("push %s: %w", location, withoutQuery(err))
	}
	return desc.Digest.String(), nil
}
