package core

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

// EventBuffer is the number of batches that are kept for replays, and for slow
// subscribers: the engines' buffer_steps.
const EventBuffer = 10_000

// publisher is the ZmqEventPublisher of one rank: a PUB socket whose messages
// are topic, sequence number and batch, and a ROUTER socket that sends them
// again. Safe for concurrent use.
type publisher struct {
	e      *Engine
	rank   int
	topic  []byte
	wire   KVWire
	plain  bool // replays without the topic
	fault  *KVFault
	Events net.Listener
	replay net.Listener // nil: none

	mu     sync.Mutex
	seq    uint64
	Kept   []batchMessage // for replays
	sent   []batchMessage // for subscribers
	first  uint64         // number of sent[0] among all messages ever sent
	held   *batchMessage  // to be sent after the next one
	change chan struct{}  // closed when there is a new message
	// subscribers are the connections that have subscribed to something.
	subscribers int
}

type batchMessage struct {
	Seq     uint64
	payload []byte
}

// publishers are the publishers of all ranks.
type publishers struct{ List []*publisher }

// NewPublishers builds the publishers of an engine, or returns nil if the
// config has none.
func NewPublishers(e *Engine, wire KVWire, plain bool) *publishers {
	if e.Cfg.KVEvents.Endpoint == "" {
		return nil
	}
	p := &publishers{}
	for i := range e.Cfg.Ranks {
		p.List = append(p.List, &publisher{
			e: e, rank: i, topic: []byte(e.Cfg.KVEvents.Topic), wire: wire, plain: plain,
			fault: &KVFault{}, change: make(chan struct{}),
		})
	}
	return p
}

// Start opens the sockets of all ranks. The engine's mutex is held.
func (p *publishers) Start(e *Engine) error {
	events, err := listenRanks(e.Cfg.KVEvents.Endpoint, len(p.List))
	if err != nil {
		return fmt.Errorf("listen kv events: %w", err)
	}
	e.Peers.Listeners = append(e.Peers.Listeners, events...)
	var replays []net.Listener
	if e.Cfg.KVEvents.Replay != "" {
		if replays, err = listenRanks(e.Cfg.KVEvents.Replay, len(p.List)); err != nil {
			return fmt.Errorf("listen kv event replays: %w", err)
		}
		e.Peers.Listeners = append(e.Peers.Listeners, replays...)
	}
	for i, one := range p.List {
		one.Events = events[i]
		e.ServePeers(one.Events, "PUB", one.serveSubscriber)
		if replays != nil {
			one.replay = replays[i]
			e.ServePeers(one.replay, "ROUTER", one.serveReplay)
		}
	}
	return nil
}

// StartFeeds opens a PUB socket for each rank whose messages nobody can request again. The engine's
// mutex is held.
func (e *Engine) StartFeeds(endpoint, topic string) (feeds []*publisher, err error) {
	sockets, err := listenRanks(endpoint, len(e.Ranks))
	if err != nil {
		return nil, fmt.Errorf("listen %s: %w", topic, err)
	}
	e.Peers.Listeners = append(e.Peers.Listeners, sockets...)
	for i, l := range sockets {
		p := &publisher{e: e, rank: i, topic: []byte(topic), fault: &KVFault{}, Events: l, change: make(chan struct{})}
		e.ServePeers(l, "PUB", p.serveSubscriber)
		feeds = append(feeds, p)
	}
	return feeds, nil
}

// Endpoint returns where the publisher listens, "tcp://host:port".
func (p *publisher) Endpoint() string { return endpointOf(p.Events) }

// Publish implements kvSink.
func (p *publishers) Publish(rank int, events []KVEvent) { p.List[rank].Publish(events) }

// Publish numbers a batch and delivers it.
func (p *publisher) Publish(events []KVEvent) { p.Send(p.wire(time.Now(), p.rank, events)) }

// Send numbers a message and delivers it.
func (p *publisher) Send(payload []byte) {
	fault := p.fault.Draw()
	p.mu.Lock()
	defer p.mu.Unlock()
	m := batchMessage{p.seq, payload}
	p.seq++
	if fault != KVEventsLose {
		p.Kept = append(p.Kept, m)
		if over := len(p.Kept) - EventBuffer; over > 0 {
			p.Kept = slices.Delete(p.Kept, 0, over)
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
	if over := len(p.sent) - EventBuffer; over > 0 {
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

// Subscribe counts a subscriber and returns the number of its first message:
// the next one.
func (p *publisher) Subscribe() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.subscribers++
	return p.first + uint64(len(p.sent))
}

func (p *publisher) Unsubscribe() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.subscribers--
}

// After returns the messages from number at. It waits until there are some.
func (p *publisher) After(ctx context.Context, at uint64) ([]batchMessage, uint64) {
	for {
		p.mu.Lock()
		change := p.change
		at = max(at, p.first) // a slow subscriber misses messages
		list := slices.Clone(p.sent[at-p.first:])
		p.mu.Unlock()
		if len(list) > 0 && !p.fault.Stopped() {
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
func (p *publisher) serveSubscriber(ctx context.Context, c *ZMTPConn) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	topics := &TopicSet{}
	var sender sync.WaitGroup
	defer sender.Wait()
	defer cancel()
	defer c.Close()
	for begun := false; ; {
		frames, err := c.Receive()
		if err != nil {
			return
		}
		if len(frames) != 1 || !topics.Message(frames[0]) || begun {
			continue
		}
		begun = true
		at := p.Subscribe()
		defer p.Unsubscribe()
		sender.Go(func() { p.sendFrom(ctx, c, topics, at) })
	}
}

func (p *publisher) sendFrom(ctx context.Context, c *ZMTPConn, topics *TopicSet, at uint64) {
	for {
		list, next := p.After(ctx, at)
		if list == nil {
			return
		}
		at = next
		for _, m := range list {
			if topics.Want(p.topic) && c.Send(p.topic, binary.BigEndian.AppendUint64(nil, m.Seq), m.payload) != nil {
				c.Close()
				return
			}
		}
	}
}

// TopicSet holds the subscriptions of one subscriber.
type TopicSet struct {
	mu   sync.Mutex
	list []string
}

// Message handles a subscription (1 and a prefix) or its end (0 and a prefix).
func (t *TopicSet) Message(m []byte) bool {
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

func (t *TopicSet) Want(topic []byte) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.ContainsFunc(t.list, func(prefix string) bool { return strings.HasPrefix(string(topic), prefix) })
}

// serveReplay answers requests of an empty frame and a sequence number with the
// kept batches from that number on, and a last message with the number -1.
// Requests of any other form are dropped.
func (p *publisher) serveReplay(ctx context.Context, c *ZMTPConn) {
	for {
		frames, err := c.Receive()
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
		if !p.fault.Stopped() {
			return true
		}
		select {
		case <-change:
		case <-ctx.Done():
			return false
		}
	}
}

func (p *publisher) sendKept(c *ZMTPConn, from uint64) error {
	p.mu.Lock()
	kept := slices.Clone(p.Kept)
	p.mu.Unlock()
	send := func(topic []byte, seq uint64, payload []byte) error {
		frames := [][]byte{{}, topic, binary.BigEndian.AppendUint64(nil, seq), payload}
		if p.plain {
			frames = slices.Delete(frames, 1, 2)
		}
		return c.Send(frames...)
	}
	for _, m := range kept {
		if m.Seq < from {
			continue
		}
		if err := send(p.topic, m.Seq, m.payload); err != nil {
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
	for _, one := range p.List {
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
	if e.Publishers == nil {
		return ""
	}
	return endpointOf(e.Publishers.List[0].Events)
}

// KVEventsReplay: see KVEventsEndpoint.
func (e *Engine) KVEventsReplay() string {
	if e.Publishers == nil {
		return ""
	}
	return endpointOf(e.Publishers.List[0].replay)
}

// KVEventsAnnounced returns the endpoints of a rank as vLLM announces them: those of the configuration
// with the rank's port, or if the configured port is 0 the address at which the rank listens. replay
// is empty without replays. ok is false without KV events.
func (e *Engine) KVEventsAnnounced(rank int) (events, replay string, ok bool) {
	if e.Publishers == nil {
		return "", "", false
	}
	one := e.Publishers.List[rank]
	announced := func(configured string, l net.Listener) string {
		host, port, err := SplitEndpoint(configured)
		if err != nil || l == nil {
			return ""
		}
		if host == "" && port != 0 {
			return fmt.Sprintf("tcp://*:%d", port+rank)
		}
		return endpointOf(l)
	}
	return announced(e.Cfg.KVEvents.Endpoint, one.Events), announced(e.Cfg.KVEvents.Replay, one.replay), true
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
