package enginesim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// kvStore is a KV cache that several vLLM engines share, such as LMCache's.
// Each engine stores the blocks of the prompts that it has computed, and loads
// the blocks that it lacks. The engines do not know each other, and requests
// have no parameters for it. It is a directory with a file for each block. It
// keeps only whole blocks, and never the last token's, which every engine
// computes.
//
// Source: vLLM, distributed/kv_transfer/kv_connector/v1/example_connector.py and
// lmcache_connector.py; examples/disaggregated/lmcache/.
type kvStore struct {
	v   *vllm
	dir string
}

// file returns the path of a block. Its content depends on the weights.
func (k *kvStore) file(h blockHash) string {
	return filepath.Join(k.dir, fmt.Sprintf("%s-%016x.kv", k.v.compatibility(), uint64(h)))
}

// wholeBlocks calls visit for the whole blocks of a sequence's prompt in order,
// until visit returns false.
func wholeBlocks(s *sequence, visit func(n int, h blockHash) bool) {
	c := s.rank.cache
	h := c.rootHash(s.cacheKey())
	for n := 0; (n+1)*c.size < len(s.prompt); n++ {
		h = c.chain(h, s.prompt[n*c.size:(n+1)*c.size])
		if !visit(n, h) {
			return
		}
	}
}

// load fills a sequence's blocks, after those of the local prefix cache, with
// the blocks in the store.
func (k *kvStore) load(ctx context.Context, s *sequence) error {
	if err := s.rank.side.setUp(ctx, "store", k.dir); err != nil {
		return err
	}
	if s.req.fault == failLoad {
		return k.v.loadFailed(ctx)
	}
	local, found := s.computed/s.rank.cache.size, 0
	wholeBlocks(s, func(n int, h blockHash) bool {
		if n < local {
			return true
		}
		data, err := os.ReadFile(k.file(h))
		if err != nil {
			return false
		}
		s.rank.store(s.blocks[n:n+1], data)
		found++
		return true
	})
	if found > 0 {
		k.v.e.stats.transfers.Add(1)
		s.rank.loaded(s, (local+found)*s.rank.cache.size)
		s.cached = s.computed
	}
	return nil
}

// save stores the blocks of a sequence that the store lacks. The prompt must be
// computed.
func (k *kvStore) save(s *sequence) error {
	names := make(map[string]blockID)
	wholeBlocks(s, func(n int, h blockHash) bool {
		name := k.file(h)
		if _, err := os.Stat(name); err != nil {
			names[name] = s.blocks[n]
		}
		return true
	})
	for name, id := range names {
		if err := k.write(name, s.rank.content([]blockID{id})); err != nil {
			return err
		}
	}
	return nil
}

// write makes a file that others see complete or not at all.
func (k *kvStore) write(name string, data []byte) error {
	f, err := os.CreateTemp(k.dir, "*.part")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// The rest of vllmConnector. Requests and peers send no messages to the store.

func (k *kvStore) start() error { return nil }

func (k *kvStore) parse(fields, string) any { return nil }

func (k *kvStore) rejected(any) {}

func (k *kvStore) message(*rank, sideMessage) (sideMessage, error) {
	return sideMessage{}, errors.New("no KV transfer")
}

// run runs a sequence whose rank is chosen.
func (k *kvStore) run(ctx context.Context, s *sequence, _ any, emit func(token)) error {
	if err := s.rank.reserve(ctx, s, room(s), true); err != nil {
		return err
	}
	if err := k.load(ctx, s); err != nil {
		return err
	}
	if err := s.rank.prefill(ctx, s); err != nil {
		return err
	}
	if err := k.save(s); err != nil {
		k.v.e.cfg.Log.Error("KV store failed", "error", err)
	}
	return s.rank.decode(ctx, s, emit)
}
