package cmd

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// user is a terminal in which the program runs.
type user struct {
	t      *testing.T
	ptmx   *os.File
	before unix.Termios
	cmd    *exec.Cmd

	mu   sync.Mutex
	seen bytes.Buffer // guarded by mu
	done chan struct{}
}

// inTerminal runs a command line in a terminal with so many columns and rows.
func inTerminal(t *testing.T, columns, rows uint16, args ...string) *user {
	t.Helper()
	ptmx, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ptmx.Close() })
	u := &user{t: t, ptmx: ptmx, done: make(chan struct{})}
	number, err := unix.IoctlGetInt(u.fd(), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(u.fd(), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	u.resize(columns, rows)
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()
	u.before = *u.mode()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	u.cmd = exec.Command(program, args...)
	u.cmd.Env = append(os.Environ(), asProgram+"=1", "NO_COLOR=1")
	u.cmd.Stdin, u.cmd.Stdout, u.cmd.Stderr = tty, tty, tty
	u.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := u.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { u.cmd.Process.Kill() })
	go func() { // until the program has ended
		defer close(u.done)
		text := make([]byte, 4096)
		for {
			n, err := ptmx.Read(text)
			u.mu.Lock()
			u.seen.Write(text[:n])
			u.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return u
}

func (u *user) fd() int { return int(u.ptmx.Fd()) }

func (u *user) mode() *unix.Termios {
	mode, err := unix.IoctlGetTermios(u.fd(), unix.TCGETS)
	if err != nil {
		u.t.Fatal(err)
	}
	return mode
}

func (u *user) resize(columns, rows uint16) {
	if err := unix.IoctlSetWinsize(u.fd(), unix.TIOCSWINSZ, &unix.Winsize{Col: columns, Row: rows}); err != nil {
		u.t.Fatal(err)
	}
}

// press types a key.
func (u *user) press(key string) {
	if _, err := u.ptmx.WriteString(key); err != nil {
		u.t.Fatal(err)
	}
}

// waits waits for a text and returns all that was on the terminal until then, which it forgets.
func (u *user) waits(text string) string {
	u.t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		u.mu.Lock()
		seen := u.seen.String()
		if i := strings.Index(seen, text); i >= 0 {
			u.seen.Next(i + len(text))
			u.mu.Unlock()
			return seen[:i+len(text)]
		}
		u.mu.Unlock()
		if time.Now().After(end) {
			u.t.Fatalf("%q does not appear: %q", text, seen[max(len(seen)-4000, 0):])
		}
	}
}

// ends waits for the end of the program, and returns its exit code. The terminal must have its
// former mode.
func (u *user) ends() int {
	u.t.Helper()
	u.cmd.Wait()
	if after := u.mode(); *after != u.before {
		u.t.Errorf("the mode of the terminal was %+v and is %+v", u.before, *after)
	}
	<-u.done
	return u.cmd.ProcessState.ExitCode()
}
