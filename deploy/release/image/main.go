// Command image makes the OCI image of a release from the binaries that goreleaser built:
// one archive with an index of all architectures, without a container daemon. The same
// binaries give the same digest.
package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"encoding/pem"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// user is the user of the process. The number has no name in the image.
const user = 65532

func main() {
	dist := flag.String("dist", "dist", "folder in which goreleaser left metadata.json, artifacts.json and the binaries")
	date := flag.Int64("date", 0, "date of the image and its files, in seconds since 1970")
	flag.Parse()
	archive, digest, err := write(*dist, time.Unix(*date, 0).UTC())
	if err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
	fmt.Println(archive, digest)
}

// metadata is the part of goreleaser's metadata.json that the image needs.
type metadata struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
}

// artifact is an entry of goreleaser's artifacts.json.
type artifact struct {
	Path string `json:"path"`
	OS   string `json:"goos"`
	Arch string `json:"goarch"`
	Type string `json:"type"`
}

// write makes the archive in dist and returns its path and the digest of the index.
func write(dist string, date time.Time) (archive, digest string, err error) {
	var m metadata
	var all []artifact
	if err := read(filepath.Join(dist, "metadata.json"), &m); err != nil {
		return "", "", err
	}
	if err := read(filepath.Join(dist, "artifacts.json"), &all); err != nil {
		return "", "", err
	}
	var binaries []artifact
	for _, a := range all {
		if a.Type == "Binary" && a.OS == "linux" {
			binaries = append(binaries, a)
		}
	}
	if len(binaries) == 0 {
		return "", "", fmt.Errorf("%s/artifacts.json has no binary for linux", dist)
	}
	slices.SortFunc(binaries, func(a, b artifact) int { return bytes.Compare([]byte(a.Arch), []byte(b.Arch)) })
	index, err := makeIndex(m, date, dist, binaries)
	if err != nil {
		return "", "", err
	}
	hash, err := index.Digest()
	if err != nil {
		return "", "", err
	}
	archive = filepath.Join(dist, fmt.Sprintf("pdproxy_%s_image.tar", m.Version))
	return archive, hash.String(), writeArchive(archive, index)
}

func read(path string, v any) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// makeIndex returns the image for each binary, in one index.
func makeIndex(m metadata, date time.Time, dist string, binaries []artifact) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, b := range binaries {
		// goreleaser writes paths from the folder in which it runs.
		binary, err := os.ReadFile(filepath.Join(filepath.Dir(filepath.Clean(dist)), b.Path))
		if err != nil {
			return nil, err
		}
		image, err := makeImage(m, date, b.Arch, binary)
		if err != nil {
			return nil, err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        image,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: b.Arch}},
		})
	}
	return index, nil
}

// makeImage returns the image of one architecture: one layer with few files, and no base image.
func makeImage(m metadata, date time.Time, arch string, binary []byte) (v1.Image, error) {
	files, err := layer(binary, date)
	if err != nil {
		return nil, err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(files)), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err = mutate.Append(image, mutate.Addendum{Layer: l, MediaType: types.OCILayer, History: v1.History{
		Created: v1.Time{Time: date}, CreatedBy: "deploy/release/image",
	}})
	if err != nil {
		return nil, err
	}
	file, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Created = "linux", arch, v1.Time{Time: date}
	file.Config = v1.Config{
		User:       fmt.Sprintf("%d:%d", user, user),
		Entrypoint: []string{"/pdproxy"},
		Cmd:        []string{"run", "/etc/pdproxy/config.toml"},
		WorkingDir: "/",
		Env:        []string{"PATH=/", "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt", "XDG_CACHE_HOME=/var/cache"},
		Labels: map[string]string{
			"org.opencontainers.image.title":    "pdproxy",
			"org.opencontainers.image.source":   "https://github.com/pdproxy/pdproxy",
			"org.opencontainers.image.licenses": "Apache-2.0",
			"org.opencontainers.image.version":  m.Version,
			"org.opencontainers.image.revision": m.Commit,
		},
	}
	return mutate.ConfigFile(image, file)
}

// layer returns the files of the image as a tar archive: the program, the certificates of
// the public authorities, and the folders to which the program writes.
func layer(binary []byte, date time.Time) ([]byte, error) {
	var roots bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint != nil { // a PEM file cannot hold the constraint
			continue
		}
		if err := pem.Encode(&roots, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}); err != nil {
			return nil, err
		}
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range []struct {
		name  string
		mode  fs.FileMode
		owner int
		data  []byte
	}{
		{"etc/", 0o755, 0, nil},
		{"etc/pdproxy/", 0o755, 0, nil},
		{"etc/ssl/", 0o755, 0, nil},
		{"etc/ssl/certs/", 0o755, 0, nil},
		{"etc/ssl/certs/ca-certificates.crt", 0o644, 0, roots.Bytes()},
		{"pdproxy", 0o755, 0, binary},
		{"run/", 0o755, 0, nil},
		{"run/pdproxy/", 0o700, user, nil},
		{"tmp/", 0o1777, 0, nil},
		{"var/", 0o755, 0, nil},
		{"var/cache/", 0o755, 0, nil},
		{"var/cache/pdproxy/", 0o700, user, nil},
	} {
		h := &tar.Header{Name: f.name, Mode: int64(f.mode), Uid: f.owner, Gid: f.owner, Size: int64(len(f.data)), ModTime: date, Typeflag: tar.TypeReg, Format: tar.FormatPAX}
		if f.data == nil {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.data); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), w.Close()
}

// writeArchive writes an OCI layout as a tar archive.
func writeArchive(path string, index v1.ImageIndex) error {
	dir, err := os.MkdirTemp(filepath.Dir(path), "image")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	outer, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	if err := outer.AppendIndex(index); err != nil {
		return err
	}
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	defer out.Close()
	w := tar.NewWriter(out)
	err = filepath.WalkDir(dir, func(file string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, file)
		if err != nil {
			return err
		}
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		h := &tar.Header{Name: filepath.ToSlash(name), Mode: 0o644, Size: int64(len(data)), Typeflag: tar.TypeReg, ModTime: time.Unix(0, 0)}
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		_, err = w.Write(data)
		return err
	})
	if err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return out.Close()
}
