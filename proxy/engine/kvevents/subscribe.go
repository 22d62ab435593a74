package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/engine/zmtp"
)

const (
	// retryMin and retryMax bound the pause between two attempts to connect.
	retryMin = 50 * time.Millisecond
	retryMax = time.Second
	// replayIdle is the maximum time without a message in a replay. The engine looks
	// for replay requests between two batches, and every 100 ms.
	replayIdle = 5 * time.Second
	// replayPause is the pause after a replay endpoint has not answered.
	replayPause = 10 * time.Second
	// replayPatience is how long a replay endpoint may refuse connections after the
	// publisher has accepted one: a starting engine opens it a little later.
	replayPatience = 2 * time.Second
	// subscribeTime is how long a busy publisher may take to read a subscription. A publisher
	// drops the batches of that time.
	subscribeTime = time.Second
	// endOfReplay is the number in the final message of a replay.
	endOfReplay = 1<<64 - 1
	// maxMessage bounds a message in bytes: a batch of 2 million token ids has about 10
	// MB.
	maxMessage = 32 << 20
	// maxFrames bounds the frames of a message; the longest known messages have four.
	maxFrames = 16
)

// connect connects to a publisher as SUB, or to its replay as DEALER.
func connect(ctx context.Context, endpoint string, kind zmtp.Socket) (*zmtp.Conn, error) {
	return zmtp.Dial(ctx, endpoint, zmtp.Options{Socket: kind, MaxMessage: maxMessage, MaxFrames: maxFrames, ReadBuffer: 64 << 10})
}

// Check connects to the endpoints of a rank, and returns why the connections to the publisher and to
// its replays fail. It subscribes to nothing. ctx bounds it.
func Check(ctx context.Context, at engine.KVEndpoints) (events, replay error) {
	try := func(endpoint string, kind zmtp.Socket) error {
		if endpoint == "" {
			return nil
		}
		c, err := connect(ctx, endpoint, kind)
		if err == nil {
			err = c.Close()
		}
		return err
	}
	return try(at.Events, zmtp.Sub), try(at.Replay, zmtp.Dealer)
}

// subscriber applies the batches that one rank publishes: messages of topic, number and
// batch from PUB, and missed ones from ROUTER on request. Source: vLLM
// vllm/distributed/kv_events.py ZmqEventPublisher; SGLang's is the same.
type subscriber struct {
	rank       *rank
	events     string // endpoint of the publisher
	replay     string // endpoint of the replay; "" none
	batches    batches
	seq        sequence
	block      int           // tokens of a block if configured, else 0
	idle       time.Duration // replayIdle
	subscribe  time.Duration // subscribeTime
	noReplayAt time.Time     // when a replay endpoint last failed to answer
	begun      time.Time     // when the session was connected
}

// session connects to the publisher and applies its batches until the context or the
// connection ends. It never returns nil.
func (s *subscriber) session(ctx context.Context) error {
	c, err := connect(ctx, s.events, zmtp.Sub)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.Subscribe(""); err != nil {
		return err
	}
	s.rank.connect(nil)
	s.begun = time.Now()
	s.catchUp(ctx)
	if err := s.catchUpAgain(ctx, c); err != nil {
		return err
	}
	for {
		frames, err := c.Receive(0)
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.message(ctx, frames)
	}
}

// catchUp applies the batches that were published before the connection was made. If
// there was an earlier connection, the engine may have restarted since, or may only
// have been unreachable. It is the same process if its buffer has the batch that was
// applied last.
func (s *subscriber) catchUp(ctx context.Context) {
	if s.seq.known {
		if s.resume(ctx) {
			return
		}
		s.restarted(ResyncReconnect)
	}
	s.fill(ctx, 0)
}

// catchUpAgain applies the batches that the publisher dropped because it read the subscription
// after catchUp. If a batch arrives in that time, its number shows whether batches are missing.
func (s *subscriber) catchUpAgain(ctx context.Context, c *zmtp.Conn) error {
	if s.replay == "" {
		return nil
	}
	arrived, err := c.Wait(s.subscribe)
	if err != nil || arrived {
		return err
	}
	from := uint64(0)
	if s.seq.known {
		from = s.seq.next
	}
	s.fill(ctx, from)
	return nil
}

// resume requests the last batch and those after it. It reports whether the last batch
// was the same.
func (s *subscriber) resume(ctx context.Context) bool {
	first, same := true, false
	s.ask(ctx, s.seq.next-1, func(seq uint64, batch []byte) bool {
		if first {
			first, same = false, s.seq.last(seq, batch)
			return same
		}
		s.late(seq, batch)
		return true
	})
	return same
}

// fill applies the buffered batches with the number from and above.
func (s *subscriber) fill(ctx context.Context, from uint64) {
	s.ask(ctx, from, func(seq uint64, batch []byte) bool {
		s.late(seq, batch)
		return true
	})
}

// late applies one batch of a replay. If the replay also lacks batches, the engine's
// buffer is too short. Then late clears the feed, and the remaining batches start a new
// state.
func (s *subscriber) late(seq uint64, batch []byte) {
	switch s.seq.classify(seq, batch) {
	case seenBefore:
		return
	case ahead:
		s.lost(ResyncGap)
	case behind:
		s.restarted(ResyncRestart)
	}
	s.take(seq, batch)
}

// message handles one message of the publisher.
func (s *subscriber) message(ctx context.Context, frames [][]byte) {
	seq, batch, ok := parse(frames)
	if !ok || seq == endOfReplay {
		s.rank.malformed(1)
		return
	}
	switch s.seq.classify(seq, batch) {
	case inOrder:
		if !s.seq.known && seq > 0 {
			s.fill(ctx, 0)
		}
	case ahead:
		s.rank.gap()
		s.fill(ctx, s.seq.next)
	case behind:
		s.restarted(ResyncRestart)
		if seq > 0 {
			s.fill(ctx, 0)
		}
	}
	s.late(seq, batch)
}

// take applies a batch. If it cannot be read to its end, it may have removed blocks.
func (s *subscriber) take(seq uint64, batch []byte) {
	b := &s.batches
	b.blocks, b.refused, b.malformed = 0, 0, 0
	s.seq.take(seq, batch)
	if err := b.decode(batch); err != nil {
		b.malformed = max(b.malformed, 1)
		s.lost(ResyncUnreadable)
	}
	s.rank.heard(b.filter.block)
	s.rank.count(b.blocks, b.refused, b.malformed)
}

// lost clears the feed, because events are missing.
func (s *subscriber) lost(reason string) {
	s.batches.to.Cleared()
	s.rank.resync(reason)
}

// restarted clears the feed and all learned values: the engine is a new process.
func (s *subscriber) restarted(reason string) {
	s.lost(reason)
	s.seq.forget()
	s.batches.filter = eventFilter{block: s.block, fixed: s.block > 0}
}

// ask requests a replay from a number on, and passes each batch to take until take
// returns false. An interrupted replay is not an error here: the next batch shows the
// gap.
func (s *subscriber) ask(ctx context.Context, from uint64, take func(seq uint64, batch []byte) bool) {
	if s.replay == "" || time.Since(s.noReplayAt) < replayPause {
		return
	}
	c, err := s.reach(ctx)
	if err == nil {
		err = s.request(c, from, take)
		c.Close()
	}
	if err == nil {
		s.rank.replayed(ReplayComplete)
		return
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		s.noReplayAt = time.Now()
	}
	s.rank.log.Debug("replay of KV events failed", "engine", s.rank.engine, "rank", s.rank.n, "error", err)
	s.rank.replayed(ReplayFailed)
}

// reach connects to the replay endpoint. It retries for a while if the engine has just
// started.
func (s *subscriber) reach(ctx context.Context) (*zmtp.Conn, error) {
	for {
		c, err := connect(ctx, s.replay, zmtp.Dealer)
		if err == nil || time.Since(s.begun) > replayPatience || errors.Is(err, os.ErrDeadlineExceeded) {
			return c, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(retryMin):
		}
	}
}

// request makes one exchange with the replay endpoint. It sends an empty frame and the
// number, as a REQ socket does. The answer is one message for each batch, and one with
// endOfReplay.
func (s *subscriber) request(c *zmtp.Conn, from uint64, take func(seq uint64, batch []byte) bool) error {
	if err := c.Send(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		return err
	}
	for {
		frames, err := c.Receive(s.idle)
		if err != nil {
			return err
		}
		seq, batch, ok := parse(frames)
		switch {
		case !ok:
			s.rank.malformed(1)
		case seq == endOfReplay:
			return nil
		case !take(seq, batch):
			return nil
		}
	}
}

// parse finds a batch and its number in a message: they are its last two frames. In a
// message of the publisher a topic precedes them. In a message of a replay an empty
// frame precedes them and, since vLLM of 2026-07, a topic.
func parse(frames [][]byte) (seq uint64, batch []byte, ok bool) {
	n := len(frames)
	if n < 2 || n > 4 || len(frames[n-2]) != 8 {
		return 0, nil, false
	}
	return binary.BigEndian.Uint64(frames[n-2]), frames[n-1], true
}
