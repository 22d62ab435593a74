package admintoken

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

const address = "127.0.0.1:9090"

// private sets a folder of the test as the runtime folder, and returns its path.
func private(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_RUNTIME_DIR", dir)
	return filepath.Join(dir, "pdproxy")
}

func mustMake(t *testing.T, address string) *Token {
	t.Helper()
	token, err := Make(address)
	if err != nil {
		t.Fatal(err)
	}
	if token.file == nil || len(token.Text()) != 43 {
		t.Fatalf("token %q, file %v", token.Text(), token.file)
	}
	return token
}

// finds checks the token that commands find. An empty want means that they find none.
func finds(t *testing.T, address, want string) {
	t.Helper()
	text, err := Find(address)
	if text != want || (want == "") != errors.Is(err, fs.ErrNotExist) {
		t.Errorf("found %q, %v; want %q", text, err, want)
	}
}

// left checks the names of the remaining files in a folder.
func left(t *testing.T, folder string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if strings.Join(names, " ") != strings.Join(want, " ") {
		t.Errorf("remaining files %q, want %q", names, want)
	}
}

func TestToken(t *testing.T) {
	folder := private(t)
	finds(t, address, "")
	token := mustMake(t, address)
	finds(t, address, token.Text())
	finds(t, "127.0.0.1:9091", "")
	info, err := os.Lstat(Path(address))
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("the file has mode %v, %v", info.Mode(), err)
	}
	other := mustMake(t, "[::1]:9090")
	if other.Text() == token.Text() {
		t.Error("two addresses have one token")
	}
	if err := errors.Join(other.Close(), other.Close()); err != nil {
		t.Error(err)
	}
	finds(t, address, token.Text())
	left(t, folder, "admin-127.0.0.1:9090.token")
	if err := token.Close(); err != nil {
		t.Error(err)
	}
	finds(t, address, "")
	left(t, folder)
}

// A process that takes over uses the token of its predecessor. The last of the two
// processes to end removes the file.
func TestSuccessor(t *testing.T) {
	for name, first := range map[string]bool{"predecessor ends first": true, "successor ends first": false} {
		t.Run(name, func(t *testing.T) {
			folder := private(t)
			one, two := mustMake(t, address), mustMake(t, address)
			if one.Text() != two.Text() {
				t.Fatal("the successor has another token")
			}
			if !first {
				one, two = two, one
			}
			if err := one.Close(); err != nil {
				t.Error(err)
			}
			finds(t, address, two.Text())
			if err := two.Close(); err != nil {
				t.Error(err)
			}
			left(t, folder)
		})
	}
}

// Commands do not use the file of a crashed process. The next start of any proxy removes
// the file.
func TestCrash(t *testing.T) {
	folder := private(t)
	old := mustMake(t, address)
	old.file.Close() // as the kernel does when the process ends
	finds(t, address, "")
	other := mustMake(t, "127.0.0.1:1")
	defer other.Close()
	left(t, folder, "admin-127.0.0.1:1.token")

	again := mustMake(t, address)
	crashed := again.Text()
	again.file.Close()
	last := mustMake(t, address)
	defer last.Close()
	if last.Text() == crashed {
		t.Error("the token of the crashed process is used again")
	}
	finds(t, address, last.Text())
}

// Commands do not use a file that other users may have read or written. The proxy
// replaces such a file.
func TestUnsafeFile(t *testing.T) {
	text := strings.Repeat("a", 42) + "A\n"
	for _, tt := range []struct {
		name, want string
		make       func(path string) error
	}{
		{"readable", "may be read by other users", func(path string) error { return os.WriteFile(path, []byte(text), 0o640) }},
		{"writable", "can be changed by other users", func(path string) error {
			return errors.Join(os.WriteFile(path, []byte(text), 0o600), os.Chmod(path, 0o622))
		}},
		{"link", "symbolic links are not followed", func(path string) error { return os.Symlink("/etc/hostname", path) }},
		{"folder", "not a regular file", func(path string) error { return os.Mkdir(path, 0o700) }},
		{"empty", "no token", func(path string) error { return os.WriteFile(path, nil, 0o600) }},
		{"half a token", "no token", func(path string) error { return os.WriteFile(path, []byte("abc\n"), 0o600) }},
		{"more than a token", "no token", func(path string) error { return os.WriteFile(path, []byte(text+text), 0o600) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			folder := private(t)
			mustMake(t, "127.0.0.1:1").Close()
			path := Path(address)
			if err := tt.make(path); err != nil {
				t.Fatal(err)
			}
			if text, err := Find(address); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("found %q, %v; want an error with %q", text, err, tt.want)
			}
			token, err := Make(address)
			if tt.name == "folder" { // the proxy must not remove a folder
				if err == nil || token.Text() == "" {
					t.Errorf("token %q, %v", token.Text(), err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			finds(t, address, token.Text())
			token.Close()
			left(t, folder)
		})
	}
}

// The proxy does not use a folder that other users can change.
func TestUnsafeFolder(t *testing.T) {
	folder := private(t)
	mustMake(t, address).Close()
	if err := os.Chmod(folder, 0o777); err != nil {
		t.Fatal(err)
	}
	token, err := Make(address)
	if err == nil || len(token.Text()) != 43 {
		t.Errorf("token %q, %v", token.Text(), err)
	}
	if _, err := Find(address); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("searched: %v", err)
	}
	if err := token.Close(); err != nil {
		t.Error(err)
	}
	left(t, folder)
}

// The proxy creates the file, or its folder, again if another program has removed it.
func TestRestore(t *testing.T) {
	folder := private(t)
	one, two := mustMake(t, address), mustMake(t, address)
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := errors.Join(one.Restore(), two.Restore()); err != nil {
			t.Fatal(err)
		}
		finds(t, address, one.Text())
	}
	if err := one.Close(); err != nil {
		t.Error(err)
	}
	finds(t, address, two.Text())
	two.Close()
	left(t, folder)
}

// Many processes start at the same time. Each process that has a file has a file with its
// own token.
func TestRace(t *testing.T) {
	folder := private(t)
	var wg sync.WaitGroup
	tokens := make([]*Token, 8)
	for i := range tokens {
		wg.Go(func() {
			token, err := Make(address)
			if err != nil {
				t.Error(err)
			}
			tokens[i] = token
		})
	}
	wg.Wait()
	for _, token := range tokens {
		if token.Text() != tokens[0].Text() {
			t.Error("two tokens serve one address")
		}
	}
	finds(t, address, tokens[0].Text())
	for _, token := range tokens {
		wg.Go(func() { token.Close() })
	}
	wg.Wait()
	finds(t, address, "")
	mustMake(t, address).Close()
	left(t, folder)
}

// The name of a file contains no path, for any address.
func TestFileName(t *testing.T) {
	for address, want := range map[string]string{
		"127.0.0.1:9090":        "admin-127.0.0.1:9090.token",
		"[FE80::1%eth0]:9090":   "admin-[fe80::1%eth0]:9090.token",
		"../../etc/passwd\x00a": "admin-.._.._etc_passwd_a.token",
	} {
		if got := fileName(address); got != want {
			t.Errorf("%q: fileName(address) = %q, want %q", address, got, want)
		}
	}
}

// TestFindInAnotherEnvironment: a command finds the token although the proxy was started
// with another $XDG_RUNTIME_DIR, as services are.
func TestFindInAnotherEnvironment(t *testing.T) {
	tmp := t.TempDir()
	if err := os.Chmod(tmp, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", tmp)
	t.Setenv("XDG_RUNTIME_DIR", "")
	const address = "127.0.0.1:9191" // as root the file is in /run/pdproxy
	token := mustMake(t, address)
	private(t)
	finds(t, address, token.Text())
	if err := token.file.Close(); err != nil { // the process ends without a chance to remove the file
		t.Fatal(err)
	}
	finds(t, address, "")
	if err := os.Remove(token.file.Name()); err != nil {
		t.Fatal(err)
	}
}
