package node

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestCompileCache: machine code comes only from a folder to which no other user can
// write, and in which no other user has written.
func TestCompileCache(t *testing.T) {
	const stranger = 65534
	const version = "pdproxy/compiled/wazero-v1"
	for name, c := range map[string]struct {
		root bool
		make func(at func(string) string) error
		want string // in the log; "": the folder is used
	}{
		"new":                   {make: func(func(string) string) error { return nil }},
		"used":                  {make: func(at func(string) string) error { return nil }},
		"readable folder above": {make: func(at func(string) string) error { return os.Chmod(at("pdproxy"), 0o755) }},
		"link above": {make: func(at func(string) string) error {
			return errors.Join(os.Rename(at("pdproxy"), at("real")), os.Symlink("real", at("pdproxy")))
		}},
		"folder open to others": {want: "compiled is open to other users", make: func(at func(string) string) error {
			return os.Chmod(at("pdproxy/compiled"), 0o777)
		}},
		"folder above open to others": {want: "can be changed by other users", make: func(at func(string) string) error {
			return os.Chmod(at(""), 0o777)
		}},
		"folder below open to others": {want: "wazero-v1 is open to other users", make: func(at func(string) string) error {
			return os.Chmod(at(version), 0o777)
		}},
		"entry open to others": {want: "entry can be changed by other users", make: func(at func(string) string) error {
			return os.Chmod(at(version+"/entry"), 0o666)
		}},
		"entry a link": {want: "entry is not a regular file", make: func(at func(string) string) error {
			return errors.Join(os.Remove(at(version+"/entry")), os.Symlink("/etc/hostname", at(version+"/entry")))
		}},
		"folder a link": {want: "is not a folder", make: func(at func(string) string) error {
			return errors.Join(os.Rename(at("pdproxy/compiled"), at("real")), os.Symlink("../real", at("pdproxy/compiled")))
		}},
		"folder below a link": {want: "wazero-v1 is not a regular file", make: func(at func(string) string) error {
			return errors.Join(os.Rename(at(version), at("real")), os.Symlink(at("real"), at(version)))
		}},
		"folder of a stranger": {root: true, want: "compiled does not belong to user 0", make: func(at func(string) string) error {
			return os.Chown(at("pdproxy/compiled"), stranger, stranger)
		}},
		"folder below of a stranger": {root: true, want: "wazero-v1 does not belong to user 0", make: func(at func(string) string) error {
			return os.Chown(at(version), stranger, stranger)
		}},
		"entry of a stranger": {root: true, want: "entry does not belong to user 0", make: func(at func(string) string) error {
			return os.Chown(at(version+"/entry"), stranger, stranger)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			if c.root && os.Geteuid() != 0 {
				t.Skip("this case needs root; make test-all runs it as root")
			}
			base := filepath.Join(t.TempDir(), "cache")
			t.Setenv("XDG_CACHE_HOME", base)
			t.Setenv("HOME", filepath.Dir(base)) // other systems derive the folder from HOME
			base, err := os.UserCacheDir()
			if err != nil {
				t.Fatal(err)
			}
			at := func(name string) string { return filepath.Join(base, name) }
			if name != "new" {
				if err := errors.Join(os.MkdirAll(at(version), 0o700), os.WriteFile(at(version+"/entry"), nil, 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			if err := c.make(at); err != nil {
				t.Fatal(err)
			}
			var log bytes.Buffer
			got := CompileCache(slog.New(slog.NewTextHandler(&log, nil)))
			switch {
			case c.want == "" && (got != at("pdproxy/compiled") || log.Len() > 0):
				t.Errorf("%q, log %s", got, log.String())
			case c.want != "" && (got != "" || !strings.Contains(log.String(), c.want) || !strings.Contains(log.String(), "level=INFO")):
				t.Errorf("%q, log %s; want %q", got, log.String(), c.want)
			}
		})
	}
}
