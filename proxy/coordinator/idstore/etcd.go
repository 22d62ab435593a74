package idstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// Prefix is the prefix in etcd of node numbers and id marks. All fleets that share an etcd
// use it, because they may share engines.
const Prefix = "/pdproxy/ids/"

// nodeTTL is the time in seconds for which a node number stays taken when its coordinator
// has died or cannot reach etcd.
const nodeTTL = 15

// tries bounds how often a reservation is retried when other coordinators were faster.
const tries = 8

// ahead is the distance from the clock to the first ids of a node without a mark. An etcd
// that has lost its data has also lost the marks of live coordinators.
const ahead = 24 * time.Hour

// Etcd is the Store of several coordinators. Each coordinator has its own node number
// under a lease, at PREFIX/nodes/N. The mark of a node is at PREFIX/marks/N, without a
// lease. A coordinator raises the mark by compare-and-swap, and only while it holds the
// node. So a coordinator that has lost its node cannot reserve ids of the node, and the
// next holder begins above the reserved blocks.
type Etcd struct {
	etcd   clientv3.Config
	prefix string
	token  string // value of the node's key that identifies this process

	mu      sync.Mutex
	client  *clientv3.Client     // guarded by mu; nil before the first use
	node    int                  // guarded by mu; -1: none was held yet
	session *concurrency.Session // guarded by mu; nil: no node is held
	seen    map[int]int64        // guarded by mu; marks that this process has set
}

// NewEtcd returns the store below prefix for a coordinator; the name is for operators
// only. It connects at the first use.
func NewEtcd(etcd clientv3.Config, prefix, name string) *Etcd {
	return &Etcd{
		etcd: etcd, prefix: prefix, token: name + " " + strconv.FormatUint(rand.Uint64(), 16),
		node: -1, seen: make(map[int]int64),
	}
}

// errLost reports that another coordinator has this node or has raised its mark.
var errLost = errors.New("another coordinator was faster")

// Reserve implements Store.
func (e *Etcd) Reserve(ctx context.Context, now time.Time, width time.Duration) (disaggid.Block, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.client == nil {
		client, err := clientv3.New(e.etcd) // if a password is set, New requests a token from etcd
		if err != nil {
			return disaggid.Block{}, err
		}
		e.client = client
	}
	for range tries {
		err := e.hold(ctx)
		if err == nil {
			var b disaggid.Block
			if b, err = e.raise(ctx, now, width); err == nil {
				return b, nil
			}
		}
		if !errors.Is(err, errLost) {
			return disaggid.Block{}, err
		}
		e.drop()
	}
	return disaggid.Block{}, errLost
}

// hold makes sure that this process has a node number; e.mu is held.
func (e *Etcd) hold(ctx context.Context) error {
	if e.session != nil {
		select {
		case <-e.session.Done():
			e.session = nil
		default:
			return nil
		}
	}
	lease, err := e.client.Grant(ctx, nodeTTL)
	if err != nil {
		return err
	}
	// The session renews the lease for longer than this reservation takes.
	session, err := concurrency.NewSession(e.client, concurrency.WithLease(lease.ID), concurrency.WithTTL(nodeTTL))
	if err != nil {
		return err
	}
	if err := e.claim(ctx, lease.ID); err != nil {
		session.Orphan()
		return err
	}
	e.session = session
	return nil
}

// claim takes a node number: the number that this process had before, otherwise the next
// free number.
func (e *Etcd) claim(ctx context.Context, lease clientv3.LeaseID) error {
	list, err := e.client.Get(ctx, e.prefix+"nodes/", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return err
	}
	taken := make(map[string]bool, len(list.Kvs))
	for _, kv := range list.Kvs {
		taken[strings.TrimPrefix(string(kv.Key), e.prefix+"nodes/")] = true
	}
	if e.node >= 0 {
		again, err := e.client.Txn(ctx).
			If(clientv3.Compare(clientv3.Value(e.nodeKey()), "=", e.token)).
			Then(clientv3.OpPut(e.nodeKey(), e.token, clientv3.WithLease(lease))).Commit()
		if err != nil || again.Succeeded {
			return err
		}
	}
	first := e.node
	if first < 0 {
		first = rand.IntN(256) // a random start rarely gives a number that was in use shortly before
	}
	for i := range 256 {
		e.node = (first + i) & 255
		if taken[strconv.Itoa(e.node)] {
			continue
		}
		free, err := e.client.Txn(ctx).
			If(clientv3.Compare(clientv3.CreateRevision(e.nodeKey()), "=", 0)).
			Then(clientv3.OpPut(e.nodeKey(), e.token, clientv3.WithLease(lease))).Commit()
		if err != nil || free.Succeeded {
			return err
		}
	}
	return fmt.Errorf("every node number below %snodes/ is taken", e.prefix)
}

// raise raises the mark of this process's node. The caller holds e.mu.
func (e *Etcd) raise(ctx context.Context, now time.Time, width time.Duration) (disaggid.Block, error) {
	key := e.prefix + "marks/" + strconv.Itoa(e.node)
	ours := clientv3.Compare(clientv3.Value(e.nodeKey()), "=", e.token)
	read, err := e.client.Txn(ctx).If(ours).Then(clientv3.OpGet(key)).Commit()
	if err != nil {
		return disaggid.Block{}, err
	}
	if !read.Succeeded {
		return disaggid.Block{}, errLost
	}
	var mark, revision int64
	if kvs := read.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
		if mark, err = strconv.ParseInt(string(kvs[0].Value), 10, 64); err != nil || mark < disaggid.Epoch || mark > disaggid.End {
			return disaggid.Block{}, fmt.Errorf("read %s: no time in ms within id-time", key)
		}
		revision = kvs[0].ModRevision
	} else {
		now = now.Add(ahead)
	}
	b := disaggid.Block{Node: uint8(e.node), Lines: 64}
	if b.From, b.Until, err = block(now, max(mark, e.seen[e.node]), width); err != nil {
		return disaggid.Block{}, err
	}
	put, err := e.client.Txn(ctx).
		If(ours, clientv3.Compare(clientv3.ModRevision(key), "=", revision)).
		Then(clientv3.OpPut(key, strconv.FormatInt(b.Until, 10))).Commit()
	switch {
	case err != nil:
		return disaggid.Block{}, err
	case !put.Succeeded:
		return disaggid.Block{}, errLost
	}
	e.seen[e.node] = b.Until
	return b, nil
}

// drop gives up the lease of a node that this process has lost; e.mu is held.
func (e *Etcd) drop() {
	if e.session != nil {
		e.session.Orphan()
		e.session = nil
	}
}

// Close releases the node. Blocks stay reserved.
func (e *Etcd) Close(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.client == nil {
		return nil
	}
	var err error
	if e.session != nil {
		lease := e.session.Lease()
		e.drop()
		_, err = e.client.Revoke(ctx, lease)
	}
	err = errors.Join(err, e.client.Close())
	e.client = nil
	return err
}

// nodeKey returns the key of the node number. The caller holds e.mu.
func (e *Etcd) nodeKey() string { return e.prefix + "nodes/" + strconv.Itoa(e.node) }
