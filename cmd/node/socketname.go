package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// checkNameEvery is how often a coordinator that leads checks whether the socket name
// still leads to it.
const checkNameEvery = time.Second

// socketName is the name by which workers of this host find the coordinator that leads.
// The name is a symbolic link to the socket of that coordinator. Each coordinator has a
// socket with its own name in the same folder, so a coordinator that lost the name can
// claim it again.
type socketName struct {
	dir  *privatedir.Dir
	name string
	own  string // name of this coordinator's socket
}

// listenUnderOwnName opens the socket of this process under its own name. The shared name
// does not lead to it before claim.
func listenUnderOwnName(dir *privatedir.Dir, name string) (*net.UnixListener, *socketName, error) {
	n := &socketName{dir: dir, name: name, own: fmt.Sprintf("%s.%d.%04x", name, os.Getpid(), rand.N(1<<16))}
	if err := n.removeDead(); err != nil {
		return nil, nil, err
	}
	s, err := dir.ListenUnix(n.own)
	if err != nil {
		return nil, nil, err
	}
	return s, n, nil
}

// removeDead removes the sockets that dead processes left.
func (n *socketName) removeDead() error {
	sockets, err := n.dir.Names(n.name+".", "")
	for _, socket := range sockets {
		text, _, _ := strings.Cut(strings.TrimPrefix(socket, n.name+"."), ".")
		pid, err := strconv.Atoi(text)
		// A socket of a live process may look dead: between bind and listen.
		if err != nil || pid != os.Getpid() && !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			continue
		}
		if n.refusesConnections(socket) {
			_ = n.dir.Remove(socket) // if this fails, a useless file stays
		}
	}
	return err
}

// RemoveCoordinatorSockets removes the sockets and the name of coordinators. No process of the
// folder may run.
func RemoveCoordinatorSockets(dir *privatedir.Dir) {
	names, _ := dir.Names(linkName, "") // on an error, and if Remove fails, useless files stay
	for _, name := range names {
		_ = dir.Remove(name)
	}
}

// refusesConnections reports whether no process listens at a socket.
func (n *socketName) refusesConnections(socket string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	c, err := n.dir.Dial(ctx, "unix", socket)
	if err == nil {
		c.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist)
}

// claim makes the name lead to this coordinator.
func (n *socketName) claim() error {
	next := n.own + ".next"
	if err := n.dir.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := n.dir.Symlink(n.own, next); err != nil {
		return err
	}
	return n.dir.Rename(next, n.name)
}

// remove removes the socket of this coordinator, which has been closed, and the name, if it
// leads to that socket. If another coordinator claims the name at the same moment, that
// coordinator finds the name lost and claims it again.
func (n *socketName) remove() {
	if to, err := n.dir.Readlink(n.name); err == nil && to == n.own {
		_ = n.dir.Remove(n.name) // if this fails, the next coordinator replaces it
	}
	_ = n.dir.Remove(n.own) // if this fails, the next coordinator removes it
}

// lost reports whether the name points to another coordinator that has ended. That
// coordinator was a successor that failed.
func (n *socketName) lost() bool {
	to, err := n.dir.Readlink(n.name)
	return (err != nil || to != n.own) && n.refusesConnections(n.name)
}

// keep checks the name every checkNameEvery until ctx ends. It calls reclaim if the name
// is lost while this coordinator leads.
func (n *socketName) keep(ctx context.Context, leads func() bool, reclaim func()) {
	tick := time.NewTicker(checkNameEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if leads() && n.lost() {
			reclaim()
		}
	}
}
