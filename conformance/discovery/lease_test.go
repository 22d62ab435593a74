package discovery

import (
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator/election"
	"github.com/pdproxy/pdproxy/proxy/coordinator/idstore"
	"github.com/pdproxy/pdproxy/proxy/kube"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// over returns a client of the API server through a wire of its own.
func (c *cluster) over(t *testing.T) (*kube.Client, *testbed.Wire) {
	t.Helper()
	w := testbed.NewWire(t, c.server.addr())
	client, err := kube.Open(config.DiscoveryKubernetes{API: "https://" + w.Addr(), CA: c.certs.ca, TokenFile: c.token, Namespace: "llm"})
	if err != nil {
		t.Fatal(err)
	}
	return client, w
}

// vote starts a coordinator that reaches the API server through a wire, or a worker, which has no
// address.
func (c *cluster) vote(t *testing.T, address string) *voter {
	t.Helper()
	client, w := c.over(t)
	return newVoter(t, w, election.Options{Lease: &election.Lease{Client: client, Namespace: "llm", Name: "fleet"}, Address: address})
}

// lease returns the holder of the Lease and the leader's record in it.
func (c *cluster) lease() (holder string, leader election.Leader) {
	c.t.Helper()
	client, _ := c.over(c.t)
	o, err := client.Read(c.t.Context(), leasesPath+"/fleet")
	if err != nil {
		c.t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(o.Metadata.Annotations["pdproxy/leader"]), &leader); err != nil {
		c.t.Fatal(err)
	}
	return o.Spec.HolderIdentity, leader
}

// TestLeaseElection: the guarantees of the election by etcd hold for the election by a Lease.
func TestLeaseElection(t *testing.T) {
	t.Run("the next coordinator leads when the leader leaves", func(t *testing.T) {
		c := newCluster(t)
		a, worker := c.vote(t, "a:1"), c.vote(t, "")
		first := a.leads(t, 0)
		b := c.vote(t, "b:1")
		follows(t, first, b, worker)
		if holder, leader := c.lease(); leader != first || !strings.HasPrefix(holder, "a:1_") {
			t.Errorf("the Lease has %q and %+v", holder, leader)
		}
		a.Resign()
		second := b.leads(t, first.Epoch)
		follows(t, second, a, worker)
		third := c.vote(t, "c:1")
		follows(t, second, third)
		b.stop() // at once, not after the time of the Lease
		follows(t, third.leads(t, second.Epoch), a, worker)
		third.stop()
		if holder, _ := c.lease(); holder != "" {
			t.Errorf("%q holds the Lease after the end of the last coordinator", holder)
		}
	})
	t.Run("a coordinator that is cut off leads until it reads another's record", func(t *testing.T) {
		c := newCluster(t)
		a := c.vote(t, "a:1")
		first := a.leads(t, 0)
		b, worker := c.vote(t, "b:1"), c.vote(t, "")
		follows(t, first, b, worker)
		a.wire.Cut(true)
		second := b.leads(t, first.Epoch)
		follows(t, second, worker)
		if s := a.standing(); !s.Leads || s.Leader != first {
			t.Errorf("the leader without a connection to the API server: got %+v, want it to lead", s)
		}
		a.wire.Cut(false)
		follows(t, second, a)
	})
	t.Run("API server away", func(t *testing.T) {
		c := newCluster(t)
		a := c.vote(t, "a:1")
		first := a.leads(t, 0)
		b, worker := c.vote(t, "b:1"), c.vote(t, "")
		follows(t, first, b, worker)
		c.server.kill()
		time.Sleep(5 * time.Second) // more than twice the time of the Lease
		c.server.start()
		_, before := c.lease()
		time.Sleep(3 * time.Second) // a candidate that counted the time without the server would lead now
		if _, now := c.lease(); now != before || now != first {
			t.Errorf("the record was %+v and is %+v, want %+v", before, now, first)
		}
		a.stop()
		follows(t, b.leads(t, first.Epoch), worker)
	})
	t.Run("the Lease is deleted", func(t *testing.T) {
		c := newCluster(t)
		a := c.vote(t, "a:1")
		first := a.leads(t, 0)
		worker := c.vote(t, "")
		follows(t, first, worker)
		c.do(http.MethodDelete, leasesPath+"/fleet", fields{})
		testbed.Eventually(t, "the leader makes it again", func() bool {
			client, _ := c.over(t)
			o, err := client.Read(t.Context(), leasesPath+"/fleet")
			return err == nil && o.Spec.HolderIdentity != ""
		})
		if _, leader := c.lease(); leader != first {
			t.Errorf("the record is %+v, want %+v", leader, first)
		}
		follows(t, first, worker)
	})
}

// TestLeaseIDs: coordinators that share a Lease reserve different blocks, also after the Lease is
// lost, and reserve nothing while the mark cannot be read.
func TestLeaseIDs(t *testing.T) {
	c := newCluster(t)
	store := func() *idstore.Lease {
		client, _ := c.over(t)
		return idstore.NewLease(client, leasesPath, "fleet-ids", disaggid.Block{Node: 7, Lines: 64})
	}
	now := time.Now()
	var mu sync.Mutex
	seen := map[int64]bool{}
	var wg sync.WaitGroup
	stores := []*idstore.Lease{store(), store(), store()}
	for _, s := range stores {
		wg.Go(func() {
			for range 4 {
				b, err := s.Reserve(t.Context(), now, time.Minute)
				mu.Lock()
				if err != nil || seen[b.From] || b.Node != 7 || b.Until-b.From != 60_000 || b.From < now.Add(23*time.Hour).UnixMilli() {
					t.Errorf("got %+v, %v", b, err)
				}
				seen[b.From] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	last, err := stores[0].Reserve(t.Context(), now, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	c.do(http.MethodDelete, leasesPath+"/fleet-ids", fields{})
	if b, err := stores[0].Reserve(t.Context(), now, time.Minute); err != nil || b.From < last.Until {
		t.Errorf("after the loss of the Lease: %+v, %v", b, err)
	}
	c.do(http.MethodPatch, leasesPath+"/fleet-ids", fields{"metadata": fields{"annotations": fields{"pdproxy/ids": "soon"}}})
	if b, err := store().Reserve(t.Context(), now, time.Minute); err == nil || !strings.Contains(err.Error(), "no time in ms") {
		t.Errorf("got %+v, %v", b, err)
	}
	c.server.kill()
	if b, err := stores[1].Reserve(t.Context(), now, time.Minute); err == nil {
		t.Errorf("got %+v without an API server", b)
	}
}
