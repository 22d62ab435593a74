package cmd

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

	"github.com/pdproxy/pdproxy/proxy/handover"
)

// adopt gives posts to the processes that a dead supervisor has left.
func (s *supervisor) adopt() error {
	for _, role := range []Role{RoleCoordinator, RoleWorker} {
		for slot := range maxSlots {
			holder, held, err := s.dir.Look(slotName(role, slot, "lock"))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("look for processes of the last supervisor: %w", err)
			}
			if !held || holder.PID == 0 {
				continue
			}
			p := &process{role: role, slot: slot, pid: holder.PID, since: time.Now(), seen: time.Now()}
			i := slices.IndexFunc(s.posts, func(o *post) bool { return o.role == role && o.process == nil })
			if holder.State == stateRetired || i < 0 || !s.share(p) {
				s.others = append(s.others, p)
				s.leave(p)
				continue
			}
			s.log.Info("a process of the last supervisor goes on", "process", role, "slot", slot, "pid", p.pid)
			s.posts[i].process = p
		}
	}
	return nil
}

// share takes over the sockets of an adopted process, and reports whether they are
// those that the configuration wants.
func (s *supervisor) share(p *process) bool {
	o, err := handover.Copy(context.Background(), s.dir, slotName(p.role, p.slot, "sock"))
	if err != nil {
		s.log.Warn("a process of the last supervisor does not share its sockets", "process", p.role, "slot", p.slot, "pid", p.pid, "error", err)
		return false
	}
	names := s.wanted()
	if len(s.sockets) == 0 && len(o.Sockets) == len(names) && !slices.ContainsFunc(o.Sockets, func(o handover.Socket) bool { return !slices.Contains(names, o.Name) }) {
		s.sockets = o.Sockets
		return true
	}
	handover.CloseAll(o.Sockets)
	return len(o.Sockets) == len(names) && len(s.sockets) > 0
}

// wanted are the sockets of the configuration.
func (s *supervisor) wanted() []string {
	names := []string{publicSocket(s.cfg)}
	if s.cfg.Fleet.Coordinator == "" {
		names = append(names, adminSocket(s.cfg))
		names = append(names, slices.DeleteFunc(registrationSockets(s.cfg), func(name string) bool { return name == "" })...)
	}
	if listen := s.cfg.Fleet.Listen; listen != "" && !strings.HasPrefix(listen, "unix:") { // that is the coordinator's
		names = append(names, fleetSocket(s.cfg))
	}
	return names
}

// open takes the predecessor's sockets and opens those that are missing.
func (s *supervisor) open() error {
	given := s.succession.sockets()
	wanted := s.wanted()
	for _, socket := range given {
		if slices.Contains(wanted, socket.Name) {
			s.sockets = append(s.sockets, socket)
		} else {
			socket.File.Close()
		}
	}
	for _, name := range wanted {
		if slices.ContainsFunc(s.sockets, func(o handover.Socket) bool { return o.Name == name }) {
			continue
		}
		key, address, _ := strings.Cut(name, " ")
		how := handover.Shared()
		if slices.Contains(registrationSockets(s.cfg), name) {
			how = &net.ListenConfig{} // of two who share it each would know a part of the engines
		}
		l, err := how.Listen(context.Background(), "tcp", address)
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		socket, err := handover.FromListener(name, l)
		if err = errors.Join(err, l.Close()); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		s.sockets = append(s.sockets, socket)
	}
	return nil
}

// offer is what a successor is given.
func (s *supervisor) offer() (handover.Offer, error) {
	o, err := copies(s.sockets)
	o.Ready = s.settled
	return o, err
}

// leaveAll leaves the sockets to the successor's processes.
func (s *supervisor) leaveAll() {
	s.retired = true
	s.each(s.leave)
	s.closeSockets()
}

// leave makes a process leave the sockets to others. A worker goes on with what it
// has, and finds the coordinator that is there.
func (s *supervisor) leave(p *process) {
	switch {
	case p.state == stateRetired:
	case p.role == RoleWorker:
		p.signal(s.log, syscall.SIGUSR1)
	default:
		p.signal(s.log, syscall.SIGTERM)
	}
}

func (s *supervisor) closeSockets() {
	handover.CloseAll(s.sockets)
	s.sockets = nil
}
