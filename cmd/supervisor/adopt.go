package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/takeover"
)

// adopt gives positions to the processes that a dead supervisor left, and makes them read
// the configuration again. It retires those that do not fit the configuration.
func (s *supervisor) adopt() error {
	for _, role := range []node.Role{node.RoleCoordinator, node.RoleWorker} {
		for slot := range maxSlots {
			holder, held, err := s.dir.LockHolder(slotFile(role, slot, "lock"))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("look for processes of the last supervisor: %w", err)
			}
			if !held || holder.PID == 0 {
				continue
			}
			p := &process{role: role, slot: slot, pid: holder.PID, since: time.Now(), heartbeatAt: time.Now()}
			i := slices.IndexFunc(s.positions, func(o *position) bool { return o.role == role && o.process == nil })
			if holder.State == stateRetired || i < 0 || !s.adoptSockets(p) {
				s.surplus = append(s.surplus, p)
				s.retire(p)
				continue
			}
			s.log.Info("a process of the last supervisor continues", "process", role, "slot", slot, "pid", p.pid)
			p.reloadLater = true // the file may have changed since the process read it
			s.positions[i].process = p
		}
	}
	return nil
}

// adoptSockets copies the sockets of an adopted process, and reports whether they are those
// of the configuration.
func (s *supervisor) adoptSockets(p *process) bool {
	o, err := takeover.Copy(context.Background(), s.dir, slotFile(p.role, p.slot, "sock"))
	if err != nil {
		s.log.Warn("a process of the last supervisor does not share its sockets", "process", p.role, "slot", p.slot, "pid", p.pid, "error", err)
		return false
	}
	wanted := node.FleetSockets(s.cfg)
	unwanted := func(o takeover.Socket) bool {
		return !slices.ContainsFunc(wanted, func(w node.Socket) bool { return w.Name == o.Name })
	}
	if len(s.sockets) == 0 && len(o.Sockets) == len(wanted) && !slices.ContainsFunc(o.Sockets, unwanted) {
		s.sockets = o.Sockets
		return true
	}
	takeover.CloseAll(o.Sockets)
	return len(o.Sockets) == len(wanted) && len(s.sockets) > 0
}

// openSockets takes the sockets of the predecessor and opens those that are missing.
func (s *supervisor) openSockets() error {
	wanted := node.FleetSockets(s.cfg)
	for _, socket := range s.takeover.sockets() {
		if slices.ContainsFunc(wanted, func(w node.Socket) bool { return w.Name == socket.Name }) {
			s.sockets = append(s.sockets, socket)
		} else {
			socket.File.Close()
		}
	}
	for _, w := range wanted {
		if slices.ContainsFunc(s.sockets, func(o takeover.Socket) bool { return o.Name == w.Name }) {
			continue
		}
		key, address, _ := strings.Cut(w.Name, " ")
		socket, err := openSocket(w, address)
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		s.sockets = append(s.sockets, socket)
	}
	return nil
}

func openSocket(w node.Socket, address string) (takeover.Socket, error) {
	how := takeover.Shared()
	if w.Exclusive {
		how = &net.ListenConfig{}
	}
	l, err := how.Listen(context.Background(), "tcp", address)
	if err != nil {
		return takeover.Socket{}, err
	}
	socket, err := takeover.FromListener(w.Name, l)
	return socket, errors.Join(err, l.Close())
}

// offerWhenLeading waits until the fleet's own coordinator leads, and returns copies of the
// sockets for a successor. If the successor's coordinator followed a coordinator that does
// not lead yet, both would begin to lead.
func (s *supervisor) offerWhenLeading(ctx context.Context) (o takeover.Offer, err error) {
	for end := time.Now().Add(leadLimit); ; {
		standby := false
		if !s.runInLoop(ctx, func() {
			if standby = s.standsBy(); !standby {
				o, err = s.offer()
			}
		}) {
			return o, context.Cause(ctx)
		}
		if !standby {
			return o, err
		}
		if time.Now().After(end) {
			return o, errors.New("the last takeover has not ended yet: its predecessor's coordinator still leads")
		}
		if !sleep(ctx, readyEvery) {
			return o, context.Cause(ctx)
		}
	}
}

// standsBy reports whether the predecessor's coordinator still leads the fleet.
func (s *supervisor) standsBy() bool {
	return slices.ContainsFunc(s.positions, func(o *position) bool {
		return o.process != nil && o.process.state == stateStandby
	})
}

// offer returns copies of the sockets for a successor.
func (s *supervisor) offer() (takeover.Offer, error) {
	o, err := copySockets(s.sockets)
	o.Ready = s.wasReady
	return o, err
}

// retireAll leaves the sockets to the processes of the successor.
func (s *supervisor) retireAll() {
	s.retired = true
	s.eachProcess(s.retire)
	s.closeSockets()
}

// retire makes a process leave the sockets to other processes. A worker continues with
// its remaining requests and connects to the new coordinator. A coordinator ends.
func (s *supervisor) retire(p *process) {
	switch {
	case p.state == stateRetired:
	case p.role == node.RoleWorker:
		p.signal(s.log, syscall.SIGUSR1)
	default:
		p.signal(s.log, syscall.SIGTERM)
	}
}

func (s *supervisor) closeSockets() {
	takeover.CloseAll(s.sockets)
	s.sockets = nil
}
