package fleet

import (
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// store is an etcd of one member.
type store struct {
	t                *testing.T
	dir, addr, peers string
	cmd              *exec.Cmd
	client           *clientv3.Client
}

func startStore(t *testing.T) *store {
	t.Helper()
	s := &store{t: t, dir: filepath.Join(t.TempDir(), "etcd"), addr: freeAddr(t), peers: freeAddr(t)}
	s.start()
	t.Cleanup(func() {
		s.client.Close()
		s.kill()
	})
	return s
}

// freeAddr returns a loopback address that is free now.
func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// start runs etcd on what is in its folder and waits until it answers.
func (s *store) start() {
	s.t.Helper()
	s.cmd = exec.Command("etcd", "--name", "e0", "--data-dir", s.dir,
		"--listen-client-urls", "http://"+s.addr, "--advertise-client-urls", "http://"+s.addr,
		"--listen-peer-urls", "http://"+s.peers, "--initial-advertise-peer-urls", "http://"+s.peers,
		"--initial-cluster", "e0=http://"+s.peers)
	s.cmd.Env = append(os.Environ(), "ETCD_UNSUPPORTED_ARCH=arm64")
	if err := s.cmd.Start(); err != nil {
		s.t.Fatalf("install etcd-server by hand: %v", err)
	}
	if s.client != nil { // one that has failed for long waits as long before it dials
		s.client.Close()
	}
	var err error
	if s.client, err = clientv3.New(clientv3.Config{Endpoints: []string{"http://" + s.addr}, Logger: zap.NewNop()}); err != nil {
		s.t.Fatal(err)
	}
	eventually(s.t, "etcd answers", func() bool {
		ctx, cancel := context.WithTimeout(s.t.Context(), time.Second)
		defer cancel()
		_, err := s.client.Get(ctx, "x")
		return err == nil
	})
}

// kill ends etcd as kill -9 does. It may be called twice.
func (s *store) kill() {
	if s.cmd.ProcessState != nil {
		return
	}
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait() // killed, it says
}

// wire is what stands between a host and etcd: it can be cut.
type wire struct {
	listener net.Listener
	to       string
	wg       sync.WaitGroup

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool // open ones, of both sides
}

func newWire(t *testing.T, to string) *wire {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{listener: l, to: to, conns: map[net.Conn]bool{}}
	w.wg.Go(w.accept)
	t.Cleanup(func() {
		l.Close()
		w.set(true)
		w.wg.Wait()
	})
	return w
}

func (w *wire) url() string { return "http://" + w.listener.Addr().String() }

// set cuts the wire, or joins it.
func (w *wire) set(cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut = cut
	for c := range w.conns {
		if cut {
			c.Close()
		}
	}
}

func (w *wire) accept() {
	for {
		near, err := w.listener.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial("tcp", w.to)
		if err != nil {
			near.Close()
			continue
		}
		if w.keep(near, far) {
			w.wg.Go(func() { w.copy(near, far) })
			w.wg.Go(func() { w.copy(far, near) })
		}
	}
}

// keep notes a pair of connections; a cut wire has none.
func (w *wire) keep(pair ...net.Conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range pair {
		if w.cut {
			c.Close()
		} else {
			w.conns[c] = true
		}
	}
	return !w.cut
}

func (w *wire) copy(to, from net.Conn) {
	_, _ = io.Copy(to, from) // its end is all that counts
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range []net.Conn{to, from} {
		c.Close()
		delete(w.conns, c)
	}
}
