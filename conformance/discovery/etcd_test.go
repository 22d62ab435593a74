package discovery

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// store is an etcd with engines that register there.
type store struct {
	*testbed.Etcd
	t     *testing.T
	certs *certificates // nil: plain http
}

func startStore(t *testing.T) *store {
	t.Helper()
	return startStoreWith(t, nil)
}

// startStoreWith starts an etcd that uses certificates, if there are any.
func startStoreWith(t *testing.T, certs *certificates) *store {
	t.Helper()
	var secured *testbed.Secured
	if certs != nil {
		secured = &testbed.Secured{CA: certs.ca, Cert: certs.cert, Key: certs.key, Client: certs.client}
	}
	return &store{Etcd: testbed.StartEtcd(t, secured), t: t, certs: certs}
}

// registration is a key that lives as long as its lease. It keeps the lease
// alive as a careful engine does: after any failure of etcd it registers again.
type registration struct {
	s          *store
	key, value string
	ttl        int64 // in seconds
	lease      clientv3.LeaseID
	stop       context.CancelFunc
	done       chan struct{}
}

// register puts a key under a lease of that many seconds and keeps the lease
// alive.
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
	lease, err := r.s.Client().Grant(ctx, r.ttl)
	if err != nil {
		return err
	}
	r.lease = lease.ID
	_, err = r.s.Client().Put(ctx, r.key, r.value, clientv3.WithLease(lease.ID))
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
		if _, err := r.s.Client().KeepAliveOnce(try, r.lease); errors.Is(err, rpctypes.ErrLeaseNotFound) {
			_ = r.put(try) // on an error the next beat tries again
		}
		cancel()
	}
}

// die stops the heartbeat, so the lease expires.
func (r *registration) die() {
	r.stop()
	<-r.done
}

// leave deletes the key, as an engine does when it is stopped.
func (r *registration) leave() {
	r.s.t.Helper()
	r.die()
	if _, err := r.s.Client().Delete(r.s.t.Context(), r.key); err != nil {
		r.s.t.Fatal(err)
	}
}
