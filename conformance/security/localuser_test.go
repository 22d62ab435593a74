package security

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// nobody is the user and the group of the local attacker.
const nobody = 65534

// helperVariable makes the test binary a helper that runs as the attacker.
const helperVariable = "PDPROXY_SECURITY_HELPER"

// needRoot skips a test that starts processes of another user.
func needRoot(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("this test needs root, to start a process of another user")
	}
}

// publicDir makes a folder that every user can reach, with that owner and mode.
func publicDir(t *testing.T, owner int, mode os.FileMode) string {
	t.Helper()
	dir, err := os.MkdirTemp(buildDir, "public") //nolint:usetesting // other users do not reach a test's own folder
	if err == nil {
		err = os.Chown(dir, owner, owner)
	}
	if err == nil {
		err = os.Chmod(dir, mode)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// asNobody is a command of the attacker.
func asNobody(name string, args ...string) *exec.Cmd {
	c := exec.Command(name, args...)
	c.Dir = "/"
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	return c
}

// shell runs a script as the attacker and returns its output.
func shell(script string, args ...string) (string, error) {
	out, err := asNobody("sh", append([]string{"-c", script, "sh"}, args...)...).CombinedOutput()
	return string(out), err
}

// helper is the path of a copy of the test binary that every user can run.
var helper = sync.OnceValues(func() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	binary, err := os.ReadFile(self)
	if err != nil {
		return "", err
	}
	path := filepath.Join(buildDir, "helper")
	return path, os.WriteFile(path, binary, 0o755)
})

// helperCommand runs the helper as the attacker.
func helperCommand(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	path, err := helper()
	if err != nil {
		t.Fatal(err)
	}
	c := asNobody(path, args...)
	c.Env = []string{helperVariable + "=1"}
	return c
}

// runHelper is the helper: "exchange A B" swaps two paths until it is killed, "http
// METHOD URL BODY" sends a request and prints the status and the answer.
func runHelper(args []string) int {
	switch {
	case len(args) == 3 && args[0] == "exchange":
		for {
			unix.Renameat2(unix.AT_FDCWD, args[1], unix.AT_FDCWD, args[2], unix.RENAME_EXCHANGE)
			time.Sleep(20 * time.Microsecond)
		}
	case len(args) == 4 && args[0] == "http":
		r, err := http.NewRequest(args[1], args[2], strings.NewReader(args[3]))
		if err != nil {
			return 2
		}
		r.Header.Set("Content-Type", "application/json")
		resp, err := (&http.Client{Timeout: 10 * time.Second}).Do(r)
		if err != nil {
			fmt.Println(err)
			return 1
		}
		defer resp.Body.Close()
		fmt.Println(resp.StatusCode)
		io.Copy(os.Stdout, resp.Body)
		return 0
	}
	return 2
}

// request sends a request as the attacker.
func request(t *testing.T, method, url, body string) (status, text string) {
	t.Helper()
	out, err := helperCommand(t, "http", method, url, body).CombinedOutput()
	if err != nil {
		t.Fatalf("%s, %s: CombinedOutput = %v, %s", method, url, err, out)
	}
	status, text, _ = strings.Cut(string(out), "\n")
	return status, text
}

// TestLocalUserAdmin: another user of the host changes nothing at the admin address,
// reads no file through it, and cannot read the token. The owner needs no flag.
func TestLocalUserAdmin(t *testing.T) {
	needRoot(t)
	t.Parallel()
	secret := filepath.Join(publicDir(t, 0, 0o755), "secret")
	write(t, secret, "ROOT-ONLY-SECRET\n")
	e, thief := newFakeEngine(t), newFakeEngine(t)
	runtime := publicDir(t, 0, 0o700)
	p := startProxy(t, setup{
		noToken: true, dir: filepath.Join(publicDir(t, 0, 0o755), "run"), sections: e.section("both", "none"),
		env: []string{"XDG_RUNTIME_DIR=" + runtime},
	})
	name := e.name("both")
	add := func(file string) string {
		return fmt.Sprintf(`{"name":"x%d","url":"http://%s","role":"both","connector":"none","api_key_file":%q}`, time.Now().UnixNano(), thief.listener.Addr(), file)
	}
	var errors []string
	for _, file := range []string{secret, "/etc/shadow", "/etc/hostname", "/does/not/exist", "/root/.ssh/id_rsa"} {
		status, text := request(t, "POST", p.admin.URL+"/v1/engines", add(file))
		if status != "401" && status != "403" {
			t.Errorf("an engine with the key of %s was answered with %s: %s", file, status, text)
		}
		errors = append(errors, strings.ReplaceAll(text, file, "FILE"))
	}
	for _, text := range errors {
		if text != errors[0] {
			t.Errorf("the answers show which files exist: %q", errors)
			break
		}
	}
	for _, change := range [][3]string{
		{"POST", "/v1/engines", fmt.Sprintf(`{"name":"y","url":"http://%s","role":"both","connector":"none"}`, thief.listener.Addr())},
		{"DELETE", "/v1/engines/" + name, ""}, {"DELETE", "/v1/engines/" + name + "?drain=0s", ""},
		{"POST", "/v1/policies/least_load/reload", ""}, {"PUT", "/v1/sidecar/policies", "[]"}, {"DELETE", "/v1/sidecar/policies", ""},
		{"POST", "/v1/drain", ""}, {"POST", "/v1/drain", "{}"},
	} {
		status, text := request(t, change[0], p.admin.URL+change[1], change[2])
		if status < "400" {
			t.Errorf("%s, %s: request(change[0], p.admin.URL+change[1], change[2]) = %s, %s", change[0], change[1], status, text)
		}
	}
	p.serves("after the changes that a stranger wanted")
	if seen := thief.connections(); seen > 0 {
		t.Errorf("the proxy connected to the attacker's engine %d times", seen)
	}
	for _, dir := range []string{filepath.Dir(p.dir), runtime} {
		if out, _ := shell(`find "$1" -type f -readable 2>/dev/null; find "$1" -writable -not -type l 2>/dev/null`, dir); out != "" {
			t.Errorf("the attacker can read or write\n%s", out)
		}
	}
	ownerNeedsNoFlag(t, p, runtime)
	p.nothingLeft()
}

// ownerNeedsNoFlag asks for an explanation as the user of the proxy.
func ownerNeedsNoFlag(t *testing.T, p *proxyProcess, runtime string) {
	t.Helper()
	c := p.client(1, "127.0.0.1")
	defer c.close()
	if _, err := c.post(chatPath, chat("explained", false), "X-Request-Id", "explain-me"); err != nil {
		t.Error(err)
	}
	explain := exec.Command(pdproxy, "explain", "explain-me", "--admin", strings.TrimPrefix(p.admin.URL, "http://"))
	explain.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+runtime)
	if out, err := explain.CombinedOutput(); err != nil {
		t.Errorf("pdproxy explain: %v\n%s", err, out)
	}
}

// plantedNames are files of fleet.dir. An attacker tries to make the proxy
// write them through a link.
var plantedNames = []string{"ids.json", "ids.json.new", "ids.lock", "office.lock", "worker-0.lock", "coordinator-0.lock", "admin-token", "roster.json", "lane.lock"}

// plant makes a folder of the attacker with links to the victim's file.
func plant(t *testing.T, dir, victim string) {
	t.Helper()
	if out, err := shell(`mkdir -p -m 700 "$1" && cd "$1" && v=$2 && shift 2 && for n; do ln -sf "$v" "$n" || exit 1; done`, append([]string{dir, victim}, plantedNames...)...); err != nil {
		t.Fatalf("shell = %v, %s", err, out)
	}
}

// wantUnharmed runs a proxy, which may refuse the folder, and asserts that the victim's
// file is unchanged. It calls the function meanwhile when the proxy serves.
func wantUnharmed(t *testing.T, p *proxyProcess, s setup, victim string, meanwhile func()) {
	t.Helper()
	p.run(s)
	p.stopped = true // the proxy may refuse the folder and end
	for end := time.Now().Add(10 * time.Second); p.alive() && time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		resp, err := p.admin.Client.Get(p.admin.URL + "/readyz")
		if err != nil {
			continue
		}
		resp.Body.Close()
		if resp.StatusCode == 200 {
			meanwhile()
			break
		}
	}
	p.terminate()
	if text, err := os.ReadFile(victim); err != nil || string(text) != "precious\n" {
		t.Errorf("the proxy wrote %q into a file of root through the attacker's link, %v", text, err)
	}
	if info, err := os.Stat(victim); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the mode of the file is %v, %v", info.Mode(), err)
	}
	if text := p.logged(); strings.Contains(text, "precious") {
		t.Error("the proxy logged text that it read through the link")
	}
}

// TestFleetDirLinks attacks the fleet's folder: it is made before the proxy
// starts, replaced while the proxy runs, or replaced continuously during the
// start.
func TestFleetDirLinks(t *testing.T) {
	needRoot(t)
	t.Parallel()
	e := newFakeEngine(t)
	victim := filepath.Join(publicDir(t, 0, 0o755), "victim")
	write(t, victim, "precious\n")
	configured := func(dir string) setup { return setup{dir: dir, sections: e.section("both", "none")} }
	nothing := func() {}

	t.Run("made before", func(t *testing.T) {
		dir := filepath.Join(publicDir(t, nobody, 0o777), "run")
		plant(t, dir, victim)
		s := configured(dir)
		wantUnharmed(t, prepare(t, s), s, victim, nothing)
	})
	t.Run("folder is a link", func(t *testing.T) {
		dir := filepath.Join(publicDir(t, nobody, 0o777), "run")
		if out, err := shell(`ln -s "$1" "$2"`, filepath.Dir(victim), dir); err != nil {
			t.Fatalf("shell = %v, %s", err, out)
		}
		s := configured(dir)
		wantUnharmed(t, prepare(t, s), s, victim, nothing)
		if files, err := os.ReadDir(filepath.Dir(victim)); err != nil || len(files) != 1 {
			t.Errorf("the proxy created files at the target of the link: %v, %v", files, err)
		}
	})
	t.Run("default folder", func(t *testing.T) { defaultFolder(t, e, victim) })
	t.Run("control", func(t *testing.T) {
		startProxy(t, configured(filepath.Join(publicDir(t, 0, 0o700), "run"))).serves("with a folder of its own")
	})
}

// defaultFolder attacks the folder that the proxy chooses below a temporary
// directory for all users. A proxy that does not use what others can change
// makes no folder there, which is right.
func defaultFolder(t *testing.T, e *fakeEngine, victim string) {
	tmp := publicDir(t, 0, os.ModeSticky|0o777)
	above := filepath.Join(tmp, "pdproxy-0")
	if out, err := shell(`mkdir -m 777 "$1"`, above); err != nil {
		t.Fatalf("shell = %v, %s", err, out)
	}
	s := setup{dir: "default", sections: e.section("both", "none"), env: []string{"TMPDIR=" + tmp, "XDG_RUNTIME_DIR="}}
	p := prepare(t, s)
	wantUnharmed(t, p, s, victim, func() {})
	leaves, err := os.ReadDir(above)
	if err != nil {
		t.Fatal(err)
	}
	if len(leaves) == 0 {
		return
	}
	leaf, mine := filepath.Join(above, leaves[0].Name()), filepath.Join(above, "mine")
	plant(t, mine, victim)
	exchange := helperCommand(t, "exchange", leaf, mine)
	if err := exchange.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		exchange.Process.Kill()
		exchange.Wait()
	}()
	for range times(5, 40) {
		wantUnharmed(t, p, s, victim, func() { time.Sleep(200 * time.Millisecond) }) // many exchanges of the folder
	}
}

// TestCompileCache: machine code in a folder that another user can write to is not
// executed.
func TestCompileCache(t *testing.T) {
	needRoot(t)
	t.Parallel()
	e := newFakeEngine(t)
	own := filepath.Join(buildDir, "cache") // compiled code of the suite's other proxies
	startProxy(t, setup{sections: e.section("both", "none")}).serves("with a cache of its own")
	cache := publicDir(t, nobody, 0o777)
	var poisoned int
	err := filepath.WalkDir(own, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		code, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		bad, ok := trapped(code)
		if !ok {
			return nil
		}
		name, err := filepath.Rel(own, path)
		if err != nil {
			return err
		}
		poisoned++
		there := filepath.Join(cache, name)
		put := asNobody("sh", "-c", `mkdir -p -m 777 "$(dirname "$1")"; rm -f "$1"; cat >"$1"; chmod 644 "$1"`, "sh", there)
		put.Stdin = strings.NewReader(string(bad))
		if out, err := put.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	if err != nil || poisoned == 0 {
		t.Fatalf("%d entries of the cache were poisoned, %v", poisoned, err)
	}
	p := startProxy(t, setup{sections: e.section("both", "none"), env: []string{"XDG_CACHE_HOME=" + cache}}) // executes none of them, or it would end by a trap
	p.serves("with a poisoned cache")
	p.nothingLeft()
}

// trapped is an entry of wazero's cache in which every instruction is a trap; ok is
// false for a file of another format. The entry has a magic, a version with its
// length, a list of offsets, and the code with its length and checksum.
func trapped(entry []byte) (bad []byte, ok bool) {
	const magic = "WAZEVO"
	if len(entry) < len(magic)+1 || string(entry[:len(magic)]) != magic {
		return nil, false
	}
	at := len(magic) + 1 + int(entry[len(magic)])
	at += 4 + 8*int(binary.LittleEndian.Uint32(entry[at:]))
	size := int(binary.LittleEndian.Uint64(entry[at:]))
	at += 8
	bad = append([]byte{}, entry...)
	for n := range size {
		bad[at+n] = 0xcc // int3 on amd64; no instruction on arm64
	}
	binary.LittleEndian.PutUint32(bad[at+size:], crc32.Checksum(bad[at:at+size], crc32.MakeTable(crc32.Castagnoli)))
	return bad, true
}
