package etcd

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Follow calls take with the changes of a key after a revision, in order. It returns nil
// when the key must be read again: limit has passed, or etcd has compacted the next
// changes. Any other end is an error. opts may select more keys.
func Follow(ctx context.Context, client *clientv3.Client, key string, after int64, limit time.Duration, take func(clientv3.WatchResponse), opts ...clientv3.OpOption) error {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	changes := client.Watch(ctx, key, append(opts, clientv3.WithRev(after+1))...)
	next := time.NewTimer(limit)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-next.C:
			return nil
		case batch, open := <-changes:
			if err := batch.Err(); errors.Is(err, rpctypes.ErrCompacted) {
				return nil
			} else if err != nil {
				return err
			} else if !open {
				return errors.New("the watch has ended")
			}
			take(batch)
		}
	}
}
