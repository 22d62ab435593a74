package testbed

import (
	"context"
	"crypto/tls"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// Secured is an etcd that uses certificates for itself and its clients.
type Secured struct {
	CA, Cert, Key string // files
	Client        *tls.Config
}

// Etcd is a real etcd of one member. It ends with its test.
type Etcd struct {
	Addr string // of clients, host:port

	t     *testing.T
	dir   string
	peers string
	tls   *Secured // nil: plain http
	cmd   *exec.Cmd

	mu     sync.Mutex
	client *clientv3.Client // guarded by mu
}

// StartEtcd starts an etcd without data, and waits until it answers.
func StartEtcd(t *testing.T, s *Secured) *Etcd {
	t.Helper()
	if err := InstallEtcd(); err != nil {
		t.Fatal(err)
	}
	e := &Etcd{Addr: FreeAddr(t), t: t, dir: filepath.Join(t.TempDir(), "etcd"), peers: FreeAddr(t), tls: s}
	e.Start()
	t.Cleanup(func() {
		e.Client().Close()
		e.Kill()
	})
	return e
}

// URL returns the URL for clients.
func (e *Etcd) URL() string {
	if e.tls != nil {
		return "https://" + e.Addr
	}
	return "http://" + e.Addr
}

// Start runs etcd on the data in its folder and waits until it answers.
func (e *Etcd) Start() {
	e.t.Helper()
	e.cmd = exec.Command("etcd", "--name", "e0", "--data-dir", e.dir,
		"--listen-client-urls", e.URL(), "--advertise-client-urls", e.URL(),
		"--listen-peer-urls", "http://"+e.peers, "--initial-advertise-peer-urls", "http://"+e.peers,
		"--initial-cluster", "e0=http://"+e.peers)
	if e.tls != nil {
		e.cmd.Args = append(e.cmd.Args, "--cert-file", e.tls.Cert, "--key-file", e.tls.Key,
			"--client-cert-auth", "--trusted-ca-file", e.tls.CA)
	}
	e.cmd.Env = append(os.Environ(), "ETCD_UNSUPPORTED_ARCH=arm64")
	if err := e.cmd.Start(); err != nil {
		e.t.Fatal(err)
	}
	e.dial()
	Eventually(e.t, "etcd answers", func() bool {
		ctx, cancel := context.WithTimeout(e.t.Context(), time.Second)
		defer cancel()
		_, err := e.Client().Get(ctx, "x")
		return err == nil
	})
}

// Client returns the test's client. It is a new one after each Start.
func (e *Etcd) Client() *clientv3.Client {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.client
}

// dial makes a new client, because a client that has failed for a long time
// waits as long before it dials again.
func (e *Etcd) dial() {
	e.t.Helper()
	c := clientv3.Config{Endpoints: []string{e.URL()}, Logger: zap.NewNop()}
	if e.tls != nil {
		c.TLS = e.tls.Client
	}
	client, err := clientv3.New(c)
	if err != nil {
		e.t.Fatal(err)
	}
	e.mu.Lock()
	old := e.client
	e.client = client
	e.mu.Unlock()
	if old != nil {
		old.Close()
	}
}

// Kill ends etcd as kill -9 does. It may be called twice.
func (e *Etcd) Kill() {
	if e.cmd.ProcessState != nil {
		return
	}
	if err := e.cmd.Process.Kill(); err != nil {
		e.t.Error(err)
	}
	_ = e.cmd.Wait() // the error only reports that the process was killed
}

// Empty deletes etcd's data. etcd must not run.
func (e *Etcd) Empty() {
	e.t.Helper()
	if err := os.RemoveAll(e.dir); err != nil {
		e.t.Fatal(err)
	}
}
