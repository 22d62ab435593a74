package supervisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/takeover"
)

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

// copySockets returns an offer of copies of the sockets.
func copySockets(sockets []takeover.Socket) (o takeover.Offer, err error) {
	for _, s := range sockets {
		copied, err := s.Copy()
		if err != nil {
			takeover.CloseAll(o.Sockets)
			return takeover.Offer{}, err
		}
		o.Sockets = append(o.Sockets, copied)
	}
	return o, nil
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
