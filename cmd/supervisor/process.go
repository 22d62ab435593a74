package supervisor

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

	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// process is the supervisor's record of one process of the fleet.
type process struct {
	role       node.Role
	slot       int
	pid        int
	cmd        *exec.Cmd
	parentPipe *os.File  // the process ends when the supervisor's end of the pipe closes
	since      time.Time // of the start
	deadline   time.Time // time by which the process must have ended; zero: no limit
	killed     bool

	state       string // as the process reports it
	heartbeat   uint64 // the last value that was read
	heartbeatAt time.Time
	reloadLater bool // the process gets SIGHUP when it reports its next state: before its first state, SIGHUP would end it
	tolerated   bool // the lock file cannot be read or written, which has been logged
}

// isReady reports whether the process can serve requests.
func (p *process) isReady() bool { return p.state == stateReady || p.state == stateStandby }

// exited reports the end of a child.
type exited struct{ process *process }

// processorsVariable sets how many processors Go uses at once. Unless it is set already,
// each worker gets its share of them: with more threads the workers would only compete.
const processorsVariable = "GOMAXPROCS"

// startProcess starts the running program as a child with the same output. The child has
// a separate process group, so that the signals of a terminal reach it only through the
// supervisor.
func startProcess(s *supervisor, role node.Role, slot int) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	path := self
	if runtime.GOOS == "linux" {
		path = "/proc/self/exe" // the same version, even if another one is on disk now
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	c := exec.Command(path, s.options.ChildArgs(role, slot, s.dir.Name())...)
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
	if role == node.RoleWorker && os.Getenv(processorsVariable) == "" {
		c.Env = append(c.Env, processorsVariable+"="+strconv.Itoa(config.Divide(runtime.GOMAXPROCS(0), s.cfg.Fleet.Workers)))
	}
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := c.Start(); err != nil {
		w.Close()
		return nil, err
	}
	p := &process{role: role, slot: slot, pid: c.Process.Pid, cmd: c, parentPipe: w, since: time.Now(), heartbeatAt: time.Now()}
	s.log.Info("process started", "process", role, "slot", slot, "pid", p.pid)
	go func() { // ends with the child, or with the supervisor, which waits for its children
		_ = c.Wait() // the result is in ProcessState
		s.exits <- exited{p}
	}()
	return p, nil
}

// reload makes the process read the configuration again, as soon as the process handles
// SIGHUP.
func (p *process) reload(log *slog.Logger) {
	if p.reloadLater = p.state == ""; !p.reloadLater {
		p.signal(log, syscall.SIGHUP)
	}
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

// end sends the signal, after which the process has to end within limit.
func (p *process) end(log *slog.Logger, sig os.Signal, limit time.Duration) {
	p.deadline = time.Now().Add(limit)
	p.signal(log, sig)
}

func (p *process) kill(log *slog.Logger) {
	p.killed = true
	p.signal(log, syscall.SIGKILL)
}
