package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/takeover"
)

// The protocol between a supervisor and its children. SIGTERM drains the child, however
// often the signal comes. SIGINT stops the child at once. SIGUSR1 makes it leave the sockets
// to other processes. SIGHUP makes it read the configuration again. The child writes its
// state and a heartbeat to its lock file.
const (
	// socketsVariable holds a JSON list of the names of the open sockets that the child
	// inherits. Their file descriptors begin at firstSocket, in the order of the list.
	socketsVariable = "PDPROXY_SOCKETS"
	// parentPipeFD is the reading end of a pipe whose writing end only the supervisor has.
	// When the supervisor ends, the pipe ends, and the child drains as after SIGTERM.
	parentPipeFD = 3
	firstSocket  = 4

	stateStarting = "starting"
	stateServing  = "serving" // the child accepts connections
	stateStandby  = "standby" // and can serve requests, but the predecessor's coordinator still leads
	stateReady    = "ready"   // and can serve requests
	stateRetired  = "retired" // other processes have the sockets

	// heartbeatEvery is how often a child writes a heartbeat.
	heartbeatEvery = time.Second
	// readyEvery is how often a child that serves checks whether it is ready.
	readyEvery = 20 * time.Millisecond
)

// ChildOptions identifies the process of a fleet that RunChild runs.
type ChildOptions struct {
	Role    node.Role
	Slot    int                            // number among the processes of the role
	Dir     string                         // the fleet's directory, which must exist
	Load    func() (*config.Config, error) // reads and checks the configuration file
	Version string                         // of the program
	Log     *slog.Logger
}

// RunChild is a child that a supervisor started: it serves until a signal ends it. The
// error is of type *exit.Error. It has the code SlotTaken if another process has the slot,
// and Unusable if the fault is in the configuration.
func RunChild(o ChildOptions) error {
	dir, err := privatedir.OpenExisting(o.Dir)
	if err != nil {
		return exit.Failed(fmt.Errorf("fleet.dir: %w", err))
	}
	defer dir.Close()
	c := &child{
		options: node.Options{Role: o.Role, Slot: o.Slot, Dir: dir, Version: o.Version},
		load:    o.Load, log: o.Log.With("role", string(o.Role), "slot", o.Slot),
	}
	err = c.run()
	var withCode *exit.Error
	if err == nil || errors.As(err, &withCode) {
		return err
	}
	return &exit.Error{Code: exit.Unusable, Err: err}
}

// child is this process as a child of a supervisor.
type child struct {
	options node.Options
	load    func() (*config.Config, error)
	log     *slog.Logger
	node    *node.Node
	serving chan struct{} // closed when the node accepts connections

	mu    sync.Mutex
	lock  *privatedir.Lock // guarded by mu
	state string           // guarded by mu
}

func (c *child) run() error {
	signal.Ignore(syscall.SIGUSR2) // only the supervisor handles it
	lock, err := c.options.Dir.TryLock(slotLock(c.options.Role, c.options.Slot))
	var taken *privatedir.LockedError
	if errors.As(err, &taken) {
		return &exit.Error{Code: exit.SlotTaken, Err: err}
	}
	if err != nil {
		return exit.Failed(err)
	}
	defer lock.Close() // the supervisor reads the file until the process has ended
	c.lock = lock
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGHUP) // before the supervisor sees the state
	defer signal.Stop(signals)
	c.report(stateStarting)
	ctx, cancel := context.WithCancelCause(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() { c.sendHeartbeats(ctx) })
	go func() { // ends with the process, because the reading of a pipe does not end with ctx
		awaitEnd(os.NewFile(parentPipeFD, "parent pipe"))
		c.log.Error("the supervisor has ended; this process drains")
		cancel(errSupervisorEnded)
	}()
	if err := c.build(); err != nil {
		return err
	}
	return c.serve(ctx, cancel, signals)
}

var errSupervisorEnded = errors.New("the supervisor has ended")

// awaitEnd returns when the supervisor has ended. The supervisor writes nothing to the pipe.
func awaitEnd(parentPipe *os.File) {
	defer parentPipe.Close()
	_, _ = parentPipe.Read(make([]byte, 1))
}

// build makes the node.
func (c *child) build() error {
	cfg, err := c.load()
	if err != nil {
		return err
	}
	sockets, err := inheritedSockets()
	if err != nil {
		return exit.Failed(err)
	}
	err = c.options.UseSockets(cfg, sockets)
	takeover.CloseAll(sockets)
	if err != nil {
		return exit.Failed(err)
	}
	if c.options.Role == node.RoleWorker && c.options.EPP == nil && cfg.EPP.Listen != "" {
		// Only one of the workers could open the socket itself.
		c.log.Warn("this key is read only at the start; the old value stays until a restart", "key", "epp.listen")
		cfg.EPP.Listen = ""
	}
	c.serving = make(chan struct{})
	c.options.OnServing = func() { close(c.serving) }
	if c.node, err = node.New(cfg, c.log, c.options); err != nil {
		c.options.CloseSockets()
	}
	return err
}

// inheritedSockets returns the sockets that the supervisor passed on.
func inheritedSockets() ([]takeover.Socket, error) {
	var names []string
	if err := json.Unmarshal([]byte(os.Getenv(socketsVariable)), &names); err != nil {
		return nil, fmt.Errorf("read %s: %w", socketsVariable, err)
	}
	if err := os.Unsetenv(socketsVariable); err != nil {
		return nil, err
	}
	sockets := make([]takeover.Socket, len(names))
	for i, name := range names {
		syscall.CloseOnExec(firstSocket + i)
		sockets[i] = takeover.Socket{Name: name, File: os.NewFile(uintptr(firstSocket+i), name)}
	}
	return sockets, nil
}

// serve serves until a signal or the end of ctx.
func (c *child) serve(ctx context.Context, cancel context.CancelCauseFunc, signals chan os.Signal) error {
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGUSR1)
	var wg sync.WaitGroup
	defer wg.Wait()
	background, stop := context.WithCancel(ctx)
	defer stop()
	wg.Go(func() { c.reportServing(background) })
	done := make(chan error, 1)
	go func() { done <- c.node.Serve(ctx) }()
	requestReload, stopReloads := startReloads(c.log, func() error { return reload(c.node, c.load) })
	defer stopReloads()
	for {
		select {
		case err := <-done:
			if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
				err = errors.Join(cause, err)
			}
			return exit.Failed(err)
		case s := <-signals:
			switch s {
			case syscall.SIGHUP:
				requestReload()
			case syscall.SIGUSR1:
				c.log.Info("leaving the sockets to other processes; the remaining requests continue")
				c.report(stateRetired)
				c.node.StopAccepting()
			case syscall.SIGINT:
				return exit.Failed(errors.New("stopped at once"))
			default:
				cancel(nil)
			}
		}
	}
}

// reportServing reports that the node accepts connections, and then that it is ready.
func (c *child) reportServing(ctx context.Context) {
	select {
	case <-c.serving:
		c.report(stateServing)
	case <-ctx.Done():
		return
	}
	for standby := false; sleep(ctx, readyEvery); {
		switch {
		case !c.node.Ready():
		case !c.node.FollowsPredecessor():
			c.report(stateReady)
			return
		case !standby:
			standby = true
			c.report(stateStandby)
		}
	}
}

// sendHeartbeats writes the state again until ctx ends.
func (c *child) sendHeartbeats(ctx context.Context) {
	for sleep(ctx, heartbeatEvery) {
		c.report("")
	}
}

// report writes a state to the lock file; "" repeats the last one. A retired child stays
// retired.
func (c *child) report(state string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if state != "" && c.state != stateRetired {
		c.state = state
	}
	if err := c.lock.SetState(c.state); err != nil {
		c.log.Warn("the supervisor cannot see that this process is alive", "error", err)
	}
}
