package vllm

import (
	"context"
	"errors"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// p2pTier is vLLM's OffloadingConnector with a secondary tier of type p2p. A
// producer keeps copies of a prompt's whole blocks in its host memory until a
// consumer has fetched them by their hashes, under the transfer's id. A
// consumer computes the blocks that it does not get. The side channel replaces
// the control sockets and RDMA.
//
// Source: vLLM, v1/kv_offload/tiering/p2p/.
type p2pTier struct {
	v *VLLM

	mu       sync.Mutex
	supplies map[string]*p2pSupply // by kv_request_id
}

// p2pSupply holds the blocks of a request, also before they are computed.
type p2pSupply struct {
	stored chan struct{} // closed when the blocks are stored
	blocks map[core.BlockHash][]byte
}

// p2pTierFetch is the side channel operation that stands for FetchMsg, the NIXL
// write and TransferDone.
const p2pTierFetch = "p2p-tier-fetch"

// p2pTierLeg holds the roles of the engine according to a request's parameters.
type p2pTierLeg struct {
	decoder            string // kv_request_id of remote_decoder; "" without one
	prefiller, address string // of remote_prefiller
	forbidden          bool   // both
}

var errNoSupply = errors.New("the blocks are not there")

func (p *p2pTier) Start() error { return nil }

// Parse reads the roles. A role without its id or its address is ignored
// (_parse_source, _parse_dest).
func (p *p2pTier) Parse(params core.Fields, _ string) any {
	leg := &p2pTierLeg{}
	text := func(f core.Fields, name string) string {
		s, err := f.Str(name, "")
		if err != nil {
			return ""
		}
		return s
	}
	decoder, _ := params.Object("remote_decoder")
	leg.decoder = text(decoder, "kv_request_id")
	prefiller, _ := params.Object("remote_prefiller")
	leg.prefiller = text(prefiller, "kv_request_id")
	port, err := prefiller.Integer("remote_port", 0)
	if host := text(prefiller, "remote_host"); host == "" || err != nil || port == 0 {
		leg.prefiller = ""
	} else {
		leg.address = net.JoinHostPort(host, strconv.FormatInt(port, 10))
	}
	leg.forbidden = decoder != nil && prefiller != nil
	return leg
}

// rejected does nothing: the connector informs no peer.
func (p *p2pTier) rejected(any) {}

// run runs a sequence whose rank is chosen.
func (p *p2pTier) run(ctx context.Context, s *core.Sequence, parsed any, emit func(core.Token)) error {
	leg := parsed.(*p2pTierLeg)
	if leg.forbidden {
		p.v.e.Crash("remote_prefiller and remote_decoder in one request")
		return errEngineCore
	}
	if err := s.Rank.Reserve(ctx, s, core.Room(s), false); err != nil {
		return err
	}
	if leg.prefiller != "" {
		if err := s.Rank.WaitLoading(func() error { return p.load(ctx, s, leg) }); err != nil {
			p.v.e.Cfg.Log.Warn("KV was not fetched; it is computed", "request", s.ID, "error", err)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	if err := s.Rank.AcquireSlot(ctx, s); err != nil {
		return err
	}
	if err := s.Rank.Prefill(ctx, s); err != nil {
		return err
	}
	if leg.decoder != "" {
		p.park(s, leg.decoder)
	}
	return s.Rank.Decode(ctx, s, emit)
}

// load fetches the whole blocks that are not in the local prefix cache.
func (p *p2pTier) load(ctx context.Context, s *core.Sequence, leg *p2pTierLeg) error {
	if s.Req.Fault == core.FailLoad {
		return errors.New("fault")
	}
	limit, cancel := context.WithTimeout(ctx, p.v.e.Cfg.P2PTier.LoadTimeout)
	defer cancel()
	if err := s.Rank.Side.SetUp(limit, leg.address, ""); err != nil {
		return err
	}
	local := s.Computed / s.Rank.Cache.Size
	var keys []string
	wholeBlocks(s, func(n int, h core.BlockHash) bool {
		if n >= local {
			keys = append(keys, strconv.FormatUint(uint64(h), 16))
		}
		return true
	})
	if len(keys) == 0 {
		return nil // no block is missing
	}
	answer, err := s.Rank.Side.Call(limit, leg.address, core.SideMessage{
		Op: p2pTierFetch, Key: leg.prefiller, Fields: map[string]string{"keys": strings.Join(keys, ","), "weights": p.v.compatibility()},
	})
	if err != nil {
		return err
	}
	s.Rank.Store(s.Blocks[local:local+len(keys)], answer.Payload)
	p.v.e.Stats.Transfers.Add(1)
	s.Rank.Loaded(s, (local+len(keys))*s.Rank.Cache.Size)
	s.Cached = s.Computed
	return nil
}

// park copies the prompt's whole blocks for a consumer.
func (p *p2pTier) park(s *core.Sequence, id string) {
	blocks := make(map[core.BlockHash][]byte)
	wholeBlocks(s, func(n int, h core.BlockHash) bool {
		blocks[h] = s.Rank.Content(s.Blocks[n : n+1])
		return true
	})
	if len(blocks) == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	supply := p.supply(id)
	if supply.blocks == nil {
		supply.blocks = blocks
		close(supply.stored)
		time.AfterFunc(p.v.e.Cfg.P2PTier.UnboundTimeout, func() { p.give(id, supply) })
	}
}

// supply returns the supply of a request, and makes it if needed; mu is held.
func (p *p2pTier) supply(id string) *p2pSupply {
	if p.supplies[id] == nil {
		p.supplies[id] = &p2pSupply{stored: make(chan struct{})}
	}
	return p.supplies[id]
}

// give removes a request's blocks.
func (p *p2pTier) give(id string, supply *p2pSupply) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.supplies[id] == supply {
		delete(p.supplies, id)
	}
}

// Message gives a consumer the requested blocks when they are stored, and
// removes them.
func (p *p2pTier) Message(_ *core.Rank, m core.SideMessage) (core.SideMessage, error) {
	if m.Op != p2pTierFetch || m.Fields["weights"] != p.v.compatibility() {
		return core.SideMessage{}, errors.New("config fingerprint mismatch")
	}
	p.mu.Lock()
	supply := p.supply(m.Key)
	p.mu.Unlock()
	defer p.give(m.Key, supply)
	late := time.NewTimer(p.v.e.Cfg.P2PTier.LoadTimeout)
	defer late.Stop()
	select {
	case <-supply.stored:
	case <-late.C:
		return core.SideMessage{}, errNoSupply
	case <-p.v.e.Ctx.Done():
		return core.SideMessage{}, errNoSupply
	}
	answer := core.SideMessage{Op: m.Op}
	for key := range strings.SplitSeq(m.Fields["keys"], ",") {
		h, _ := strconv.ParseUint(key, 16, 64)
		data := supply.blocks[core.BlockHash(h)]
		if data == nil {
			return core.SideMessage{}, errNoSupply
		}
		answer.Payload = append(answer.Payload, data...)
	}
	return answer, nil
}

// held returns the number of blocks that are kept for consumers.
func (p *p2pTier) held() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.v.e.Ctx.Err() != nil {
		return 0
	}
	for _, s := range p.supplies {
		n += len(s.blocks)
	}
	return n
}
