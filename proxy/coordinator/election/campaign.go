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

// Run follows the leader's record until ctx ends. In a coordinator, Run also takes part
// in the election: the first candidate in the queue of etcd, or the holder of the Lease, leads.
func (e *Election) Run(ctx context.Context) {
	if e.o.Lease != nil {
		e.runLease(ctx)
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	if e.o.Address != "" {
		wg.Go(func() { e.campaign(ctx) })
	}
	e.follow(ctx)
}

// campaign waits in the queue and leads, one term after another.
func (e *Election) campaign(ctx context.Context) {
	defer e.Resign() // a process that has left the queue does not lead
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.stands, cancel)()
	var t trouble
	var lease clientv3.LeaseID
	for ctx.Err() == nil {
		// The client's context outlives ctx, because leaving the queue also needs etcd.
		e.withClient(context.WithoutCancel(ctx), &t, func(_ context.Context, client *clientv3.Client, t *trouble) error {
			err := e.term(ctx, client, &lease, t)
			if ctx.Err() != nil {
				return nil // the process has ended the term, not etcd
			}
			return err
		})
		pause(ctx, again)
	}
}

// term waits in the queue and leads, until the lease is not renewed, another coordinator leads, or
// ctx ends. If the lease is not renewed, *lease stays, and the next term queries etcd whether the
// lease still exists. If it exists, the candidate keeps its place in the queue: leases do not
// expire while etcd is down. In the other cases term revokes the lease and sets *lease to NoLease.
func (e *Election) term(ctx context.Context, client *clientv3.Client, lease *clientv3.LeaseID, t *trouble) error {
	if err := e.hold(ctx, client, lease); err != nil {
		return err
	}
	t.note(e, nil)
	session, err := concurrency.NewSession(client, concurrency.WithLease(*lease), concurrency.WithTTL(seconds(e.o.TTL)))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(session.Ctx(), func() { cancel(errLease) })()
	// When ctx ends, line.Campaign removes the candidate from the queue and sets itself
	// no time limit for that. Closing the client ends the attempt.
	defer context.AfterFunc(ctx, func() { time.AfterFunc(2*etcd.Timeout, func() { _ = client.Close() }) })()

	line := concurrency.NewElection(session, e.prefix+"candidates")
	if err = line.Campaign(ctx, e.o.Node); err == nil {
		err = e.reign(ctx, client, line)
	}
	if errors.Is(context.Cause(ctx), errLease) {
		return errLease // hold checks in the next term whether the lease still exists
	}
	session.Orphan()
	*lease = clientv3.NoLease
	bounded, done := context.WithTimeout(context.WithoutCancel(ctx), etcd.Timeout)
	defer done()
	_, _ = client.Revoke(bounded, session.Lease()) // if this fails, the lease runs out
	return err
}

// holdTimeout bounds the request for a lease. It is short, so that after an outage of
// etcd the former leader renews its lease before it expires.
const holdTimeout = time.Second

var errLease = errors.New("the lease is not renewed")

// hold sets *lease to a valid lease: the earlier lease if etcd still has it, otherwise a
// new one.
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
	granted, err := client.Grant(ctx, int64(seconds(e.o.TTL)))
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

// claim replaces the former leader's record with the record of this process. claim fails
// if this process has lost its place in the queue or another process has written the
// record in the meantime.
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
		return own, nil // etcd was down, and no other coordinator has led since
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

// next returns this process's record after the stored record before. A leader keeps its
// epoch if no other coordinator has led since.
func (e *Election) next(before Leader, now time.Time) Leader {
	s, _ := e.Standing()
	if s.Leads && s.Leader.Epoch >= before.Epoch {
		return s.Leader
	}
	own := Leader{Address: e.o.Address, Node: e.o.Node, ID: e.id}
	if before.ID == own.ID && before.Epoch >= s.Leader.Epoch { // etcd stored the record of this process, and the answer was lost
		own.Epoch = before.Epoch
		return own
	}
	own.Epoch = Next(max(before.Epoch, s.Leader.Epoch), now)
	return own
}

// Next returns the epoch of a leader that begins to lead at now. before is the highest
// earlier epoch.
func Next(before uint64, now time.Time) uint64 {
	return max(before+1, uint64(max(now.UnixMilli(), 1)))
}
