package discovery

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// install sees to it that there is an etcd.
var install = sync.OnceValue(func() error {
	if _, err := exec.LookPath("etcd"); err == nil {
		return nil
	}
	for _, args := range [][]string{
		{"update", "-q"},
		{"install", "-q", "-y", "--no-install-recommends", "etcd-server"},
	} {
		apt := exec.Command("apt-get", args...)
		apt.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if out, err := apt.CombinedOutput(); err != nil {
			return fmt.Errorf("install etcd-server by hand; apt-get %s: %w\n%s", args[0], err, out)
		}
	}
	_, err := exec.LookPath("etcd")
	return err
})

// store is an etcd of one member.
type store struct {
	t      *testing.T
	dir    string
	addr   string // of clients, host:port
	peers  string
	certs  *certificates // nil: plain http
	cmd    *exec.Cmd
	client *clientv3.Client
}

func startStore(t *testing.T) *store {
	t.Helper()
	return startStoreWith(t, nil)
}

// startStoreWith starts an etcd that shows and wants certificates, if there are
// any.
func startStoreWith(t *testing.T, certs *certificates) *store {
	t.Helper()
	if err := install(); err != nil {
		t.Fatal(err)
	}
	s := &store{t: t, dir: filepath.Join(t.TempDir(), "etcd"), addr: freeAddr(t), peers: freeAddr(t), certs: certs}
	client := clientv3.Config{Endpoints: []string{s.url()}, Logger: zap.NewNop()}
	if certs != nil {
		client.TLS = certs.client
	}
	var err error
	if s.client, err = clientv3.New(client); err != nil {
		t.Fatal(err)
	}
	s.start()
	t.Cleanup(func() {
		s.client.Close()
		s.kill()
	})
	return s
}

// url is where clients find it.
func (s *store) url() string {
	if s.certs != nil {
		return "https://" + s.addr
	}
	return "http://" + s.addr
}

// freeAddr returns a loopback address that is free now, and that a server can
// leave and take again: its port is below those of outgoing connections.
func freeAddr(t *testing.T) string {
	t.Helper()
	for range 1000 {
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(12000+rand.IntN(20000))))
		if err == nil {
			defer l.Close()
			return l.Addr().String()
		}
	}
	t.Fatal("no free port")
	return ""
}

// start runs etcd on what is in its folder and waits until it answers.
func (s *store) start() {
	s.t.Helper()
	s.cmd = exec.Command("etcd", "--name", "e0", "--data-dir", s.dir,
		"--listen-client-urls", s.url(), "--advertise-client-urls", s.url(),
		"--listen-peer-urls", "http://"+s.peers, "--initial-advertise-peer-urls", "http://"+s.peers,
		"--initial-cluster", "e0=http://"+s.peers)
	if s.certs != nil {
		s.cmd.Args = append(s.cmd.Args, "--cert-file", s.certs.cert, "--key-file", s.certs.key,
			"--client-cert-auth", "--trusted-ca-file", s.certs.ca)
	}
	s.cmd.Env = append(os.Environ(), "ETCD_UNSUPPORTED_ARCH=arm64")
	if err := s.cmd.Start(); err != nil {
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
	if err := s.cmd.Process.Kill(); err != nil {
		s.t.Error(err)
	}
	_ = s.cmd.Wait() // killed, it says
}

// empty deletes what etcd has stored, while it does not run.
func (s *store) empty() {
	s.t.Helper()
	if err := os.RemoveAll(s.dir); err != nil {
		s.t.Fatal(err)
	}
}

// registration is a key that lives as long as its lease, which is kept alive as
// a careful engine does: whatever happens to etcd, it registers again.
type registration struct {
	s          *store
	key, value string
	ttl        int64 // in seconds
	lease      clientv3.LeaseID
	stop       context.CancelFunc
	done       chan struct{}
}

// register puts a key under a lease of so many seconds and keeps that alive.
func (s *store) register(key, value string, ttl int64) *registration {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r := &registration{s: s, key: key, value: value, ttl: ttl, stop: cancel, done: make(chan struct{})}
	s.t.Cleanup(cancel)
	if err := r.put(ctx); err != nil {
		s.t.Fatal(err)
	}
	go r.beat(ctx)
	return r
}

// put makes a lease and, with it, the key.
func (r *registration) put(ctx context.Context) error {
	lease, err := r.s.client.Grant(ctx, r.ttl)
	if err != nil {
		return err
	}
	r.lease = lease.ID
	_, err = r.s.client.Put(ctx, r.key, r.value, clientv3.WithLease(lease.ID))
	return err
}

// beat keeps the lease alive until ctx ends.
func (r *registration) beat(ctx context.Context) {
	defer close(r.done)
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		try, cancel := context.WithTimeout(ctx, time.Second)
		if _, err := r.s.client.KeepAliveOnce(try, r.lease); errors.Is(err, rpctypes.ErrLeaseNotFound) {
			_ = r.put(try) // else the next beat does it
		}
		cancel()
	}
}

// die stops the heartbeat: the lease runs out.
func (r *registration) die() {
	r.stop()
	<-r.done
}

// leave deletes the key, as an engine does that is stopped.
func (r *registration) leave() {
	r.s.t.Helper()
	r.die()
	if _, err := r.s.client.Delete(r.s.t.Context(), r.key); err != nil {
		r.s.t.Fatal(err)
	}
}

// eventually waits for a condition; its bound is no claim about speed.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(45 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}
