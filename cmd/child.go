package cmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/proxy/handover"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// What a supervisor and its children agree about. Signals: SIGTERM drains, however
// often it comes, SIGINT stops at once, SIGUSR1 leaves the sockets to others,
// SIGHUP reloads. A child says in its lock how it is.
const (
	childCommand = "child"
	// socketsVariable names the open sockets that a child is given, a JSON list, in
	// the order of the descriptors from firstSocket on.
	socketsVariable = "PDPROXY_SOCKETS"
	// leashFD is the end of a pipe: as long as nothing has come of it the child
	// ends with its supervisor.
	leashFD     = 3
	firstSocket = 4

	stateStarting = "starting"
	stateServing  = "serving" // its sockets are served
	stateReady    = "ready"   // and requests could be
	stateRetired  = "retired" // others have the sockets

	// beatEvery is how often a child shows that it is alive.
	beatEvery = time.Second
	// exitSlotTaken says that another process has the child's slot.
	exitSlotTaken = 3
)

// slotName is the name of what a child has in the fleet's directory.
func slotName(role Role, slot int, kind string) string {
	return string(role) + "-" + strconv.Itoa(slot) + "." + kind
}

// childCommand is how a supervisor starts the processes of its fleet.
func (a *app) childCommand() *cobra.Command {
	var role, dir string
	var slot int
	c := &cobra.Command{
		Use:    childCommand + " config.toml",
		Short:  "A process of a fleet, started by pdproxy run",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			log, err := a.logger()
			if err != nil {
				return err
			}
			home, err := privatedir.OpenExisting(dir)
			if err != nil {
				return failed(fmt.Errorf("fleet.dir: %w", err))
			}
			defer home.Close()
			c := &child{
				part: Part{Role: Role(role), Slot: slot, Dir: home},
				path: args[0], log: log.With("role", role, "slot", slot),
			}
			return c.run()
		},
	}
	c.Flags().StringVar(&role, "role", "", "coordinator or worker")
	c.Flags().StringVar(&dir, "dir", "", "the fleet's directory")
	c.Flags().IntVar(&slot, "slot", 0, "the number among its role's")
	return c
}

// child is this process as one of a fleet.
type child struct {
	part    Part
	path    string // of the configuration
	log     *slog.Logger
	node    *Node
	sockets []handover.Socket // all of the fleet's, for a supervisor that comes later

	mu    sync.Mutex
	lock  *privatedir.Lock // guarded by mu
	state string           // guarded by mu
}

func (c *child) run() error {
	signal.Ignore(syscall.SIGUSR2) // is the supervisor's
	lock, err := c.part.Dir.TryLock(slotName(c.part.Role, c.part.Slot, "lock"))
	var taken *privatedir.LockedError
	if errors.As(err, &taken) {
		return &failure{exitSlotTaken, err}
	}
	if err != nil {
		return failed(err)
	}
	defer lock.Unlock()
	c.lock = lock
	c.say(stateStarting)
	ctx, cancel := context.WithCancelCause(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() { c.beat(ctx) })
	go func() { // ends with the process: a pipe cannot be read until ctx ends
		if err := awaitRelease(os.NewFile(leashFD, "leash")); err != nil {
			cancel(err)
		}
	}()
	if err := c.build(); err != nil {
		return err
	}
	defer func() { c.dropSockets() }()
	return c.serve(ctx, cancel)
}

// awaitRelease waits until the supervisor lets the process go on without it.
func awaitRelease(leash *os.File) error {
	defer leash.Close()
	if _, err := io.ReadFull(leash, make([]byte, 1)); err != nil {
		return errors.New("the supervisor has ended while the fleet was starting")
	}
	return nil
}

// build makes the node.
func (c *child) build() error {
	cfg, err := loadConfig(c.path)
	if err != nil {
		return err
	}
	if c.sockets, err = inherited(); err != nil {
		return failed(err)
	}
	if err := c.part.open(cfg, c.sockets); err != nil {
		return failed(err)
	}
	if c.node, err = NewNode(cfg, c.log, c.part); err != nil {
		c.part.close()
	}
	return err
}

// inherited returns the sockets that the supervisor has given.
func inherited() ([]handover.Socket, error) {
	var names []string
	if err := json.Unmarshal([]byte(os.Getenv(socketsVariable)), &names); err != nil {
		return nil, fmt.Errorf("read %s: %w", socketsVariable, err)
	}
	if err := os.Unsetenv(socketsVariable); err != nil {
		return nil, err
	}
	sockets := make([]handover.Socket, len(names))
	for i, name := range names {
		syscall.CloseOnExec(firstSocket + i)
		sockets[i] = handover.Socket{Name: name, File: os.NewFile(uintptr(firstSocket+i), name)}
	}
	return sockets, nil
}

// serve serves until a signal, or ctx, ends it.
func (c *child) serve(ctx context.Context, cancel context.CancelCauseFunc) error {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1)
	defer signal.Stop(signals)
	control, err := handover.Listen(c.part.Dir, slotName(c.part.Role, c.part.Slot, "sock"), c.log)
	if err != nil {
		return failed(err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	background, stop := context.WithCancel(ctx)
	defer stop()
	wg.Go(func() { _, _ = control.Serve(background, c.offer, nil) }) // ends with background
	serving := make(chan struct{})
	c.node.serving = func() { close(serving) }
	wg.Go(func() { c.watch(background, serving) })
	done := make(chan error, 1)
	go func() { done <- c.node.Serve(ctx) }()
	for {
		select {
		case err := <-done:
			if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
				err = errors.Join(cause, err)
			}
			return failed(err)
		case s := <-signals:
			switch s {
			case syscall.SIGHUP:
				c.node.logReload(c.reload())
			case syscall.SIGUSR1:
				c.log.Info("leaving the sockets to others; going on with what runs")
				c.say(stateRetired)
				c.node.front.Retire()
				c.dropSockets()
			case syscall.SIGINT:
				return failed(errors.New("stopped at once"))
			default:
				cancel(nil)
			}
		}
	}
}

func (c *child) reload() error {
	next, err := loadConfig(c.path)
	if err != nil {
		return err
	}
	return c.node.Reload(next)
}

// watch says how the node is, once it serves.
func (c *child) watch(ctx context.Context, serving <-chan struct{}) {
	select {
	case <-serving:
		c.say(stateServing)
	case <-ctx.Done():
		return
	}
	for sleep(ctx, 20*time.Millisecond) {
		if c.node.server.Ready() {
			c.say(stateReady)
			return
		}
	}
}

// beat shows that the process is alive, and how it is.
func (c *child) beat(ctx context.Context) {
	for sleep(ctx, beatEvery) {
		c.say("")
	}
}

// say sets the state, or repeats it. What has retired stays so.
func (c *child) say(state string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if state != "" && c.state != stateRetired {
		c.state = state
	}
	if err := c.lock.Say(c.state); err != nil {
		c.log.Warn("the supervisor cannot see that this process is alive", "error", err)
	}
}

// offer is what a supervisor that comes later is given.
func (c *child) offer() (o handover.Offer, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return copies(c.sockets)
}

// copies makes an offer of sockets that stay open.
func copies(sockets []handover.Socket) (o handover.Offer, err error) {
	for _, s := range sockets {
		copied, err := s.Copy()
		if err != nil {
			handover.CloseAll(o.Sockets)
			return handover.Offer{}, err
		}
		o.Sockets = append(o.Sockets, copied)
	}
	return o, nil
}

func (c *child) dropSockets() {
	c.mu.Lock()
	defer c.mu.Unlock()
	handover.CloseAll(c.sockets)
	c.sockets = nil
}
