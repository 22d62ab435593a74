package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator/idstore"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// A test that needs another local user runs this test binary again as that user. The
// environment variable asStranger names the folder in which that process acts.
const (
	asStranger  = "PDPROXY_TEST_FOLDER_STRANGER"
	strangerUID = 65534
)

func TestMain(m *testing.M) {
	if base := os.Getenv(asStranger); base != "" {
		exchangeForEver(base)
		return
	}
	// Under nohup this process ignores SIGHUP, and its children would inherit that. A signal
	// with a handler has its default action in children.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	os.Exit(isolated.Run(m))
}

// exchangeForEver is the other user of TestStrangerExchanges. As often as it can it
// exchanges root's folder "leaf" and its own "mine" in base, and puts links to root's
// file into each folder that has either name.
func exchangeForEver(base string) {
	if os.Geteuid() != strangerUID {
		fmt.Println("runs as user", os.Geteuid())
		return
	}
	if err := os.Chdir(base); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("begins")
	for { // until the process is killed
		exchange("leaf", "mine")
		for _, folder := range []string{"leaf", "mine"} {
			for _, name := range fleetFiles {
				_ = os.Symlink("../../victim", filepath.Join(folder, name)) // root's folder refuses it
			}
		}
	}
}

// fleetFiles are the files that a process of this version or of earlier ones writes in
// fleet.dir.
var fleetFiles = []string{servingLock, "ids.lock", "ids.json", "ids.json.new", "epoch", "quic.key", "lane-0.lock", "lanes.lock", "control.sock"}

// exchange exchanges the names of two folders.
func exchange(a, b string) {
	if os.Rename(a, "between") == nil {
		_ = os.Rename(b, a)
		_ = os.Rename("between", b)
	}
}

// TestStrangerExchanges: a stranger who owns the folder above fleet.dir exchanges
// fleet.dir while processes of root open and use it. Root's file does not change, and
// fleet.dir is refused. If the folder above belongs to root and is sticky, as /tmp is, the
// stranger can exchange nothing, and fleet.dir is used.
func TestStrangerExchanges(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("this test needs root, to run a process of another user; make test-all runs it as root")
	}
	for name, c := range map[string]struct {
		mode  os.FileMode
		owner int
		opens bool
	}{
		"of the stranger":              {0o777, strangerUID, false},
		"of the stranger, sticky":      {0o777 | os.ModeSticky, strangerUID, false},
		"of root, open to all":         {0o777, 0, false},
		"of root, open to its group":   {0o775, 0, false},
		"of root, sticky":              {0o777 | os.ModeSticky, 0, true},
		"of root, readable by anybody": {0o755, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			above := filepath.Join(strangersPlace(t), "above")
			victim := filepath.Join(filepath.Dir(above), "victim")
			leaf, mine := filepath.Join(above, "leaf"), filepath.Join(above, "mine")
			if err := errors.Join(
				os.WriteFile(victim, []byte("precious"), 0o600), os.Mkdir(above, 0o700),
				os.Mkdir(leaf, 0o700), os.Mkdir(mine, 0o700), os.Chmod(mine, 0o777), os.Chown(mine, strangerUID, strangerUID),
				os.Chown(above, c.owner, c.owner), os.Chmod(above, c.mode),
			); err != nil {
				t.Fatal(err)
			}
			stop := runStranger(t, above)
			cfg := config.Default()
			cfg.Fleet.Dir = leaf
			for range 200 {
				opened := useFleetDir(t, &cfg)
				if opened != c.opens {
					t.Fatalf("opened: %v", opened)
				}
			}
			stop()
			if text, err := os.ReadFile(victim); string(text) != "precious" || err != nil {
				t.Errorf("the victim holds %q, %v", text, err)
			}
			if entries, err := os.ReadDir(mine); c.opens && err == nil {
				for _, e := range entries {
					if e.Type()&fs.ModeSymlink == 0 {
						t.Errorf("root has made %s in the stranger's folder", e.Name())
					}
				}
			}
		})
	}
}

// strangersPlace is a folder that the stranger can reach.
func strangersPlace(t *testing.T) string {
	t.Helper()
	place := t.TempDir()
	for dir := place; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	return place
}

// runStranger starts exchangeForEver as another user; stop ends it.
func runStranger(t *testing.T, base string) (stop func()) {
	t.Helper()
	program := filepath.Join(strangersPlace(t), "stranger")
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Skip("needs /proc")
	}
	if err := os.WriteFile(program, self, 0o755); err != nil {
		t.Fatal(err)
	}
	c := exec.Command(program)
	c.Dir, c.Env = "/", append(os.Environ(), asStranger+"="+base, "TMPDIR=/tmp")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: strangerUID, Gid: strangerUID}}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	stop = func() {
		if c.ProcessState == nil {
			_ = c.Process.Kill() // the process ends only by a signal
			_ = c.Wait()
		}
	}
	t.Cleanup(stop)
	b := make([]byte, 64)
	if n, err := out.Read(b); err != nil || !strings.HasPrefix(string(b[:n]), "begins") {
		t.Fatalf("output of the stranger's process = %q: %v", b[:n], err)
	}
	return stop
}

// useFleetDir opens fleet.dir and writes there as a process does that starts. It reports
// whether fleet.dir could be opened.
func useFleetDir(t *testing.T, cfg *config.Config) bool {
	t.Helper()
	dir, err := openFleetDir(cfg, "config.toml")
	var refused *privatedir.UnsafeError
	if err != nil {
		// Between two renames by the stranger no folder has the name.
		if !errors.As(err, &refused) && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrExist) {
			t.Fatal(err)
		}
		return false
	}
	defer dir.Close()
	s := &takeoverControl{dir: dir, log: slog.New(slog.DiscardHandler)}
	if err := s.begin(false); err != nil {
		t.Fatal(err)
	}
	defer s.lock.Unlock()
	ids := idstore.NewKeeper(idstore.NewFile(dir, disaggid.Block{Lines: 64}), disaggid.Width, s.log)
	if err := ids.Tend(t.Context(), time.Now()); err != nil {
		t.Fatalf("ids: %v", err)
	}
	const socket = "fleet.sock.test"
	l, err := dir.ListenUnix(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Remove(socket)
	defer l.Close()
	return true
}

// TestRefusedFleetDir: a folder that others can change is refused. The error names the
// folder and the remedy. A process that does not need the folder works without it.
func TestRefusedFleetDir(t *testing.T) {
	base := t.TempDir()
	if err := os.Chmod(base, 0o777); err != nil {
		t.Fatal(err)
	}
	cfg := config.Default()
	cfg.Fleet.Dir = filepath.Join(base, "run")
	_, err := openFleetDir(&cfg, "config.toml")
	var refused *privatedir.UnsafeError
	if !errors.As(err, &refused) || refused.Path != base || refused.Owner != os.Geteuid() || refused.Mode != 0o777 {
		t.Fatalf("%v", err)
	}
	for _, word := range []string{"fleet.dir", base, "mode 0777", fmt.Sprint("user ", os.Geteuid()), "chmod go-w"} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("got error %v, want the word %q", err, word)
		}
	}
	o := Options{Path: "config.toml", Log: slog.New(slog.DiscardHandler)}
	if s, _, err := joinTakeover(&cfg, o); s != nil || err != nil {
		t.Errorf("a process that does not need the folder: %v, %v", s, err)
	}
	o.Takeover = true
	if _, _, err := joinTakeover(&cfg, o); err == nil {
		t.Error("a process that must take over works without the folder")
	}
}

func TestDefaultFleetDir(t *testing.T) {
	base := t.TempDir()
	if err := os.Symlink(base, base+"-link"); err != nil {
		t.Fatal(err)
	}
	one, err := defaultFleetDir(filepath.Join(base, "config.toml"))
	if err != nil {
		t.Fatal(err)
	}
	for path, same := range map[string]bool{
		filepath.Join(base, "x", "..", "config.toml"): true,
		filepath.Join(base+"-link", "config.toml"):    true,
		filepath.Join(base, "other.toml"):             false,
	} {
		if other, err := defaultFleetDir(path); err != nil || (other == one) != same {
			t.Errorf("%s: %s, %v; the other is %s", path, other, err, one)
		}
	}
}
