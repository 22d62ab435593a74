package vllm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// mooncakeWrite is the side channel operation that stands for
// batch_transfer_sync_write.
const mooncakeWrite = "mooncake-write"

// The status of a worker's last answer (MooncakeXferResponseStatus).
const (
	mooncakeFinish = 0
	mooncakeError  = 2
)

// MooncakeAsk is the request of a consumer's worker to a producer's worker
// (MooncakeXferMetadata), for one request.
type MooncakeAsk struct {
	Host              string // of the consumer's memory
	Port              int
	Request, Transfer string
	Blocks            []core.BlockID // none: the consumer wants nothing, and the producer may free
	BlockLen          int
}

func (a MooncakeAsk) Encode() []byte {
	b := msgp.AppendMapHeader(nil, 8)
	b = msgp.AppendString(msgp.AppendString(b, "remote_hostname"), a.Host)
	b = core.AppendInt(msgp.AppendString(b, "remote_port"), int64(a.Port))
	b = core.AppendInt(msgp.AppendString(b, "remote_tp_size"), 1)
	b = core.AppendInt(msgp.AppendString(b, "remote_tp_rank"), 0)
	b = msgp.AppendMapHeader(msgp.AppendString(b, "req_blocks"), 1)
	b = msgp.AppendArrayHeader(msgp.AppendString(b, a.Request), 2)
	b = msgp.AppendString(b, a.Transfer)
	if len(a.Blocks) == 0 {
		b = msgp.AppendArrayHeader(b, 0)
	} else {
		b = msgp.AppendArrayHeader(msgp.AppendArrayHeader(b, 1), uint32(len(a.Blocks)))
		for _, id := range a.Blocks {
			b = core.AppendInt(b, int64(id))
		}
	}
	b = core.AppendInt(msgp.AppendArrayHeader(msgp.AppendString(b, "kv_caches_base_addr"), 1), 4096)
	for _, name := range []string{"block_lens", "kv_block_lens"} {
		b = core.AppendInt(msgp.AppendArrayHeader(msgp.AppendString(b, name), 1), int64(a.BlockLen))
	}
	return b
}

// DecodeAsk reads a message as strictly as msgspec reads a struct.
func DecodeAsk(message []byte) (a MooncakeAsk, err error) {
	m, err := readMessage(message)
	if err != nil {
		return a, err
	}
	var ok, all bool
	a.Host, all = m["remote_hostname"].(string)
	a.Port, ok = whole(m["remote_port"])
	all = all && ok
	for _, name := range []string{"remote_tp_size", "remote_tp_rank"} {
		_, ok = whole(m[name])
		all = all && ok
	}
	lens, ok := m["kv_block_lens"].([]any)
	if all = all && ok; ok && len(lens) == 1 {
		a.BlockLen, _ = whole(lens[0])
	}
	_, ok = m["kv_caches_base_addr"].([]any)
	requests, isMap := m["req_blocks"].(map[string]any)
	if !all || !ok || !isMap || len(requests) != 1 {
		return a, errors.New("decode ask: a required field is missing")
	}
	for request, v := range requests {
		pair, _ := v.([]any)
		if len(pair) != 2 {
			return a, errors.New("decode ask: not a pair")
		}
		a.Request = request
		a.Transfer, _ = pair[0].(string)
		groups, _ := pair[1].([]any)
		if len(groups) == 0 {
			continue
		}
		list, _ := groups[0].([]any)
		for _, id := range list {
			n, ok := whole(id)
			if !ok {
				return a, errors.New("decode ask: not a number")
			}
			a.Blocks = append(a.Blocks, core.BlockID(n))
		}
	}
	return a, nil
}

// mooncakeReply encodes a worker's answer. ok and failed are ids of requests.
func mooncakeReply(status int, ok, failed, problem string) []byte {
	pairs := 1
	b := core.AppendInt(msgp.AppendString(nil, "status"), int64(status))
	for _, list := range [][2]string{{"ok_reqs", ok}, {"err_reqs", failed}} {
		if list[1] != "" {
			b = msgp.AppendArrayHeader(msgp.AppendString(b, list[0]), 1)
			b = msgp.AppendString(b, list[1])
			pairs++
		}
	}
	if problem != "" {
		b = msgp.AppendString(msgp.AppendString(b, "err_msg"), problem)
		pairs++
	}
	return append(msgp.AppendMapHeader(nil, uint32(pairs)), b...)
}

// serveWorker answers consumers. A consumer opens a connection for each request.
func (m *mooncake) serveWorker(r *core.Rank) func(context.Context, *core.ZMTPConn) {
	return func(ctx context.Context, c *core.ZMTPConn) {
		for {
			frames, err := c.Receive()
			if err != nil {
				return
			}
			answer := m.serve(ctx, r, frames[len(frames)-1])
			if answer != nil && c.Send(answer) != nil {
				return
			}
		}
	}
}

// serve handles a consumer's request when prefill is ready, and returns the
// answer; nil when the answer is lost.
func (m *mooncake) serve(ctx context.Context, r *core.Rank, message []byte) []byte {
	ask, err := DecodeAsk(message)
	if err != nil {
		return mooncakeReply(mooncakeError, "", "", err.Error())
	}
	if ask.BlockLen != m.e.Cfg.BlockSize {
		return mooncakeReply(mooncakeError, "", "", "Mooncake KV region length mismatch")
	}
	key := moriioKey{r.Index, ask.Transfer}
	m.mu.Lock()
	t := m.sendingOf(key)
	m.mu.Unlock()
	limit := time.NewTimer(m.e.Cfg.Mooncake.AbortTimeout)
	defer limit.Stop()
	select {
	case <-t.ready:
	case <-limit.C:
		return mooncakeReply(mooncakeFinish, "", ask.Request, "Timeout waiting for P side ready.")
	case <-ctx.Done():
		return nil
	}
	m.mu.Lock()
	there := m.sending[key] == t
	if there {
		t.writing++
	}
	m.mu.Unlock()
	if !there {
		m.e.Cfg.Log.Warn("request expired before sending", "request", ask.Request)
		return mooncakeReply(mooncakeFinish, "", "", "")
	}
	err = m.write(ctx, r, t, ask)
	m.mu.Lock()
	t.writing--
	if err == nil && m.sending[key] == t {
		delete(m.sending, key)
		t.expiry.Stop()
		r.Unpin(ask.Transfer)
	}
	m.mu.Unlock()
	switch {
	case t.lost:
		return nil
	case err != nil:
		m.e.Cfg.Log.Error("KV write failed", "transfer", ask.Transfer, "error", err)
		return mooncakeReply(mooncakeFinish, "", ask.Request, err.Error())
	}
	return mooncakeReply(mooncakeFinish, ask.Request, "", "")
}

// write writes a prompt's KV into the consumer's blocks. If the consumer
// already has the beginning, it writes only the end.
func (m *mooncake) write(ctx context.Context, r *core.Rank, t *mooncakeSending, ask MooncakeAsk) error {
	if len(ask.Blocks) == 0 {
		return nil
	}
	if len(ask.Blocks) > len(t.blocks) {
		return errors.New("prefill has fewer blocks than decode")
	}
	ctx, cancel := context.WithTimeout(ctx, nixlReadTimeout)
	defer cancel()
	addr := net.JoinHostPort(ask.Host, fmt.Sprint(ask.Port))
	if err := r.Side.SetUp(ctx, addr, ""); err != nil {
		return err
	}
	payload := r.ReadPinned(ask.Transfer, t.blocks[len(t.blocks)-len(ask.Blocks):])
	_, err := r.Side.Call(ctx, addr, core.SideMessage{
		Op: mooncakeWrite, Key: ask.Request, Blocks: ask.Blocks, Payload: payload,
	})
	return err
}

// await waits as a consumer for a producer's write. It returns with the
// sequence's blocks reserved and no slot held. The blocks are held until the
// producer has answered or the time is up, even if the client has left.
func (m *mooncake) await(ctx context.Context, s *core.Sequence, leg *mooncakeLeg) error {
	if err := s.Rank.Reserve(ctx, s, core.Room(s), false); err != nil {
		m.dismiss(leg)
		return err
	}
	local := s.Blocks[s.Computed/s.Rank.Cache.Size : s.Rank.Cache.BlocksFor(len(s.Prompt))]
	m.expect(s.ID, true)
	s.Rank.AwaitKV(s)
	err := s.Rank.WaitLoading(func() error {
		limit, cancel := context.WithTimeout(m.e.Ctx, m.e.Cfg.Mooncake.AbortTimeout*9/8)
		defer cancel()
		if !leg.whole || s.Req.Fault == core.FailNotify {
			m.e.Cfg.Log.Warn("no engine was asked for the KV", "request", s.ID)
			<-limit.Done()
			return errNeverWritten
		}
		return m.pull(limit, s.Rank, leg, s.ID, local)
	})
	m.expect(s.ID, false)
	s.Rank.ReceivedKV(s)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		m.e.Cfg.Log.Error("pulling KV failed", "request", s.ID, "error", err)
		return errLoad
	case s.Req.Fault == core.FailLoad:
		return errLoad
	}
	m.e.Stats.Transfers.Add(1)
	s.Rank.Loaded(s, len(s.Prompt)-1)
	s.Cached = len(s.Prompt) - 1
	return nil
}

func (m *mooncake) expect(request string, waits bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.receiving[request] = waits; !waits {
		delete(m.receiving, request)
	}
}

// pull requests a producer to write into blocks and waits until the producer has written.
// A ZMQ socket continues to dial the producer and does not report the producer's end.
func (m *mooncake) pull(ctx context.Context, r *core.Rank, leg *mooncakeLeg, request string, blocks []core.BlockID) error {
	addr, err := m.worker(ctx, leg)
	if err != nil {
		return err
	}
	var c *core.ZMTPConn
	for {
		if c, err = m.e.DialPeer(ctx, addr); err == nil {
			break
		}
		if core.Sleep(ctx, 100*time.Millisecond) != nil {
			return errNeverWritten
		}
	}
	defer m.e.HangUp(c)
	defer context.AfterFunc(ctx, func() { c.Close() })()
	host, port := r.Side.HostPort()
	ask := MooncakeAsk{
		Host: host, Port: port, Request: request, Transfer: leg.transfer, Blocks: blocks, BlockLen: m.e.Cfg.BlockSize,
	}
	var reply map[string]any
	if err := c.Send(ask.Encode()); err == nil {
		if frames, err := c.Receive(); err == nil {
			reply, _ = readMessage(frames[len(frames)-1])
		}
	}
	status, known := whole(reply["status"])
	problem, _ := reply["err_msg"].(string)
	switch {
	case known && reply["ok_reqs"] != nil:
		return nil
	case known && (status == mooncakeError || reply["err_reqs"] != nil):
		return errors.New("pull: " + problem)
	}
	<-ctx.Done() // no answer, or an answer that does not name the request
	return errNeverWritten
}

// worker returns the address of the producer's worker. It looks up an unknown
// engine id in the bootstrap server's answer.
func (m *mooncake) worker(ctx context.Context, leg *mooncakeLeg) (string, error) {
	m.mu.Lock()
	addr := m.agents[leg.engine]
	m.mu.Unlock()
	if addr != "" {
		return addr, nil
	}
	ctx, cancel := context.WithTimeout(ctx, m.e.Cfg.HandshakeTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, leg.bootstrap+"/query", nil)
	if err != nil {
		return "", err
	}
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return "", fmt.Errorf("query bootstrap server: %w", err)
	}
	defer resp.Body.Close()
	var engines map[string]mooncakeEngine
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&engines); err != nil {
		return "", fmt.Errorf("query bootstrap server: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range engines {
		m.agents[e.Engine] = strings.TrimPrefix(e.Workers[0][0], "tcp://")
	}
	if addr = m.agents[leg.engine]; addr == "" {
		return "", errors.New("remote engine_id not found from bootstrap server")
	}
	return addr, nil
}

// dismiss informs the producer that its KV will not be read.
func (m *mooncake) dismiss(leg *mooncakeLeg) {
	switch {
	case leg.transfer == "":
	case !leg.whole:
		m.e.Crash(errKeys)
	default:
		m.e.Spawn(func(ctx context.Context) {
			ctx, cancel := context.WithTimeout(ctx, m.e.Cfg.Mooncake.AbortTimeout*9/8)
			defer cancel()
			m.pull(ctx, m.e.Ranks[0], leg, core.RandomID(), nil)
		})
	}
}

// rejected is called for a leg that the serving layer has rejected.
func (m *mooncake) rejected(parsed any) {
	leg, _ := parsed.(*mooncakeLeg)
	switch {
	case leg == nil || !leg.remotePrefill:
	case !m.consumes:
		m.e.Crash("AssertionError: a leg of the other role")
	default:
		m.dismiss(leg)
	}
}
