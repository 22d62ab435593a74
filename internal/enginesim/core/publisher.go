package enginesim

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// eventBuffer is the number of batches that are kept for replays, and for slow
// subscribers: the engines' buffer_steps.
const eventBuffer = 10_000

// publisher is the ZmqEventPublisher of one rank: a PUB socket whose messages
// are topic, sequence number and batch, and a ROUTER socket that sends them
// again. Safe for concurrent use.
type publisher struct {
	e      *Engine
	rank   int
	topic  []byte
	wire   kvWire
	plain  bool // replays without the topic
	fault  *kvFault
	events net.Listener
	replay net.Listener // nil: none

	mu     sync.Mutex
	seq    uint64
	kept   []batchMessage // for replays
	sent   []batchMessage // for subscribers
	first  uint64         // number of sent[0] among all messages ever sent
	held   *batchMessage  // to be sent after the next one
	change chan struct{}  // closed when there is a new message
	// subscribers are the connections that have subscribed to something.
	subscribers int
}

type batchMessage struct {
	seq     uint64
	payload []byte
}

// publishers are the publishers of all ranks.
type publishers struct{ list []*publisher }

// newPublishers builds the publishers of an engine, or returns nil if the
// config has none.
func newPublishers(e *Engine, wire kvWire, plain bool) *publishers {
	if e.cfg.KVEvents.Endpoint == "" {
		return nil
	}
	p := &publishers{}
	for i := range e.cfg.Ranks {
		p.list = append(p.list, &publisher{
			e: e, rank: i, topic: []byte(e.cfg.KVEvents.Topic), wire: wire, plain: plain,
			fault: &kvFault{}, change: make(chan struct{}),
		})
	}
	return p
}

// start opens the sockets of all ranks. The engine's mutex is held.
func (p *publishers) start(e *Engine) error {
	events, err := listenRow(e.cfg.KVEvents.Endpoint, len(p.list))
	if err != nil {
		return fmt.Errorf("listen kv events: %w", err)
	}
	e.peers.listeners = append(e.peers.listeners, events...)
	var replays []net.Listener
	if e.cfg.KVEvents.Replay != "" {
		if replays, err = listenRow(e.cfg.KVEvents.Replay, len(p.list)); err != nil {
			return fmt.Errorf("listen kv event replays: %w", err)
		}
		e.peers.listeners = append(e.peers.listeners, replays...)
	}
	for i, one := range p.list {
		one.events = events[i]
		e.servePeers(one.events, "PUB", one.serveSubscriber)
		if replays != nil {
			one.replay = replays[i]
			e.servePeers(one.replay, "ROUTER", one.serveReplay)
		}
	}
	return nil
}

// publish implements kvSink.
func (p *publishers) publish(rank int, events []kvEvent) { p.list[rank].publish(events) }

// publish numbers a batch and delivers it.
func (p *publisher) publish(events []kvEvent) {
	payload := p.wire(time.Now(), p.rank, events)
	fault := p.fault.draw()
	p.mu.Lock()
	defer p.mu.Unlock()
	m := batchMessage{p.seq, payload}
	p.seq++
	if fault != KVEventsLose {
		p.kept = append(p.kept, m)
		if over := len(p.kept) - eventBuffer; over > 0 {
			p.kept = slices.Delete(p.kept, 0, over)
		}
	}
	switch {
	case fault == KVEventsDrop, fault == KVEventsLose:
		return
	case fault == KVEventsGarbage:
		m.payload = []byte("\xc1 not a batch")
	case fault == KVEventsReorder && p.held == nil:
		p.held = &m
		return
	}
	p.sent = append(p.sent, m)
	if p.held != nil {
		p.sent = append(p.sent, *p.held)
		p.held = nil
	}
	if over := len(p.sent) - eventBuffer; over > 0 {
		p.sent = slices.Delete(p.sent, 0, over)
		p.first += uint64(over)
	}
	p.wakeLocked()
}

func (p *publisher) wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wakeLocked()
}

func (p *publisher) wakeLocked() {
	close(p.change)
	p.change = make(chan struct{})
}

// subscribe counts a subscriber and returns the number of its first message:
// the next one.
func (p *publisher) subscribe() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.subscribers++
	return p.first + uint64(len(p.sent))
}

func (p *publisher) unsubscribe() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.subscribers--
}

// after returns the messages from number at. It waits until there are some.
func (p *publisher) after(ctx context.Context, at uint64) ([]batchMessage, uint64) {
	for {
		p.mu.Lock()
		change := p.change
		at = max(at, p.first) // a slow subscriber misses messages
		list := slices.Clone(p.sent[at-p.first:])
		p.mu.Unlock()
		if len(list) > 0 && !p.fault.stopped() {
			return list, at + uint64(len(list))
		}
		select {
		case <-change:
		case <-ctx.Done():
			return nil, at
		}
	}
}

// serveSubscriber sends all messages published after the first subscription. It
// does not send earlier ones.
func (p *publisher) serveSubscriber(ctx context.Context, c *zmtpConn) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	topics := &topicSet{}
	var sender sync.WaitGroup
	defer sender.Wait()
	defer cancel()
	defer c.Close()
	for begun := false; ; {
		frames, err := c.receive()
		if err != nil {
			return
		}
		if len(frames) != 1 || !topics.message(frames[0]) || begun {
			continue
		}
		begun = true
		at := p.subscribe()
		defer p.unsubscribe()
		sender.Go(func() { p.sendFrom(ctx, c, topics, at) })
	}
}

func (p *publisher) sendFrom(ctx context.Context, c *zmtpConn, topics *topicSet, at uint64) {
	for {
		list, next := p.after(ctx, at)
		if list == nil {
			return
		}
		at = next
		for _, m := range list {
			if topics.want(p.topic) && c.send(p.topic, binary.BigEndian.AppendUint64(nil, m.seq), m.payload) != nil {
				c.Close()
				return
			}
		}
	}
}

// topicSet holds the subscriptions of one subscriber.
type topicSet struct {
	mu   sync.Mutex
	list []string
}

// message handles a subscription (1 and a prefix) or its end (0 and a prefix).
func (t *topicSet) message(m []byte) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case len(m) > 0 && m[0] == 1:
		t.list = append(t.list, string(m[1:]))
		return true
	case len(m) > 0 && m[0] == 0:
		if i := slices.Index(t.list, string(m[1:])); i >= 0 {
			t.list = slices.Delete(t.list, i, i+1)
		}
		return true
	}
	return false
}

func (t *topicSet) want(topic []byte) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.ContainsFunc(t.list, func(prefix string) bool { return strings.HasPrefix(string(topic), prefix) })
}

// serveReplay answers requests of an empty frame and a sequence number with the
// kept batches from that number on, and a last message with the number -1.
// Requests of any other form are dropped.
func (p *publisher) serveReplay(ctx context.Context, c *zmtpConn) {
	for {
		frames, err := c.receive()
		if err != nil {
			return
		}
		if len(frames) != 2 || len(frames[1]) > 8 {
			continue
		}
		from := uint64(0)
		for _, digit := range frames[1] {
			from = from<<8 | uint64(digit)
		}
		if !p.untilGoing(ctx) || p.sendKept(c, from) != nil {
			return
		}
	}
}

// untilGoing waits while the fault stops all deliveries. It returns false when
// ctx ended.
func (p *publisher) untilGoing(ctx context.Context) bool {
	for {
		p.mu.Lock()
		change := p.change
		p.mu.Unlock()
		if !p.fault.stopped() {
			return true
		}
		select {
		case <-change:
		case <-ctx.Done():
			return false
		}
	}
}

func (p *publisher) sendKept(c *zmtpConn, from uint64) error {
	p.mu.Lock()
	kept := slices.Clone(p.kept)
	p.mu.Unlock()
	send := func(topic []byte, seq uint64, payload []byte) error {
		frames := [][]byte{{}, topic, binary.BigEndian.AppendUint64(nil, seq), payload}
		if p.plain {
			frames = slices.Delete(frames, 1, 2)
		}
		return c.send(frames...)
	}
	for _, m := range kept {
		if m.seq < from {
			continue
		}
		if err := send(p.topic, m.seq, m.payload); err != nil {
			return err
		}
	}
	return send(nil, 1<<64-1, nil)
}

// subscriberCount sums the subscribers of all ranks; p may be nil.
func (p *publishers) subscriberCount() int {
	if p == nil {
		return 0
	}
	n := 0
	for _, one := range p.list {
		one.mu.Lock()
		n += one.subscribers
		one.mu.Unlock()
	}
	return n
}

// KVEventsEndpoint returns the endpoint where rank 0 publishes its KV events,
// "tcp://host:port", and KVEventsReplay the endpoint of its replays. They are
// empty without KV events or replays, and before Start.
func (e *Engine) KVEventsEndpoint() string {
	if e.publishers == nil {
		return ""
	}
	return endpointOf(e.publishers.list[0].events)
}

// KVEventsReplay: see KVEventsEndpoint.
func (e *Engine) KVEventsReplay() string {
	if e.publishers == nil {
		return ""
	}
	return endpointOf(e.publishers.list[0].replay)
}

// endpointOf returns the address of a listener of this machine.
func endpointOf(l net.Listener) string {
	if l == nil {
		return ""
	}
	a := l.Addr().(*net.TCPAddr)
	ip := a.IP.String()
	if a.IP.IsUnspecified() {
		ip = "127.0.0.1"
	}
	return fmt.Sprintf("tcp://%s", net.JoinHostPort(ip, fmt.Sprint(a.Port)))
}
