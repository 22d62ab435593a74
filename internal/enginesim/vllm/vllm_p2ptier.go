package enginesim

import (
	"context"
	"errors"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"
)

// p2pTier is vLLM's OffloadingConnector with a secondary tier of type p2p. A
// producer keeps copies of a prompt's whole blocks in its host memory until a
// consumer has fetched them by their hashes, under the transfer's id. A
// consumer computes the blocks that it does not get. The side channel replaces
// the control sockets and RDMA.
//
// Source: vLLM, v1/kv_offload/tiering/p2p/.
type p2pTier struct {
	v *vllm

	mu       sync.Mutex
	supplies map[string]*p2pSupply // by kv_request_id
}

// p2pSupply holds the blocks of a request, also before they are computed.
type p2pSupply struct {
	stored chan struct{} // closed when the blocks are stored
	blocks map[blockHash][]byte
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

func (p *p2pTier) start() error { return nil }

// parse reads the roles. A role without its id or its address is ignored
// (_parse_source, _parse_dest).
func (p *p2pTier) parse(params fields, _ string) any {
	leg := &p2pTierLeg{}
	text := func(f fields, name string) string {
		s, err := f.str(name, "")
		if err != nil {
			return ""
		}
		return s
	}
	decoder, _ := params.object("remote_decoder")
	leg.decoder = text(decoder, "kv_request_id")
	prefiller, _ := params.object("remote_prefiller")
	leg.prefiller = text(prefiller, "kv_request_id")
	port, err := prefiller.integer("remote_port", 0)
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
func (p *p2pTier) run(ctx context.Context, s *sequence, parsed any, emit func(token)) error {
	leg := parsed.(*p2pTierLeg)
	if leg.forbidden {
		p.v.e.crash("remote_prefiller and remote_decoder in one request")
		return errEngineCore
	}
	if err := s.rank.reserve(ctx, s, room(s), false); err != nil {
		return err
	}
	if leg.prefiller != "" {
		if err := s.rank.waitLoading(func() error { return p.load(ctx, s, leg) }); err != nil {
			p.v.e.cfg.Log.Warn("KV was not fetched; it is computed", "request", s.id, "error", err)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	if err := s.rank.acquireSlot(ctx, s); err != nil {
		return err
	}
	if err := s.rank.prefill(ctx, s); err != nil {
		return err
	}
	if leg.decoder != "" {
		p.park(s, leg.decoder)
	}
	return s.rank.decode(ctx, s, emit)
}

// load fetches the whole blocks that are not in the local prefix cache.
func (p *p2pTier) load(ctx context.Context, s *sequence, leg *p2pTierLeg) error {
	if s.req.fault == failLoad {
		return errors.New("fault")
	}
	limit, cancel := context.WithTimeout(ctx, p.v.e.cfg.P2PTier.LoadTimeout)
	defer cancel()
	if err := s.rank.side.setUp(limit, leg.address, ""); err != nil {
		return err
	}
	local := s.computed / s.rank.cache.size
	var keys []string
	wholeBlocks(s, func(n int, h blockHash) bool {
		if n >= local {
			keys = append(keys, strconv.FormatUint(uint64(h), 16))
		}
		return true
	})
	if len(keys) == 0 {
		return nil // no block is missing
	}
	answer, err := s.rank.side.call(limit, leg.address, sideMessage{
		Op: p2pTierFetch, Key: leg.prefiller, Fields: map[string]string{"keys": strings.Join(keys, ","), "weights": p.v.compatibility()},
	})
	if err != nil {
		return err
	}
	s.rank.store(s.blocks[local:local+len(keys)], answer.Payload)
	p.v.e.stats.transfers.Add(1)
	s.rank.loaded(s, (local+len(keys))*s.rank.cache.size)
	s.cached = s.computed
	return nil
}

// park copies the prompt's whole blocks for a consumer.
func (p *p2pTier) park(s *sequence, id string) {
	blocks := make(map[blockHash][]byte)
	wholeBlocks(s, func(n int, h blockHash) bool {
		blocks[h] = s.rank.content(s.blocks[n : n+1])
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
		time.AfterFunc(p.v.e.cfg.P2PTier.UnboundTimeout, func() { p.give(id, supply) })
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

// message gives a consumer the requested blocks when they are stored, and
// removes them.
func (p *p2pTier) message(_ *rank, m sideMessage) (sideMessage, error) {
	if m.Op != p2pTierFetch || m.Fields["weights"] != p.v.compatibility() {
		return sideMessage{}, errors.New("config fingerprint mismatch")
	}
	p.mu.Lock()
	supply := p.supply(m.Key)
	p.mu.Unlock()
	defer p.give(m.Key, supply)
	late := time.NewTimer(p.v.e.cfg.P2PTier.LoadTimeout)
	defer late.Stop()
	select {
	case <-supply.stored:
	case <-late.C:
		return sideMessage{}, errNoSupply
	case <-p.v.e.ctx.Done():
		return sideMessage{}, errNoSupply
	}
	answer := sideMessage{Op: m.Op}
	for key := range strings.SplitSeq(m.Fields["keys"], ",") {
		h, _ := strconv.ParseUint(key, 16, 64)
		data := supply.blocks[blockHash(h)]
		if data == nil {
			return sideMessage{}, errNoSupply
		}
		answer.Payload = append(answer.Payload, data...)
	}
	return answer, nil
}

// held returns the number of blocks that are kept for consumers.
func (p *p2pTier) held() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.v.e.ctx.Err() != nil {
		return 0
	}
	for _, s := range p.supplies {
		n += len(s.blocks)
	}
	return n
}
