package enginesim

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/proxy/engine/zmtp"
)

// published is one message of a publisher, its batch decoded.
type published struct {
	topic string
	seq   uint64
	raw   []byte
	ts    float64
	rank  any
	// events are maps, or arrays with the tag first.
	events []any
}

func readPublished(t *testing.T, topic, seq, raw []byte) published {
	t.Helper()
	p := published{topic: string(topic), seq: binary.BigEndian.Uint64(seq), raw: raw}
	v, rest, err := unpack(raw)
	if err != nil || len(rest) > 0 {
		return p // events remains nil
	}
	batch := v.([]any)
	if len(batch) != 3 {
		t.Fatalf("batch %v", batch)
	}
	p.ts, p.events, p.rank = batch[0].(float64), batch[1].([]any), batch[2]
	return p
}

// dial connects with an independent implementation of ZMTP.
func dial(t *testing.T, endpoint string, kind zmtp.Socket) *zmtp.Conn {
	t.Helper()
	c, err := zmtp.Dial(t.Context(), endpoint, zmtp.Options{Socket: kind, MaxMessage: 1 << 20, MaxFrames: 4, ReadBuffer: 4 << 10})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// subscriber is a SUB socket whose messages are read in the background.
func subscriber(t *testing.T, e *Engine, endpoint, topic string) <-chan published {
	t.Helper()
	before := e.State().KVSubscribers
	sub := dial(t, endpoint, zmtp.Sub)
	if err := sub.Subscribe(topic); err != nil {
		t.Fatal(err)
	}
	messages := make(chan published, 1000)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(messages)
		for {
			frames, err := sub.Receive(0)
			if err != nil {
				return
			}
			if len(frames) != 3 {
				t.Errorf("message of %d frames", len(frames))
				continue
			}
			messages <- readPublished(t, frames[0], frames[1], slices.Clone(frames[2]))
		}
	}()
	t.Cleanup(func() { sub.Close(); <-done })
	eventually(t, "the subscription", func() bool { return e.State().KVSubscribers > before })
	return messages
}

// next returns the next message.
func next(t *testing.T, messages <-chan published) published {
	t.Helper()
	select {
	case p := <-messages:
		return p
	case <-time.After(20 * time.Second):
		t.Fatal("no message")
		return published{}
	}
}

// eventTag is an event's tag and eventMember its member: by key, or by its place in the
// array form.
func eventTag(event any) string {
	if m, ok := event.(map[string]any); ok {
		return m["type"].(string)
	}
	return event.([]any)[0].(string)
}

var storedFields = []string{"", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx"}

func eventMember(event any, name string) any {
	if m, ok := event.(map[string]any); ok {
		return m[name]
	}
	if i := slices.Index(storedFields, name); i < len(event.([]any)) {
		return event.([]any)[i]
	}
	return nil
}

// ids converts the token ids of an event, or of an answer, to tokens.
func ids(t *testing.T, list any) []core.Token {
	t.Helper()
	var tokens []core.Token
	for _, v := range list.([]any) {
		n, err := strconv.Atoi(fmt.Sprint(v))
		if err != nil {
			t.Fatal(err)
		}
		tokens = append(tokens, core.Token(n))
	}
	return tokens
}

func kvEngine(t *testing.T, cfg Config) *Engine {
	t.Helper()
	if cfg.KVEvents.Endpoint == "" {
		cfg.KVEvents.Endpoint = "tcp://127.0.0.1:0"
	}
	if cfg.KVEvents.Replay == "" {
		cfg.KVEvents.Replay = "tcp://127.0.0.1:0"
	}
	return startEngine(t, cfg)
}

// TestVLLMPublishes checks the events of a prompt's blocks with its own ids, of
// the answer's blocks, of hits, evictions and resets, in both encodings.
func TestVLLMPublishes(t *testing.T) {
	for _, arrays := range []bool{false, true} {
		t.Run(fmt.Sprintf("arrays %v", arrays), func(t *testing.T) {
			e := kvEngine(t, Config{KVBlocks: 12, KVEvents: KVEventsConfig{Topic: "kv@pod", Arrays: arrays}})
			messages := subscriber(t, e, e.KVEventsEndpoint(), "kv")
			prompt := words(1, 40)
			want := ids(t, post(t, e.URL()+"/tokenize", completion(prompt, "")).field(t, "tokens"))
			post(t, e.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":9,"ignore_eos":true`)).text(t)
			p := next(t, messages)
			if p.topic != "kv@pod" || p.seq != 0 || p.rank != int64(0) || len(p.events) != 1 || p.ts < 1e9 {
				t.Fatalf("first message %+v", p)
			}
			stored := p.events[0]
			hashes := eventMember(stored, "block_hashes").([]any)
			if eventTag(stored) != "BlockStored" || eventMember(stored, "parent_block_hash") != nil || eventMember(stored, "block_size") != int64(16) ||
				eventMember(stored, "medium") != "GPU" || eventMember(stored, "group_idx") != int64(0) || len(hashes) != 2 ||
				!slices.Equal(ids(t, eventMember(stored, "token_ids")), want[:32]) {
				t.Fatalf("stored %v", stored)
			}
			p = next(t, messages) // the block that decode filled
			if stored := p.events[0]; p.seq != 1 || eventMember(stored, "parent_block_hash") != hashes[1] ||
				!slices.Equal(ids(t, eventMember(stored, "token_ids"))[:8], want[32:]) {
				t.Fatalf("second message %+v", p)
			}
			post(t, e.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1`)).text(t)
			p = next(t, messages) // the hit, once more from the root
			if stored := p.events[0]; p.seq != 2 || len(p.events) != 1 || eventMember(stored, "parent_block_hash") != nil ||
				!slices.Equal(eventMember(stored, "block_hashes").([]any), hashes) {
				t.Fatalf("hit %+v", p)
			}
			post(t, e.URL()+core.RouteCompletions, completion(words(2, 16*11), `"max_tokens":1`)).text(t)
			p = next(t, messages) // blocks are evicted from the end of the chain, one event for each
			for i, removed := range p.events {
				if eventTag(removed) != "BlockRemoved" || len(eventMember(removed, "block_hashes").([]any)) != 1 || i == 2 && eventMember(removed, "block_hashes").([]any)[0] != hashes[0] {
					t.Fatalf("removed %v", p.events)
				}
			}
			next(t, messages)
			eventually(t, "idle", func() bool { return e.State().BlocksUsed == 0 })
			post(t, e.URL()+"/reset_prefix_cache", "")
			if p = next(t, messages); p.seq != 5 || len(p.events) != 1 || eventTag(p.events[0]) != "AllBlocksCleared" {
				t.Fatalf("reset %+v", p)
			}
			if a := post(t, e.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1`)); a.field(t, "usage", "prompt_tokens_details", "cached_tokens") != json.Number("0") {
				t.Errorf("answer after a reset: %s", a.body)
			}
		})
	}
}

// TestVLLMSaltInEvents: the salt is the first block's extra key.
func TestVLLMSaltInEvents(t *testing.T) {
	e := kvEngine(t, Config{KVEvents: KVEventsConfig{DigestHashes: true}})
	messages := subscriber(t, e, e.KVEventsEndpoint(), "")
	post(t, e.URL()+core.RouteCompletions, completion(words(1, 40), `"max_tokens":1,"cache_salt":"tenant"`)).text(t)
	stored := next(t, messages).events[0].(map[string]any)
	keys := stored["extra_keys"].([]any)
	if digest, ok := stored["block_hashes"].([]any)[0].([]byte); !ok || len(digest) != 32 || len(keys) != 2 ||
		!slices.Equal(keys[0].([]any), []any{"tenant"}) || keys[1] != nil {
		t.Errorf("stored %v", stored)
	}
}

// TestSGLangPublishes: /server_info announces the publisher. A block is stored
// once, and a hit has no event. Salts are at the end of the event. A reset has
// an event, decode has none.
func TestSGLangPublishes(t *testing.T) {
	e := kvEngine(t, Config{Connector: ConnectorSGLang, BlockSize: 8, Ranks: 2})
	info := get(t, e.URL()+"/server_info")
	port, err := strconv.Atoi(fmt.Sprint(info.field(t, "kv_events", "endpoint_port_base")))
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]any{
		"publisher": "zmq", "endpoint_host": "127.0.0.1", "topic": "", "block_size": json.Number("8"), "dp_size": json.Number("2"),
	} {
		if got := info.field(t, "kv_events", path); got != want {
			t.Errorf("kv_events.%s: %v", path, got)
		}
	}
	one := subscriber(t, e, fmt.Sprintf("tcp://127.0.0.1:%d", port+1), "")
	ask := func(extra string) {
		t.Helper()
		post(t, e.URL()+core.RouteCompletions, completion(words(3, 20), `"max_tokens":1,"data_parallel_rank":1`+extra)).text(t)
	}
	ask("")
	p := next(t, one)
	stored := p.events[0].([]any)
	if p.seq != 0 || p.rank != int64(1) || len(p.events) != 1 || len(stored) != 7 || stored[0] != "BlockStored" || len(stored[1].([]any)) != 2 ||
		stored[2] != nil || len(stored[3].([]any)) != 16 || stored[4] != int64(8) || stored[5] != nil || stored[6] != "GPU" {
		t.Fatalf("stored %v", p)
	}
	ask("")
	ask(`,"cache_salt":"s"`)
	p = next(t, one) // the hit has no event
	if stored := p.events[0].([]any); p.seq != 1 || len(stored) != 8 || stored[7].(map[string]any)["cache_salt"] != "s" {
		t.Fatalf("salted %v", p)
	}
	eventually(t, "idle", func() bool { return e.State().BlocksUsed == 0 })
	if a := post(t, e.URL()+"/flush_cache", ""); a.status != http.StatusOK {
		t.Errorf("flush: %d", a.status)
	}
	if p = next(t, one); len(p.events) != 1 || !slices.Equal(p.events[0].([]any), []any{"AllBlocksCleared"}) {
		t.Errorf("cleared %v", p)
	}

	decode := kvEngine(t, Config{Connector: ConnectorSGLang, Role: RoleDecode})
	if decode.Ranks[0].Cache.Log != nil || get(t, decode.URL()+"/server_info").field(t, "kv_events") == nil {
		t.Error("decode's chunk cache has events, or no publisher is announced")
	}
	if plain := startEngine(t, Config{Connector: ConnectorSGLang}); get(t, plain.URL()+"/server_info").field(t, "kv_events") != nil {
		t.Error("a publisher that is not there is announced")
	}
}

// TestFlushCacheWhileBusy: blocks in use stay in the cache.
func TestFlushCacheWhileBusy(t *testing.T) {
	e := kvEngine(t, Config{Connector: ConnectorSGLang})
	e.SetFault("", 0, "decode")
	answered, leave := postAside(t, e.URL()+core.RouteCompletions, completion(words(1, 20), `"max_tokens":4`))
	eventually(t, "running", func() bool { return e.State().RequestsRunning == 1 })
	if a := get(t, e.URL()+"/flush_cache"); a.status != http.StatusBadRequest {
		t.Errorf("flush: %d", a.status)
	}
	leave()
	<-answered
}

// replays requests the batches from a number on, as a DEALER socket does.
func replays(t *testing.T, endpoint string, from uint64) [][][]byte {
	t.Helper()
	dealer := dial(t, endpoint, zmtp.Dealer)
	defer dealer.Close()
	for _, malformed := range [][][]byte{{[]byte("x")}, {nil, nil, []byte("y")}} {
		if err := dealer.Send(malformed...); err != nil { // dropped
			t.Fatal(err)
		}
	}
	if err := dealer.Send(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		t.Fatal(err)
	}
	var list [][][]byte
	for {
		frames, err := dealer.Receive(time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if seq := frames[len(frames)-2]; string(seq) == "\xff\xff\xff\xff\xff\xff\xff\xff" {
			if last := frames[len(frames)-1]; len(last) != 0 || len(frames) == 4 && len(frames[1]) != 0 {
				t.Errorf("end %q", frames)
			}
			return list
		}
		var kept [][]byte // frames are valid until the next message
		for _, frame := range frames {
			kept = append(kept, slices.Clone(frame))
		}
		list = append(list, kept)
	}
}

// TestReplay: a replay has every kept batch from a number on, with the topic or
// without.
func TestReplay(t *testing.T) {
	for _, tt := range []struct {
		name   string
		cfg    Config
		frames int
	}{
		{"vllm", Config{KVEvents: KVEventsConfig{Topic: "a"}}, 4},
		{"vllm, before 2026-07-07", Config{KVEvents: KVEventsConfig{Topic: "a", PlainReplay: true}}, 3},
		{"sglang", Config{Connector: ConnectorSGLang, KVEvents: KVEventsConfig{Topic: "a"}}, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := kvEngine(t, tt.cfg)
			for i := range 4 {
				post(t, e.URL()+core.RouteCompletions, completion(words(i, 20), `"max_tokens":1`)).text(t)
			}
			for from, want := range map[uint64]int{0: 4, 3: 1, 4: 0, 1 << 40: 0} {
				list := replays(t, e.KVEventsReplay(), from)
				if len(list) != want {
					t.Fatalf("from %d: %d batches", from, len(list))
				}
				for i, frames := range list {
					n := len(frames)
					if n != tt.frames || len(frames[0]) != 0 || n == 4 && string(frames[1]) != "a" {
						t.Fatalf("frames %q", frames)
					}
					if p := readPublished(t, nil, frames[n-2], frames[n-1]); p.seq != from+uint64(i) || len(p.events) != 1 {
						t.Errorf("batch %d: %+v", i, p)
					}
				}
			}
		})
	}
}

// TestKVEventFaults checks which of six batches a subscriber and a replay receive.
func TestKVEventFaults(t *testing.T) {
	for _, tt := range []struct {
		kind       string
		sent, kept []uint64
		garbage    int // its place in sent
	}{
		{core.KVEventsDrop, []uint64{0, 3, 4, 5}, []uint64{0, 1, 2, 3, 4, 5}, -1},
		{core.KVEventsLose, []uint64{0, 3, 4, 5}, []uint64{0, 3, 4, 5}, -1},
		{core.KVEventsReorder, []uint64{0, 2, 1, 3, 4, 5}, []uint64{0, 1, 2, 3, 4, 5}, -1},
		{core.KVEventsGarbage, []uint64{0, 1, 2, 3, 4, 5}, []uint64{0, 1, 2, 3, 4, 5}, 1},
		{KVEventsStop, []uint64{0, 1, 2, 3, 4, 5}, []uint64{0, 1, 2, 3, 4, 5}, -1},
	} {
		t.Run(tt.kind, func(t *testing.T) {
			e := kvEngine(t, Config{})
			messages := subscriber(t, e, e.KVEventsEndpoint(), "")
			var sent []uint64
			collect := func(n int) {
				for len(sent) < n {
					p := next(t, messages)
					if bad := len(sent) == tt.garbage || tt.garbage >= 0 && len(sent) == tt.garbage+1; bad != (p.events == nil) {
						t.Errorf("message %d: %q", len(sent), p.raw)
					}
					sent = append(sent, p.seq)
				}
			}
			for i := range 6 {
				if i == 1 {
					collect(1) // before the fault delays it
					if err := e.SetKVEventFault(tt.kind, 2); err != nil {
						t.Fatal(err)
					}
				}
				post(t, e.URL()+core.RouteCompletions, completion(words(i, 20), `"max_tokens":1`)).text(t)
			}
			if tt.kind == KVEventsStop {
				if len(messages) > 0 {
					t.Error("delivered while stopped")
				}
				if err := e.SetKVEventFault("", 0); err != nil {
					t.Fatal(err)
				}
			}
			collect(len(tt.sent))
			if !slices.Equal(sent, tt.sent) {
				t.Errorf("sent %d, want %d", sent, tt.sent)
			}
			var kept []uint64
			for _, frames := range replays(t, e.KVEventsReplay(), 0) {
				kept = append(kept, binary.BigEndian.Uint64(frames[2]))
			}
			if !slices.Equal(kept, tt.kept) {
				t.Errorf("kept batches %d, want %d", kept, tt.kept)
			}
		})
	}
}

// TestKVEventsAfterKill: a new engine at the same endpoints starts at 0 and has
// another digest for the same block. The old engine's subscribers lose their
// connections.
func TestKVEventsAfterKill(t *testing.T) {
	at := func() string { return fmt.Sprintf("tcp://127.0.0.1:%d", testbed.Ports(t, 2)) }
	cfg := KVEventsConfig{Endpoint: at(), Replay: at()}
	e := kvEngine(t, Config{Ranks: 2, KVEvents: cfg})
	body := completion(words(1, 20), `"max_tokens":1`)
	rank0 := []string{"X-data-parallel-rank", "0"}
	messages := subscriber(t, e, cfg.Endpoint, "")
	post(t, e.URL()+core.RouteCompletions, body, rank0...).text(t)
	post(t, e.URL()+core.RouteCompletions, body, rank0...).text(t)
	first := next(t, messages)
	conn, err := net.Dial("tcp", strings.TrimPrefix(cfg.Replay, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	e.Kill()
	io.Copy(io.Discard, conn) // until the connection ends
	again := startEngine(t, Config{Ranks: 2, KVEvents: cfg})
	if again.KVEventsEndpoint() != cfg.Endpoint || again.KVEventsReplay() != cfg.Replay {
		t.Fatalf("endpoints %s and %s", again.KVEventsEndpoint(), again.KVEventsReplay())
	}
	messages = subscriber(t, again, cfg.Endpoint, "")
	post(t, again.URL()+core.RouteCompletions, body, rank0...).text(t)
	p := next(t, messages)
	hash := func(p published) any { return eventMember(p.events[0], "block_hashes").([]any)[0] }
	if p.seq != 0 || hash(p) == hash(first) {
		t.Errorf("number after a restart: %d %v, before %v", p.seq, hash(p), hash(first))
	}
}

// TestSubscriptions: a topic that does not match and an ended subscription
// deliver nothing. The connections of invalid peers are closed.
func TestSubscriptions(t *testing.T) {
	e := kvEngine(t, Config{KVEvents: KVEventsConfig{Topic: "kv"}})
	other := subscriber(t, e, e.KVEventsEndpoint(), "other")
	fitting := subscriber(t, e, e.KVEventsEndpoint(), "k")
	address := strings.TrimPrefix(e.KVEventsEndpoint(), "tcp://")
	for _, junk := range []string{"GET / HTTP/1.1\r\n\r\n" + strings.Repeat("x", 64), strings.Repeat("\x00", 64), ""} {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(conn, junk)
		conn.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, conn)
		conn.Close()
	}
	post(t, e.URL()+core.RouteCompletions, completion(words(1, 20), `"max_tokens":1`)).text(t)
	next(t, fitting)
	if len(other) > 0 {
		t.Error("a message of another topic arrived")
	}
	topics := &core.TopicSet{}
	for _, m := range []string{"\x01a", "\x01a", "\x00a"} {
		if !topics.Message([]byte(m)) {
			t.Errorf("%q is no subscription", m)
		}
	}
	if !topics.Want([]byte("ab")) || topics.Message([]byte("x")) || topics.Message(nil) {
		t.Error("two subscriptions and one end leave none, or junk is one")
	}
	topics.Message([]byte("\x00a"))
	if topics.Want([]byte("ab")) {
		t.Error("an ended subscription still selects messages")
	}
}

// TestSlowSubscriber: a subscriber that is more than the buffer behind misses
// the oldest batches.
func TestSlowSubscriber(t *testing.T) {
	e := kvEngine(t, Config{})
	p := e.Publishers.List[0]
	at := p.Subscribe()
	for range core.EventBuffer + 5 {
		p.Publish([]core.KVEvent{{Kind: core.KVCleared}})
	}
	list, _ := p.After(t.Context(), at)
	if len(list) != core.EventBuffer || list[0].Seq != 5 || len(p.Kept) != core.EventBuffer {
		t.Errorf("%d messages from number %d, %d kept", len(list), list[0].Seq, len(p.Kept))
	}
	p.Unsubscribe()
}

// TestPing: a peer's heartbeat gets an answer with its context.
func TestPing(t *testing.T) {
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	go func() {
		io.WriteString(theirs, "\x04\x09\x04PING\x00\x0aab\x00\x01z")
	}()
	got := make([]byte, 9)
	read := make(chan error, 1)
	go func() {
		_, err := io.ReadFull(theirs, got)
		read <- err
	}()
	c := core.NewZMTPConn(ours)
	frames, err := c.Receive()
	if err != nil || len(frames) != 1 || string(frames[0]) != "z" {
		t.Fatalf("message %q, %v", frames, err)
	}
	if err := <-read; err != nil || string(got) != "\x04\x07\x04PONGab" {
		t.Errorf("answer %q, %v", got, err)
	}
}

// scriptedConn is a connection whose peer sends fixed bytes.
type scriptedConn struct {
	net.Conn
	in io.Reader
}

func (c *scriptedConn) Read(p []byte) (int, error)  { return c.in.Read(p) }
func (c *scriptedConn) Write(p []byte) (int, error) { return len(p), nil }
func (c *scriptedConn) SetDeadline(time.Time) error { return nil }

// FuzzPeer: for any bytes of a peer, messages are complete and bounded, and
// reading ends with the connection.
func FuzzPeer(f *testing.F) {
	hello := "\xff" + strings.Repeat("\x00", 8) + "\x7f\x03\x00NULL" + strings.Repeat("\x00", 48) + "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
	f.Add([]byte(hello + "\x00\x01\x01"))
	f.Add([]byte(hello + "\x01\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00\x07"))
	f.Add([]byte(hello + "\x04\x09\x04PING\x00\x0aab\x02\xff\xff\xff\xff\xff\xff\xff\xff"))
	f.Add([]byte(hello[:70]))
	f.Fuzz(func(t *testing.T, sent []byte) {
		c, err := core.GreetPeer(&scriptedConn{in: strings.NewReader(string(sent))}, "PUB")
		if err != nil {
			return
		}
		topics := &core.TopicSet{}
		for total := 0; ; {
			frames, err := c.Receive()
			if err != nil {
				return
			}
			if len(frames) == 0 || len(frames) > core.MaxPeerFrames {
				t.Fatalf("got %d frames", len(frames))
			}
			for _, frame := range frames {
				total += len(frame)
				topics.Message(frame)
			}
			if total > len(sent) {
				t.Fatalf("%d bytes of %d", total, len(sent))
			}
		}
	})
}
