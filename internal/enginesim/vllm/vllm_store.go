package vllm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
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
	v   *VLLM
	dir string
}

// file returns the path of a block. Its content depends on the weights.
func (k *kvStore) file(h core.BlockHash) string {
	return filepath.Join(k.dir, fmt.Sprintf("%s-%016x.kv", k.v.compatibility(), uint64(h)))
}

// wholeBlocks calls visit for the whole blocks of a sequence's prompt in order,
// until visit returns false.
func wholeBlocks(s *core.Sequence, visit func(n int, h core.BlockHash) bool) {
	c := s.Rank.Cache
	h := c.RootHash(s.CacheKey())
	for n := 0; (n+1)*c.Size < len(s.Prompt); n++ {
		h = c.Chain(h, s.Prompt[n*c.Size:(n+1)*c.Size])
		if !visit(n, h) {
			return
		}
	}
}

// load fills a sequence's blocks, after those of the local prefix cache, with
// the blocks in the store.
func (k *kvStore) load(ctx context.Context, s *core.Sequence) error {
	if err := s.Rank.Side.SetUp(ctx, "store", k.dir); err != nil {
		return err
	}
	if s.Req.Fault == core.FailLoad {
		return k.v.loadFailed(ctx)
	}
	local, found := s.Computed/s.Rank.Cache.Size, 0
	wholeBlocks(s, func(n int, h core.BlockHash) bool {
		if n < local {
			return true
		}
		data, err := os.ReadFile(k.file(h))
		if err != nil {
			return false
		}
		s.Rank.Store(s.Blocks[n:n+1], data)
		found++
		return true
	})
	if found > 0 {
		k.v.e.Stats.Transfers.Add(1)
		s.Rank.Loaded(s, (local+found)*s.Rank.Cache.Size)
		s.Cached = s.Computed
	}
	return nil
}

// save stores the blocks of a sequence that the store lacks. The prompt must be
// computed.
func (k *kvStore) save(s *core.Sequence) error {
	names := make(map[string]core.BlockID)
	wholeBlocks(s, func(n int, h core.BlockHash) bool {
		name := k.file(h)
		if _, err := os.Stat(name); err != nil {
			names[name] = s.Blocks[n]
		}
		return true
	})
	for name, id := range names {
		if err := k.write(name, s.Rank.Content([]core.BlockID{id})); err != nil {
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

func (k *kvStore) Start() error { return nil }

func (k *kvStore) Parse(core.Fields, string) any { return nil }

func (k *kvStore) rejected(any) {}

func (k *kvStore) Message(*core.Rank, core.SideMessage) (core.SideMessage, error) {
	return core.SideMessage{}, errors.New("no KV transfer")
}

// run runs a sequence whose rank is chosen.
func (k *kvStore) run(ctx context.Context, s *core.Sequence, _ any, emit func(core.Token)) error {
	if err := s.Rank.Reserve(ctx, s, core.Room(s), true); err != nil {
		return err
	}
	if err := k.load(ctx, s); err != nil {
		return err
	}
	if err := s.Rank.Prefill(ctx, s); err != nil {
		return err
	}
	if err := k.save(s); err != nil {
		k.v.e.Cfg.Log.Error("KV store failed", "error", err)
	}
	return s.Rank.Decode(ctx, s, emit)
}
