package cmd

import (
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// process is one of a fleet, as its supervisor sees it.
type process struct {
	role  Role
	slot  int
	pid   int
	cmd   *exec.Cmd // nil: it is another supervisor's child
	leash *os.File  // nil: it goes on without this supervisor
	since time.Time
	due   time.Time // when it is to have ended; zero: it has not been told to
	gone  bool      // its lock is free

	state  string    // as it says itself
	beat   uint64    // of its last sign of life
	seen   time.Time // when that was
	killed bool

	overlooked bool // its lock cannot be read or written, which has been said
}

// exited is the end of a child.
type exited struct{ process *process }

// processorsVariable is how many processors Go uses at once. A worker gets its
// share, unless somebody has decided: threads for the others' would only wake one
// another.
const processorsVariable = "GOMAXPROCS"

// startProcess starts the program that this is, as a child that shares its
// output. It has a process group of its own: a terminal's signals come through the
// supervisor.
func startProcess(s *supervisor, role Role, slot int) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	path := self
	if runtime.GOOS == "linux" {
		path = "/proc/self/exe" // also when another version has taken its place on disk
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	c := exec.Command(path, s.childArgs(role, slot)...)
	c.Args[0] = self
	c.Stdout, c.Stderr = os.Stdout, os.Stderr
	c.ExtraFiles = []*os.File{r}
	names := []string{}
	for _, socket := range s.sockets {
		names = append(names, socket.Name)
		c.ExtraFiles = append(c.ExtraFiles, socket.File)
	}
	list, err := json.Marshal(names)
	if err != nil {
		w.Close()
		return nil, err
	}
	c.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "NOTIFY_SOCKET=") }), socketsVariable+"="+string(list))
	if role == RoleWorker && os.Getenv(processorsVariable) == "" {
		c.Env = append(c.Env, processorsVariable+"="+strconv.Itoa(config.Divide(runtime.GOMAXPROCS(0), s.cfg.Fleet.Workers)))
	}
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := c.Start(); err != nil {
		w.Close()
		return nil, err
	}
	p := &process{role: role, slot: slot, pid: c.Process.Pid, cmd: c, leash: w, since: time.Now(), seen: time.Now()}
	s.log.Info("process started", "process", role, "slot", slot, "pid", p.pid)
	go func() { // ends with the child, or with the supervisor, which waits for its children
		_ = c.Wait() // ProcessState says it
		s.exits <- exited{p}
	}()
	return p, nil
}

// unleash lets the process go on when this one ends. It may have ended itself.
func (p *process) unleash(log *slog.Logger) {
	if p.leash == nil {
		return
	}
	if _, err := p.leash.Write([]byte{1}); err != nil && !errors.Is(err, syscall.EPIPE) {
		log.Warn("a process was not told to go on by itself", "process", p.role, "slot", p.slot, "error", err)
	}
	p.leash.Close()
	p.leash = nil
}

func (p *process) signal(log *slog.Logger, sig os.Signal) {
	found, err := os.FindProcess(p.pid)
	if err == nil {
		err = found.Signal(sig)
	}
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		log.Warn("no signal could be sent", "process", p.role, "slot", p.slot, "pid", p.pid, "error", err)
	}
}

// end tells the process to end, by a signal, within limit.
func (p *process) end(log *slog.Logger, sig os.Signal, limit time.Duration) {
	p.due = time.Now().Add(limit)
	p.signal(log, sig)
}

func (p *process) kill(log *slog.Logger) {
	p.killed = true
	p.signal(log, syscall.SIGKILL)
}
