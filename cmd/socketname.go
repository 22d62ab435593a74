package cmd

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

// lookAtNameEvery is how often a coordinator that leads looks whether it is the one
// that is found.
const lookAtNameEvery = time.Second

// socketName is the name by which local processes find the socket of the coordinator
// that leads: a symbolic link to the socket, which each coordinator has beside it
// under a name of its own. So a name that a coordinator has lost it can take back.
type socketName struct {
	dir  *privatedir.Dir
	name string
	own  string // name of this coordinator's socket
}

// listenBeside opens the socket of this process beside its name, by which it is not
// found yet.
func listenBeside(dir *privatedir.Dir, name string) (*net.UnixListener, *socketName, error) {
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

// removeDead removes the sockets that processes have left beside the name.
func (n *socketName) removeDead() error {
	sockets, err := n.dir.Names(n.name+".", "")
	for _, socket := range sockets {
		text, _, _ := strings.Cut(strings.TrimPrefix(socket, n.name+"."), ".")
		pid, err := strconv.Atoi(text)
		// Between its opening and its listening a socket looks dead.
		if err != nil || pid != os.Getpid() && !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			continue
		}
		if n.deserted(socket) {
			_ = n.dir.Remove(socket) // it only takes room
		}
	}
	return err
}

// deserted reports whether nobody listens at a socket.
func (n *socketName) deserted(socket string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	c, err := n.dir.Dial(ctx, "unix", socket)
	if err == nil {
		c.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist)
}

// take makes this coordinator the one that is found.
func (n *socketName) take() error {
	next := n.own + ".next"
	if err := n.dir.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := n.dir.Symlink(n.own, next); err != nil {
		return err
	}
	return n.dir.Rename(next, n.name)
}

// leave removes the socket of this coordinator, which has been closed.
func (n *socketName) leave() { _ = n.dir.Remove(n.own) } // the next coordinator removes it otherwise

// lost reports whether another has taken the name, and is gone: a successor that
// failed.
func (n *socketName) lost() bool {
	to, err := n.dir.Readlink(n.name)
	return (err != nil || to != n.own) && n.deserted(n.name)
}

// keep looks from time to time until ctx ends, and calls lost when the name is, while
// leads says that it is to be this coordinator's.
func (n *socketName) keep(ctx context.Context, leads func() bool, lost func()) {
	tick := time.NewTicker(lookAtNameEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if leads() && n.lost() {
			lost()
		}
	}
}
