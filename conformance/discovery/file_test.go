package discovery

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// entry is an [[engine]].
func entry(name, role string, e *enginesim.Engine) string {
	return fmt.Sprintf("[[engine]]\nname = %q\nurl = %q\nrole = %q\nconnector = \"vllm-nixl\"\n", name, e.URL(), role)
}

func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "engines.toml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p0 := entry("p0", "prefill", startEngine(t, "vllm-nixl", "prefill", 0))
	d0, d1 := startEngine(t, "vllm-nixl", "decode", 0), startEngine(t, "vllm-nixl", "decode", 0)
	write(p0 + entry("d0", "decode", d0))
	n := startNode(t, func(d *config.Discovery) { d.File.Path = path })
	n.is("p0", "ready")
	n.is("d0", "ready")
	write(p0 + entry("d0", "decode", d0) + entry("d1", "chef", d1))
	testbed.Eventually(t, "the bad line is named", func() bool { return n.log.contains("line=14 key=engine[2].role") })
	if p, d := n.ask(); p != "p0" || d != "d0" {
		t.Errorf("served by %q and %q", p, d)
	}
	write(p0 + entry("d1", "decode", d1))
	n.is("d1", "ready")
	n.is("d0", "")
	if _, d := n.ask(); d != "d1" {
		t.Errorf("served by %q", d)
	}
}
