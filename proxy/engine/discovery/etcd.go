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
	// listEvery is the time between two listings of all keys while a watch runs: a
	// watch that continues in another store's history would never report anything.
	listEvery = 10 * time.Second
	// listAgain is the pause after a failed listing.
	listAgain = time.Second
	// keepLost is how long engines stay after a store has lost its data: the engines need
	// time to notice that their leases no longer exist.
	keepLost = 30 * time.Second
)

// etcdSource finds engines that register under a prefix in etcd. Each has its own
// lease: the key disappears with the lease.
type etcdSource struct {
	book
	etcd   clientv3.Config
	prefix string
	every  time.Duration // between two listings

	cluster  uint64 // cluster and revision of the last listing
	revision int64
}

func newEtcd(name string, endpoints []string, prefix string, log *slog.Logger) *etcdSource {
	return &etcdSource{
		book: newBook(name, log), prefix: prefix, every: listEvery,
		etcd: etcd.Client(endpoints),
	}
}

// Run lists the records and then watches their changes.
func (s *etcdSource) Run(ctx context.Context, found func([]config.Engine)) {
	t := trouble{log: s.log, source: s.name}
	s.etcd.Context = ctx
	for ctx.Err() == nil {
		// With a password, New requests a token, which fails while etcd is unreachable.
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

// list replaces the records by those of the store.
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

// takeAll replaces the records by those of one listing.
func (s *etcdSource) takeAll(head *etcdserverpb.ResponseHeader, kvs []*mvccpb.KeyValue, now time.Time) {
	// A store's revisions only grow: a lower one means other data.
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

// watch applies changes after the last listing until the next listing is due. An error is
// the reason for an immediate new listing. Compacted changes are not an error: the next
// listing has them.
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

// put stores a record.
func (s *etcdSource) put(kv *mvccpb.KeyValue) { s.note(string(kv.Key), kv.Value, kv.CreateRevision) }
