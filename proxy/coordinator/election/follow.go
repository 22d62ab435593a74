package election

import (
	"context"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/pdproxy/pdproxy/proxy/etcd"
)

const (
	// readEvery is the time between two reads of the record during a watch. If an
	// operator replaces the data of the store, a watch may never report a change.
	readEvery = 10 * time.Second
	// again is the pause before the next try to reach etcd. Each try uses a new client,
	// because a failing client increases its pause before each dial.
	again = 300 * time.Millisecond
)

// key returns the key of the leader's record.
func (e *Election) key() string { return e.prefix + "leader" }

// follow updates the standing from the record in the store, until ctx ends.
func (e *Election) follow(ctx context.Context) {
	var t trouble
	for ctx.Err() == nil {
		e.withClient(ctx, &t, e.watch)
		pause(ctx, again)
	}
}

// withClient runs do with a new client.
func (e *Election) withClient(ctx context.Context, t *trouble, do func(context.Context, *clientv3.Client, *trouble) error) {
	// do may leave requests open. The end of this context ends them.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	o := e.o.Etcd
	o.Context = ctx
	client, err := clientv3.New(o) // if a password is set, New requests a token from etcd
	if err == nil {
		err = do(ctx, client, t)
		_ = client.Close() // the error only repeats that the context was cancelled
	}
	if ctx.Err() == nil {
		t.note(e, err)
	}
}

// watch reads the record and its changes until an error occurs.
func (e *Election) watch(ctx context.Context, client *clientv3.Client, t *trouble) error {
	for {
		revision, err := e.read(ctx, client)
		if err != nil {
			return err
		}
		t.note(e, nil)
		if err := e.changes(ctx, client, revision); err != nil {
			return err
		}
	}
}

// read handles the current record and returns its revision.
func (e *Election) read(ctx context.Context, client *clientv3.Client) (revision int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, etcd.Timeout)
	defer cancel()
	answer, err := client.Get(ctx, e.key())
	if err != nil {
		return 0, err
	}
	for _, kv := range answer.Kvs {
		e.take(kv)
	}
	return answer.Header.Revision, nil
}

// take handles a record. take ignores an unreadable record, which the next leader
// replaces.
func (e *Election) take(kv *mvccpb.KeyValue) {
	l, err := parse(kv.Value)
	if err != nil {
		e.o.Log.Warn("the leader's record cannot be decoded", "key", e.key(), "error", err)
		return
	}
	e.saw(l)
}

// changes handles the changes of the record after revision. It returns nil when the
// record must be read again.
func (e *Election) changes(ctx context.Context, client *clientv3.Client, revision int64) error {
	return etcd.Follow(ctx, client, e.key(), revision, readEvery, func(batch clientv3.WatchResponse) {
		for _, event := range batch.Events {
			if event.Type == mvccpb.PUT {
				e.take(event.Kv)
			}
		}
	})
}

// trouble logs one line when the store stops answering, and once when the store answers again.
type trouble struct{ there bool }

func (t *trouble) note(e *Election, err error) {
	if there := err != nil; there != t.there {
		t.there = there
		if there {
			e.o.Log.Warn("the store of the election does not answer; the coordinator that led last is kept", "error", err)
		} else {
			e.o.Log.Info("the store of the election answers again")
		}
	}
}

// pause waits for d or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
