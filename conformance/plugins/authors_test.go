//go:build authors

package plugins

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
)

// TestMain installs the compilers for C, a registry and minisign, which Debian has, and TinyGo.
func TestMain(m *testing.M) {
	err := testbed.Install(func() error {
		var missing error
		for _, program := range []string{"clang", "wasm-ld", "docker-registry", "minisign"} {
			if _, err := exec.LookPath(program); err != nil {
				missing = errors.Join(missing, err)
			}
		}
		return missing
	}, "clang", "lld", "docker-registry", "minisign")
	if err = errors.Join(err, installTinyGo()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	compilersInstalled = true
	os.Exit(isolated.Run(m))
}

// TestRealRegistry signs a module with minisign, pushes it to the registry of the
// distribution project, and loads it from there with pdproxy check.
func TestRealRegistry(t *testing.T) {
	wasm, err := os.ReadFile("../../examples/policy-c/policy.wasm")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	address := fmt.Sprintf("127.0.0.1:%d", testbed.Ports(t, 1))
	write(t, "registry.yml", "version: 0.1\nstorage: {filesystem: {rootdirectory: "+t.TempDir()+"}}\nhttp: {addr: '"+address+"'}\n")
	server := exec.Command("docker-registry", "serve", "registry.yml")
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = server.Process.Kill(); _ = server.Wait() }()
	for until := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if resp, err := http.Get("http://" + address + "/v2/"); err == nil {
			resp.Body.Close()
			break
		} else if time.Now().After(until) {
			t.Fatal(err)
		}
	}
	module, err := filepath.Abs("p.wasm")
	if err != nil {
		t.Fatal(err)
	}
	write(t, module, string(wasm))
	for _, args := range [][]string{{"-GW", "-p", "key.pub", "-s", "key"}, {"-S", "-s", "key", "-m", "p.wasm"}} {
		if out, err := exec.Command("minisign", args...).CombinedOutput(); err != nil {
			t.Fatalf("minisign %v: %v\n%s", args, err, out)
		}
	}
	text, err := os.ReadFile("key.pub")
	if err != nil {
		t.Fatal(err)
	}
	key := strings.Split(string(text), "\n")[1]
	location := "oci://" + address + "/plugins/p:1"
	code, fixed := pdproxy("plugin", "push", "--signature", "p.wasm.minisig", "p.wasm", location)
	if code != 0 || !strings.Contains(fixed, "/plugins/p@sha256:") {
		t.Fatal(fixed)
	}
	for name, tt := range map[string]struct {
		path, key string
		code      int
		out       string
	}{
		"tag":           {location, key, 0, "ok"},
		"digest":        {strings.TrimSpace(fixed), key, 0, "ok"},
		"file":          {module, key, 0, "ok"},
		"other key":     {location, "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3", 2, "plugin[0].public_key"},
		"tag is absent": {location + "0", key, 2, "not found"},
	} {
		t.Run(name, func(t *testing.T) {
			write(t, "config.toml", fmt.Sprintf("[policy]\nplace = 'p'\n[[plugin]]\nname = 'p'\npath = %q\npublic_key = %q\n[[engine]]\nname = 'e'\nurl = 'http://127.0.0.1:1'\nrole = 'both'\n", tt.path, tt.key))
			if code, out := pdproxy("check", "config.toml"); code != tt.code || !strings.Contains(out, tt.out) {
				t.Errorf("exit %d: %s", code, out)
			}
		})
	}
}
