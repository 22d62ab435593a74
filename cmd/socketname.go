package cmd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// lookAtNameEvery is how often a coordinator that leads looks whether it is the one
// that is found.
const lookAtNameEvery = time.Second

// socketName is the name by which local processes find the socket of the coordinator
// that leads: a symbolic link to the socket, which each coordinator has beside it
// under a name of its own. So a name that a coordinator has lost it can take back.
type socketName struct {
	path string // of the name
	own  string // of this coordinator's socket, in the same directory
}

// listenBeside opens the socket of this process beside its name, by which it is not
// found yet.
func listenBeside(path string) (*net.UnixListener, *socketName, error) {
	removeDead(path)
	n := &socketName{path: path, own: fmt.Sprintf("%s.%d.%04x", path, os.Getpid(), rand.N(1<<16))}
	s, err := net.ListenUnix("unix", &net.UnixAddr{Name: n.own, Net: "unix"})
	if err != nil {
		return nil, nil, err
	}
	if err := os.Chmod(n.own, 0o600); err != nil {
		s.Close()
		return nil, nil, err
	}
	return s, n, nil
}

// removeDead removes the sockets that processes have left beside a name.
func removeDead(path string) {
	sockets, _ := filepath.Glob(path + ".*") // a directory with a pattern's signs keeps them
	for _, socket := range sockets {
		text, _, _ := strings.Cut(strings.TrimPrefix(socket, path+"."), ".")
		pid, err := strconv.Atoi(text)
		// Between its opening and its listening a socket looks dead.
		if err != nil || pid != os.Getpid() && !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			continue
		}
		if deserted(socket) {
			_ = os.Remove(socket) // it only takes room
		}
	}
}

// deserted reports whether nobody listens at a path.
func deserted(path string) bool {
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		c.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist)
}

// take makes this coordinator the one that is found.
func (n *socketName) take() error {
	next := n.own + ".next"
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(filepath.Base(n.own), next); err != nil {
		return err
	}
	return os.Rename(next, n.path)
}

// lost reports whether another has taken the name, and is gone: a successor that
// failed.
func (n *socketName) lost() bool {
	to, err := os.Readlink(n.path)
	return (err != nil || to != filepath.Base(n.own)) && deserted(n.path)
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
