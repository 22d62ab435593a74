package election

import (
	"context"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/pdproxy/pdproxy/proxy/etcd"
)

const (
	// readEvery is the time between two readings of the record while a watch
	// runs: a watch that went on where another store's history ended would be
	// silent for ever.
	readEvery = 10 * time.Second
	// again is the time until etcd is tried once more. Each try has a client of
	// its own: one that has failed for a minute waits as long before it dials.
	again = 300 * time.Millisecond
)

// key is where the leader's record is.
func (e *Election) key() string { return e.prefix + "leader" }

// follow keeps the standing that of the record in the store until ctx ends.
func (e *Election) follow(ctx context.Context) {
	var t trouble
	for ctx.Err() == nil {
		e.withClient(ctx, &t, e.watch)
		pause(ctx, again)
	}
}

// withClient runs do with a client of its own.
func (e *Election) withClient(ctx context.Context, t *trouble, do func(context.Context, *clientv3.Client, *trouble) error) {
	// Nothing that do has left behind keeps the client: its context is over.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	o := e.o.Etcd
	o.Context = ctx
	client, err := clientv3.New(o) // with a password it asks for a token
	if err == nil {
		err = do(ctx, client, t)
		_ = client.Close() // says only that ctx is over
	}
	if ctx.Err() == nil {
		t.note(e, err)
	}
}

// watch reads the record and what becomes of it, until an error says why it
// cannot.
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

// read takes in the record as it is now.
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

// take takes in a record. One that cannot be read is left as it is: the next
// leader writes over it.
func (e *Election) take(kv *mvccpb.KeyValue) {
	l, err := parse(kv.Value)
	if err != nil {
		e.o.Log.Warn("the leader's record is not understood", "key", e.key(), "error", err)
		return
	}
	e.saw(l)
}

// changes takes in what becomes of the record after a revision, until it is
// time to read it again.
func (e *Election) changes(ctx context.Context, client *clientv3.Client, revision int64) error {
	return etcd.Follow(ctx, client, e.key(), revision, readEvery, func(batch clientv3.WatchResponse) {
		for _, event := range batch.Events {
			if event.Type == mvccpb.PUT {
				e.take(event.Kv)
			}
		}
	})
}

// trouble says once that etcd does not answer, and once that it does again.
type trouble struct{ there bool }

func (t *trouble) note(e *Election, err error) {
	if there := err != nil; there != t.there {
		t.there = there
		if there {
			e.o.Log.Warn("the election's etcd does not answer; the coordinator that led last is kept", "error", err)
		} else {
			e.o.Log.Info("the election's etcd answers again")
		}
	}
}

// pause waits, unless ctx ends before.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
