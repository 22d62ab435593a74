package discovery

import (
	"context"
	"log/slog"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/etcd"
)

const (
	// listEvery is the time between two listings of all keys while a watch
	// runs: a watch that went on where another store's history ended would be
	// silent for ever.
	listEvery = 10 * time.Second
	// listAgain is the time until a listing that failed is tried again.
	listAgain = time.Second
	// keepLost is how long engines stay that a store has lost with its data:
	// they have yet to find out that their leases are gone.
	keepLost = 30 * time.Second
)

// etcdSource is engines that register under a prefix in etcd, each with a lease
// of its own: the key is gone when the lease is.
type etcdSource struct {
	book
	etcd   clientv3.Config
	prefix string
	every  time.Duration // between two listings

	cluster  uint64 // of the last listing, with the revision it was made at
	revision int64
}

func newEtcd(name string, endpoints []string, prefix string, log *slog.Logger) *etcdSource {
	return &etcdSource{
		book: newBook(name, log), prefix: prefix, every: listEvery,
		etcd: etcd.Client(endpoints),
	}
}

// Run lists the records, then follows what happens to them.
func (s *etcdSource) Run(ctx context.Context, found func([]config.Engine)) {
	t := trouble{log: s.log, source: s.name}
	s.etcd.Context = ctx
	for ctx.Err() == nil {
		// With a password it asks for a token, which fails while etcd is away.
		client, err := clientv3.New(s.etcd)
		if err == nil {
			s.follow(ctx, client, &t, found)
			client.Close()
		} else if t.note(err); !pause(ctx, listAgain) {
			return
		}
	}
}

// follow lists and watches until ctx ends.
func (s *etcdSource) follow(ctx context.Context, client *clientv3.Client, t *trouble, found func([]config.Engine)) {
	for ctx.Err() == nil {
		err := s.list(ctx, client)
		if err == nil {
			found(s.engines())
			err = s.watch(ctx, client, found)
		}
		if ctx.Err() != nil {
			return
		}
		t.note(err)
		if err != nil && !pause(ctx, listAgain) {
			return
		}
	}
}

// list makes the records those of the store.
func (s *etcdSource) list(ctx context.Context, client *clientv3.Client) error {
	ctx, cancel := context.WithTimeout(ctx, etcd.Timeout)
	defer cancel()
	answer, err := client.Get(ctx, s.prefix, clientv3.WithPrefix())
	if err != nil {
		return err
	}
	s.takeAll(answer.Header, answer.Kvs, time.Now())
	return nil
}

// takeAll makes the records those of one listing.
func (s *etcdSource) takeAll(head *etcdserverpb.ResponseHeader, kvs []*mvccpb.KeyValue, now time.Time) {
	// A store's revisions only grow: one that has fewer has other data.
	lost := s.cluster != 0 && (head.ClusterId != s.cluster || head.Revision < s.revision)
	s.cluster, s.revision = head.ClusterId, head.Revision
	there := make(map[string]bool, len(kvs))
	for _, kv := range kvs {
		there[string(kv.Key)] = true
		s.put(kv)
	}
	for key, r := range s.records {
		switch {
		case there[key]:
		case lost && r.until.IsZero():
			s.records[key] = record{spec: r.spec, until: now.Add(keepLost)}
			s.log.Warn("etcd has lost its data; an engine stays until it has had time to register", "source", s.name, "engine", r.spec.Name, "for", keepLost.String())
		case now.After(r.until):
			s.drop(key)
		}
	}
}

// watch takes in what happens after the last listing, until it is time for the
// next one, or an error says why there must be one. What was compacted away is
// none: the next listing has it.
func (s *etcdSource) watch(ctx context.Context, client *clientv3.Client, found func([]config.Engine)) error {
	return etcd.Follow(ctx, client, s.prefix, s.revision, s.every, func(batch clientv3.WatchResponse) {
		for _, e := range batch.Events {
			if e.Type == mvccpb.DELETE {
				s.drop(string(e.Kv.Key))
			} else {
				s.put(e.Kv)
			}
		}
		s.revision = max(s.revision, batch.Header.Revision)
		found(s.engines())
	}, clientv3.WithPrefix())
}

// put takes a record in.
func (s *etcdSource) put(kv *mvccpb.KeyValue) { s.note(string(kv.Key), kv.Value, kv.CreateRevision) }
