package takeover

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/admintoken"
)

// change sends a request that needs the token but changes nothing, and returns
// the status.
func (w *world) change(token string) (int, error) {
	r, err := http.NewRequestWithContext(w.t.Context(), "POST", "http://"+w.admin+"/v1/policies/least_load/reload", nil)
	if err != nil {
		return 0, err
	}
	r.Header.Set("Authorization", "Bearer "+token)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err
	}
	resp.Body.Close()
	return resp.StatusCode, nil
}

// token returns the token that a command finds, and asserts that it is valid.
func (w *world) token() string {
	w.t.Helper()
	out, err := exec.Command(pdproxy, "admin-token", "--admin", w.admin).Output()
	if err != nil {
		w.t.Fatal(err)
	}
	token := strings.TrimSpace(string(out))
	if status, err := w.change(token); err != nil || status == 401 {
		w.t.Fatalf("the token of the file is refused: %d, %v", status, err)
	}
	return token
}

// A command finds a valid token at any time: while a process or a fleet reloads
// or hands over, and after a crash. The last process removes the file.
func TestAdminToken(t *testing.T) {
	for _, workers := range []int{0, 2} {
		t.Run(fmt.Sprint("workers ", workers), func(t *testing.T) {
			dir := t.TempDir()
			if err := os.Chmod(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			t.Setenv("XDG_RUNTIME_DIR", dir)
			var w *world
			t.Cleanup(func() { // when all processes have ended
				if _, err := os.Lstat(admintoken.Path(w.admin)); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("the file remains: %v", err)
				}
			})
			w = newWorld(t, false, workers)
			w.run()
			pid := w.successor(0, func() {})
			w.awaitReady()
			first := w.token()

			var stop atomic.Bool
			refused := make(chan string, 1)
			go func() {
				defer close(refused)
				for !stop.Load() {
					if status, err := w.change(first); err == nil && status == 401 {
						refused <- "the token was refused during a takeover"
						return
					}
				}
			}()
			for range 3 {
				syscall.Kill(pid, syscall.SIGHUP)
				syscall.Kill(pid, syscall.SIGUSR2)
				pid = w.successor(pid, func() {})
				w.awaitReady()
				if now := w.token(); now != first {
					t.Error("the successor has another token")
				}
			}
			stop.Store(true)
			for text := range refused {
				t.Error(text)
			}
			if workers == 0 {
				return
			}
			w.eventually("the coordinator of the predecessor has ended", func() bool { return len(w.children("coordinator")) == 1 })
			w.expected = "a process " // has ended
			for _, coordinator := range w.children("coordinator") {
				syscall.Kill(coordinator, syscall.SIGKILL)
				w.eventually("another coordinator has a token", func() bool {
					token, err := admintoken.Find(w.admin)
					if err != nil || token == first {
						return false
					}
					status, err := w.change(token)
					return err == nil && status != 401
				})
			}
			w.token()
		})
	}
}
