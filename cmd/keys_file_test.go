package cmd

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/admission"
)

// keysConfig writes a configuration with a keys file, and returns both paths.
func keysConfig(t *testing.T, more string) (path, keys string) {
	keys = filepath.Join(t.TempDir(), "keys")
	return write(t, "[[engine]]\nname = 'e'\nurl = 'http://127.0.0.1:1'\nrole = 'both'\n[server]\nauth.keys_file = '"+keys+"'\n"+more), keys
}

// newKey makes a key with the command, which writes its line.
func newKey(t *testing.T, path, name string) string {
	code, stdout, stderr := run("keys", "new", name, "--json", "--config", path)
	var key admission.NewKey
	if err := json.Unmarshal([]byte(stdout), &key); err != nil || code != exit.OK || !strings.Contains(stderr, "has the new line") {
		t.Fatalf("exit %d, %v, %s %s", code, err, stdout, stderr)
	}
	return key.Key
}

func TestKeysFile(t *testing.T) {
	path, file := keysConfig(t, "")
	newKey(t, path, "a")
	if info, err := os.Stat(file); err != nil || info.Mode() != 0o600 {
		t.Errorf("the new file has the mode %v, %v", info.Mode(), err)
	}
	newKey(t, path, "b")
	newKey(t, path, "b")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(string(text), "\n")
	text = []byte("# one\r\n" + lines[0] + "\n" + lines[1] + "   # two\n" + lines[2])
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(file, 0o640); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(filepath.Dir(file), "link")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	linked := write(t, "[[engine]]\nname = 'e'\nurl = 'http://127.0.0.1:1'\nrole = 'both'\n[server]\nauth.keys_file = '"+link+"'\n")
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"list", path}, exit.OK, "LINE  NAME  TENANT  CLASS  MODELS  RPM  TPM  MAX\n2     a     -       -      -       -    -    -\n4     b     -       -      -       -    -    -\n6     b     -       -      -       -    -    -\n"},
		{[]string{"list", "--json", path}, exit.OK, `"line": 6`},
		{[]string{"revoke", path, "b"}, exit.Failure, file + ": several keys are named b, in the lines 4, 6: --line names one of them"},
		{[]string{"revoke", path, "b", "--line", "2"}, exit.Failure, "--line: line 2 has no key named b"},
		{[]string{"revoke", path, "bb"}, exit.Failure, `no key is named "bb", did you mean b?`},
		{[]string{"revoke", path}, exit.Usage, "which NAME?"},
		{[]string{"revoke", write(t, ""), "b"}, exit.Usage, "server.auth.keys_file: is required"},
		{[]string{"revoke", linked, "b", "--line", "4"}, exit.OK, link + ": removed line 4, key b\nA running proxy reads the file after SIGHUP"},
		{[]string{"revoke", path, "a", "--json"}, exit.OK, `"name": "a"`},
		{[]string{"revoke", path, "b"}, exit.Failure, "line 4, key b: it is the only key"},
	} {
		code, stdout, stderr := run(append([]string{"keys"}, tt.args...)...)
		if code != tt.code || !strings.Contains(stdout+stderr, tt.want) {
			t.Errorf("%q: exit %d, %s%s", tt.args, code, stdout, stderr)
		}
		for _, line := range lines[:3] {
			if _, hash, _ := strings.Cut(strings.TrimSpace(line), " "); strings.Contains(stdout+stderr, hash) {
				t.Errorf("%q prints a hash", tt.args)
			}
		}
	}
	got, err := os.ReadFile(file)
	if want := "# one\r\n\n   # two\n" + lines[2]; err != nil || string(got) != want {
		t.Errorf("the file is %q, %v, want %q", got, err, want)
	}
	info, err := os.Stat(file)
	if err != nil || info.Mode() != 0o640 {
		t.Errorf("the mode is %v, %v", info.Mode(), err)
	}
	entries, err := os.ReadDir(filepath.Dir(file))
	if to, _ := os.Readlink(link); err != nil || len(entries) != 2 || to != file {
		t.Errorf("the folder has %v, the link names %s", entries, to)
	}
	if list, _ := complete("keys", "revoke", path, ""); strings.Join(list, " ") != "b" {
		t.Errorf("completions %q", list)
	}
}

// TestKeysAtOnce: commands that change the file at the same time lose no line.
func TestKeysAtOnce(t *testing.T) {
	path, file := keysConfig(t, "")
	newKey(t, path, "first")
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			newKey(t, path, fmt.Sprintf("k%d", i))
			if i%2 == 0 {
				run("keys", "revoke", path, fmt.Sprintf("k%d", i))
			}
		})
	}
	all.Wait()
	text, err := os.ReadFile(file)
	list, err2 := admission.ListKeys(text)
	if err != nil || err2 != nil || len(list) != 11 {
		t.Errorf("%d keys, %v, %v", len(list), err, err2)
	}
}

// TestNewKeyThatFails: a command that fails changes no file and removes none, also if another command
// makes the file at the same time.
func TestNewKeyThatFails(t *testing.T) {
	path, file := keysConfig(t, "")
	fail := func() {
		if code, stdout, stderr := run("keys", "new", "c", "--tenant", "absent", "--config", path); code != exit.Failure || stdout != "" || !strings.Contains(stderr, "no [[tenant]]") {
			t.Errorf("exit %d, %s %s", code, stdout, stderr)
		}
	}
	fail()
	if entries, err := os.ReadDir(filepath.Dir(file)); err != nil || len(entries) > 0 {
		t.Errorf("the folder has %v, %v", entries, err)
	}
	for range 20 {
		var all sync.WaitGroup
		for range 2 {
			all.Go(fail)
			all.Go(func() { newKey(t, path, "a") })
		}
		all.Wait()
		text, err := os.ReadFile(file)
		if list, err2 := admission.ListKeys(text); err != nil || err2 != nil || len(list) != 2 {
			t.Fatalf("%d keys, want 2: %v, %v", len(list), err, err2)
		}
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
	newKey(t, path, "a")
	if err := os.Chmod(file, 0o640); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	fail()
	after, err := os.ReadFile(file)
	info, err2 := os.Stat(file)
	if err != nil || err2 != nil || string(after) != string(before) || info.Mode() != 0o640 {
		t.Errorf("the file is %q with the mode %v, %v, %v", after, info.Mode(), err, err2)
	}
}

// TestKeysOfRunningProxy: after a reload a running proxy refuses the revoked key, and accepts the
// other ones.
func TestKeysOfRunningProxy(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	path, _ := keysConfig(t, "listen = '"+address+"'\n[admin]\nlisten = '127.0.0.1:0'\n")
	a, b := newKey(t, path, "a"), newKey(t, path, "b")
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	proxy := exec.Command(program, "run", path)
	proxy.Env = append(os.Environ(), asProgram+"=1")
	if err := proxy.Start(); err != nil {
		t.Fatal(err)
	}
	defer proxy.Wait()
	defer proxy.Process.Signal(syscall.SIGTERM)
	accepts := func(key string) bool {
		req, _ := http.NewRequest(http.MethodGet, "http://"+address+"/v1/models", nil)
		req.Header.Set("Authorization", "Bearer "+key)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return false // the proxy starts
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		return resp.StatusCode != http.StatusUnauthorized
	}
	until := func(what string, done func() bool) {
		t.Helper()
		for end := time.Now().Add(60 * time.Second); !done(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal(what)
			}
		}
	}
	until("the proxy does not accept a key", func() bool { return accepts(a) })
	if code, _, stderr := run("keys", "revoke", path, "a"); code != exit.OK {
		t.Fatal(stderr)
	}
	if !accepts(a) {
		t.Error("the proxy refuses the key before the reload")
	}
	proxy.Process.Signal(syscall.SIGHUP)
	until("the proxy accepts the revoked key", func() bool { return !accepts(a) })
	if !accepts(b) {
		t.Error("the proxy refuses the other key")
	}
}
