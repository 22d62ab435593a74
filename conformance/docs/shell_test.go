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
// a network of its own without other hosts, so that the ports are free and nothing leaves. The pages of
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

// isolation protects the machine from a block that somebody forgot to mark: the file system
// is read-only except for the folder of the page, the private folder and Go's cache, and
// /run has no sockets of services.
const isolation = `set -e
for d in "$PWD" "$PRIVATE" "$GOCACHE"; do mount --bind "$d" "$d"; done
for m in $(findmnt --raw --noheadings --output TARGET); do
	case "$m" in "$PWD" | "$PRIVATE" | "$GOCACHE" | /proc* | /sys* | /dev*) ;; *)
		options=$(findmnt --raw --noheadings --output VFS-OPTIONS "$m" | tail -n 1)
		mount -o "remount,bind,ro,${options#rw,}" "$m" ;;
	esac
done
mount -t tmpfs none /run
cd "$PWD"
if touch /etc/pdproxy-docs 2> /dev/null; then echo "the file system is not read-only"; exit 1; fi
export TMPDIR="$PRIVATE"
ip link set lo up
`

func runBlocks(t *testing.T, program string, blocks []string) {
	dir, private := t.TempDir(), t.TempDir() // private: for the token of the admin address
	if err := os.Chmod(private, 0o700); err != nil {
		t.Fatal(err)
	}
	cache, err := exec.CommandContext(t.Context(), "go", "env", "GOCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	script := isolation + strings.Join(blocks, "\n")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	// The processes of a page end with the init of their namespace.
	c := exec.CommandContext(ctx, "unshare", "--map-root-user", "--mount", "--net", "--pid", "--fork", "--kill-child", "bash", "-c", script)
	c.Dir = dir
	c.Env = append(os.Environ(), "PATH="+filepath.Dir(program)+":"+os.Getenv("PATH"), "XDG_RUNTIME_DIR="+private, "XDG_CACHE_HOME="+private,
		"GOCACHE="+strings.TrimSpace(string(cache)), "PRIVATE="+private)
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
