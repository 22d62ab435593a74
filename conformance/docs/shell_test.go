package docs

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

var shellBlock = regexp.MustCompile("(?ms)^(?:<!-- not run: ([^\n]+) -->\n)?```sh\n(.*?)^```$")

// shellBlocks returns the shell blocks of a page that a reader can follow without a GPU.
// A comment `<!-- not run: REASON -->` in front of a block excludes the block.
func shellBlocks(text string) []string {
	var run []string
	for _, m := range shellBlock.FindAllStringSubmatch(text, -1) {
		if m[1] == "" {
			run = append(run, m[2])
		}
	}
	return run
}

// TestShellBlocks runs the shell blocks of each page in their order, with one shell in an
// empty folder, where only the program is in PATH in addition to the system. The shell has
// a network of its own without other hosts, so that the ports are free. The pages of
// docs/quickstart start real engines; `make test-quickstart` runs their commands.
func TestShellBlocks(t *testing.T) {
	program := os.Getenv("PDPROXY_DOCS")
	if program == "" {
		t.Skip("make test-docs runs this test with the built program")
	}
	ran := 0
	for _, p := range readPages(t) {
		if strings.HasPrefix(p.path, "quickstart/") {
			continue
		}
		blocks := shellBlocks(p.text)
		if len(blocks) == 0 {
			continue
		}
		ran += len(blocks)
		t.Run(p.path, func(t *testing.T) { runBlocks(t, program, blocks) })
	}
	if ran < 20 {
		t.Errorf("only %d blocks ran", ran)
	}
}

func runBlocks(t *testing.T, program string, blocks []string) {
	dir := t.TempDir()
	script := "ip link set lo up\nset -e\n" + strings.Join(blocks, "\n")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	// The processes of a page end with the init of their namespace.
	c := exec.CommandContext(ctx, "unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "bash", "-c", script)
	c.Dir = dir
	c.Env = append(os.Environ(), "PATH="+filepath.Dir(program)+":"+os.Getenv("PATH"), "XDG_RUNTIME_DIR="+dir)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.WaitDelay = 5 * time.Second
	if out, err := c.CombinedOutput(); err != nil {
		logs, _ := filepath.Glob(filepath.Join(dir, "*.log"))
		for _, log := range logs {
			text, _ := os.ReadFile(log)
			t.Logf("%s:\n%s", filepath.Base(log), text)
		}
		t.Fatalf("%v\n%s", err, out)
	}
}
