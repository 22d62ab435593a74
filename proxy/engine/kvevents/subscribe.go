package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine/zmtp"
)

const (
	// retryMin and retryMax bound the wait between two attempts to connect.
	retryMin = 50 * time.Millisecond
	retryMax = time.Second
	// replayIdle is how long a replay may be silent. The engine looks for
	// requests between two batches, and every 100 ms.
	replayIdle = 5 * time.Second
	// replayPause is how long a replay endpoint that was silent is left alone.
	replayPause = 10 * time.Second
	// replayPatience is how long a replay endpoint may refuse connections after
	// the publisher takes them: an engine that starts opens it a little later.
	replayPatience = 2 * time.Second
	// endOfReplay is the number in the message that ends a replay.
	endOfReplay = 1<<64 - 1
	// maxMessage limits a message in bytes: a batch of 2 million token ids has
	// about 10 MB.
	maxMessage = 32 << 20
	// maxFrames limits the frames of a message; the longest known have four.
	maxFrames = 16
)

// connect connects to a publisher as SUB, or to its replay as DEALER.
func connect(ctx context.Context, endpoint string, kind zmtp.Socket) (*zmtp.Conn, error) {
	return zmtp.Dial(ctx, endpoint, zmtp.Options{Socket: kind, MaxMessage: maxMessage, MaxFrames: maxFrames, ReadBuffer: 64 << 10})
}

// subscriber takes in what one rank publishes: messages of topic, number and
// batch by PUB, and missed ones by ROUTER on request. Source: vLLM
// vllm/distributed/kv_events.py ZmqEventPublisher; SGLang's is the same.
type subscriber struct {
	rank    *rank
	events  string // endpoint of the publisher
	replay  string // endpoint of the replay; "" none
	batches batches
	seq     sequence
	block   int           // tokens of a block if configured, else 0
	idle    time.Duration // replayIdle
	silent  time.Time     // when a replay endpoint did not answer last
	begun   time.Time     // when the session was connected
}

// session connects to the publisher and takes in its batches until the context
// or the connection ends. It never returns nil.
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

// catchUp takes in what was published before the connection stood. If there was
// a connection before, the engine may have restarted since, or only have been
// out of reach: it is the same one if the batch that came last is in its
// buffer.
func (s *subscriber) catchUp(ctx context.Context) {
	if s.seq.known {
		if s.resume(ctx) {
			return
		}
		s.restarted(ResyncReconnect)
	}
	s.fill(ctx, 0)
}

// resume asks for the last batch and those after it, and reports whether it was
// the same one.
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

// fill takes in the buffered batches with the number from and above.
func (s *subscriber) fill(ctx context.Context, from uint64) {
	s.ask(ctx, from, func(seq uint64, batch []byte) bool {
		s.late(seq, batch)
		return true
	})
}

// late takes in one batch of a replay. If batches are missing even there, the
// buffer does not reach back far enough: what is left of it is the start of a
// new picture.
func (s *subscriber) late(seq uint64, batch []byte) {
	switch s.seq.judge(seq, batch) {
	case seenBefore:
		return
	case ahead:
		s.lost(ResyncGap)
	case behind:
		s.restarted(ResyncRestart)
	}
	s.take(seq, batch)
}

// message takes in one message of the publisher.
func (s *subscriber) message(ctx context.Context, frames [][]byte) {
	seq, batch, ok := parse(frames)
	if !ok || seq == endOfReplay {
		s.rank.malformed(1)
		return
	}
	switch s.seq.judge(seq, batch) {
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

// take applies a batch. One that cannot be read to its end may have removed
// blocks.
func (s *subscriber) take(seq uint64, batch []byte) {
	b := &s.batches
	b.blocks, b.malformed = 0, 0
	s.seq.take(seq, batch)
	if err := b.decode(batch); err != nil {
		b.malformed = max(b.malformed, 1)
		s.lost(ResyncUnreadable)
	}
	s.rank.applied(b.blocks, b.malformed, b.sieve.block)
}

// lost clears the feed: events are missing.
func (s *subscriber) lost(reason string) {
	s.batches.to.Cleared()
	s.rank.resync(reason)
}

// restarted clears the feed and all that was learned: the engine is another
// one.
func (s *subscriber) restarted(reason string) {
	s.lost(reason)
	s.seq.forget()
	s.batches.sieve = sieve{block: s.block, fixed: s.block > 0}
}

// ask requests a replay from a number on, and hands each batch to take until it
// returns false. A replay that broke off is no error here: the gap that it
// leaves is found by the next batch.
func (s *subscriber) ask(ctx context.Context, from uint64, take func(seq uint64, batch []byte) bool) {
	if s.replay == "" || time.Since(s.silent) < replayPause {
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
		s.silent = time.Now()
	}
	s.rank.log.Debug("replay of KV events failed", "engine", s.rank.engine, "rank", s.rank.n, "error", err)
	s.rank.replayed(ReplayFailed)
}

// reach connects to the replay endpoint. It has patience with an engine that has
// only just begun.
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

// request is one exchange with the replay endpoint: an empty frame and the
// number, as from a REQ socket; then one message a batch, and one with the
// number of the end.
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

// parse finds a batch and its number in a message: they are its last two
// frames. Before them stands a topic from the publisher; an empty frame and,
// since vLLM of 2026-07, a topic from the replay.
func parse(frames [][]byte) (seq uint64, batch []byte, ok bool) {
	n := len(frames)
	if n < 2 || n > 4 || len(frames[n-2]) != 8 {
		return 0, nil, false
	}
	return binary.BigEndian.Uint64(frames[n-2]), frames[n-1], true
}
