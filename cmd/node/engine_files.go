package node

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/pdproxy/pdproxy/proxy/accesslog"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/pemfile"
)

// noteEngineFiles reads the files that the keys of engines name. It calls note with each
// key and the error of its file, which may be nil.
func noteEngineFiles(engines []config.Engine, note func(key string, err error)) {
	for i, e := range engines {
		noteFilesOf(fmt.Sprintf("engine[%d]", i), e.APIKeyFile, e.CA, note)
	}
}

// noteRemoteFiles is noteEngineFiles for remotes.
func noteRemoteFiles(remotes []config.Remote, note func(key string, err error)) {
	for i, r := range remotes {
		noteFilesOf(fmt.Sprintf("remote[%d]", i), r.APIKeyFile, r.CA, note)
	}
}

// noteFilesOf reads the two files of the entry at. A path may be empty.
func noteFilesOf(at, apiKeyFile, ca string, note func(key string, err error)) {
	_, err := config.ReadSecret(apiKeyFile)
	note(at+".api_key_file", err)
	if ca != "" {
		_, err = readCAs(at+".ca", ca)
		note(at+".ca", err)
	}
}

// readCAs returns the certificates of the file that key names. The error is of type
// pemfile.Errors.
func readCAs(key, path string) (*x509.CertPool, error) {
	var r pemfile.Reader
	pool := r.Pool(pemfile.File{Key: key, Path: path})
	_, err := r.Sum()
	return pool, err
}

// noteWrittenFiles calls note with each key that names a file that the proxy writes, and
// with the reason why the file cannot be opened, which may be nil. It creates no file.
func noteWrittenFiles(cfg *config.Config, note func(key string, err error)) {
	if path := cfg.Server.AccessLog; path != accesslog.Stderr {
		note("server.access_log", checkWritten(path))
	}
	note("recording.path", checkWritten(cfg.Recording.Path))
}

// checkWritten returns an error if path names a folder, or a file in a missing folder. The
// text is that of the error of opening the file. The path may be empty.
func checkWritten(path string) error {
	if path == "" {
		return nil
	}
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) { // opening the file creates it
		_, err = os.Stat(filepath.Dir(path))
	}
	var cause syscall.Errno
	switch {
	case err == nil && info != nil && info.IsDir():
		return &fs.PathError{Op: "open", Path: path, Err: syscall.EISDIR}
	case errors.As(err, &cause):
		return &fs.PathError{Op: "open", Path: path, Err: cause}
	}
	return err
}
