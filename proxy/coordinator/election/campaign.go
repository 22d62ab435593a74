package election

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/pdproxy/pdproxy/proxy/etcd"
)

// Run follows the leader's record until ctx ends. In a coordinator it also takes part in
// the election: the first in line leads.
func (e *Election) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	if e.o.Address != "" {
		wg.Go(func() { e.campaign(ctx) })
	}
	e.follow(ctx)
}

// campaign waits in line and leads, one term after the other.
func (e *Election) campaign(ctx context.Context) {
	defer e.Resign() // a process that has left the line does not lead
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.stands, cancel)()
	var t trouble
	var lease clientv3.LeaseID
	for ctx.Err() == nil {
		// This context outlives ctx, because leaving the line also needs etcd.
		e.withClient(context.WithoutCancel(ctx), &t, func(_ context.Context, client *clientv3.Client, t *trouble) error {
			return e.term(ctx, client, &lease, t)
		})
		pause(ctx, again)
	}
}

// term waits in line and leads, until etcd says that the lease has run out (then lease is
// nil), another coordinator leads, or ctx ends. A lease of an earlier term keeps its place
// in line if etcd still has it: an etcd that was down has let no lease run out.
func (e *Election) term(ctx context.Context, client *clientv3.Client, lease *clientv3.LeaseID, t *trouble) error {
	if err := e.hold(ctx, client, lease); err != nil {
		return err
	}
	t.note(e, nil)
	session, err := concurrency.NewSession(client, concurrency.WithLease(*lease), concurrency.WithTTL(seconds(e.o.Lease)))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(session.Ctx(), func() { cancel(errLease) })()
	// A candidate that leaves tells etcd, however long that takes.
	defer context.AfterFunc(ctx, func() { time.AfterFunc(2*etcd.Timeout, func() { _ = client.Close() }) })()

	line := concurrency.NewElection(session, e.prefix+"candidates")
	if err = line.Campaign(ctx, e.o.Node); err == nil {
		err = e.reign(ctx, client, line)
	}
	if errors.Is(context.Cause(ctx), errLease) {
		return errLease // the next term checks that
	}
	session.Orphan()
	*lease = clientv3.NoLease
	bounded, done := context.WithTimeout(context.WithoutCancel(ctx), etcd.Timeout)
	defer done()
	_, _ = client.Revoke(bounded, session.Lease()) // if this fails, the lease runs out
	return err
}

// holdTimeout bounds the request for a lease. It is short, so that after an outage of etcd
// the former leaders come back before their leases run out.
const holdTimeout = time.Second

var errLease = errors.New("the lease is not renewed")

// hold makes sure that there is a lease: the one from before, or a new one.
func (e *Election) hold(ctx context.Context, client *clientv3.Client, lease *clientv3.LeaseID) error {
	ctx, cancel := context.WithTimeout(ctx, holdTimeout)
	defer cancel()
	if *lease != clientv3.NoLease {
		left, err := client.TimeToLive(ctx, *lease)
		if err != nil || left.TTL > 0 {
			return err
		}
		*lease = clientv3.NoLease // it has run out
	}
	granted, err := client.Grant(ctx, int64(seconds(e.o.Lease)))
	if err == nil {
		*lease = granted.ID
	}
	return err
}

func seconds(d time.Duration) int { return int(d / time.Second) }

// reign writes the record and leads until ctx ends or another coordinator leads.
func (e *Election) reign(ctx context.Context, client *clientv3.Client, line *concurrency.Election) error {
	own, err := e.claim(ctx, client, line)
	if err != nil {
		return err
	}
	if !e.lead(own) {
		return errors.New("a higher epoch than the record's has been seen")
	}
	for {
		s, changed := e.Standing()
		if !s.Leads {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// claim writes this process's record in place of the former leader's. It fails if the
// place in line is lost or another process has written in the meantime.
func (e *Election) claim(ctx context.Context, client *clientv3.Client, line *concurrency.Election) (Leader, error) {
	ctx, cancel := context.WithTimeout(ctx, etcd.Timeout)
	defer cancel()
	answer, err := client.Get(ctx, e.key())
	if err != nil {
		return Leader{}, err
	}
	var before Leader
	var revision int64 // 0: there is no record
	for _, kv := range answer.Kvs {
		before, _ = parse(kv.Value) // an unreadable record is replaced
		revision = kv.ModRevision
	}
	own := e.next(before, time.Now())
	if own == before {
		return own, nil // etcd was down, and nobody has led since
	}
	value, err := json.Marshal(own)
	if err != nil {
		return Leader{}, err
	}
	done, err := client.Txn(ctx).If(
		clientv3.Compare(clientv3.CreateRevision(line.Key()), "=", line.Rev()),
		clientv3.Compare(clientv3.ModRevision(e.key()), "=", revision),
	).Then(clientv3.OpPut(e.key(), string(value))).Commit()
	if err == nil && !done.Succeeded {
		err = errors.New("the place in line is lost")
	}
	return own, err
}

// next returns this process's record after the stored one. A leader after which nobody
// else has led keeps its epoch.
func (e *Election) next(before Leader, now time.Time) Leader {
	s, _ := e.Standing()
	if s.Leads && s.Leader.Epoch >= before.Epoch {
		return s.Leader
	}
	own := Leader{Address: e.o.Address, Node: e.o.Node, ID: e.id}
	if before.ID == own.ID && before.Epoch >= s.Leader.Epoch { // the record was written, and the answer was lost
		own.Epoch = before.Epoch
		return own
	}
	own.Epoch = Next(max(before.Epoch, s.Leader.Epoch), now)
	return own
}

// Next returns the epoch of a leader that begins at now, after a leader of epoch before.
func Next(before uint64, now time.Time) uint64 {
	return max(before+1, uint64(max(now.UnixMilli(), 1)))
}
