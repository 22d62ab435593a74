package grpcserver

import (
	"context"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connlimit"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

// idle returns a server that does not run, and connections with one open stream each, which has no
// handler.
func idle(t *testing.T, conns int) (s *Server, list []*conn, streams []*Stream) {
	s = New(Options{Memory: new(buffer.Budget), MaxStreams: 10})
	l := proxytest.NewPipeListener()
	t.Cleanup(func() {
		for _, c := range list {
			c.nc.Close()
		}
	})
	for range conns {
		go l.Dial() // ends with Accept
		nc, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		c := newConn(s, nc, connlimit.New().Enter(nc))
		s.conns[c] = struct{}{}
		s.unused.enter(c)
		c.last = 1
		c.open(1, Method{}, 0)
		list, streams = append(list, c), append(streams, c.streams[1])
	}
	return s, list, streams
}

// TestMemoryOfMessages: a message counts with its room from before its first byte until it is
// released, or until its stream has ended.
func TestMemoryOfMessages(t *testing.T) {
	s, conns, streams := idle(t, 1)
	c, st := conns[0], streams[0]
	st.assembly.want = 100_000
	for _, step := range []struct{ need, held int }{{1, 16 << 10}, {16 << 10, 16 << 10}, {16<<10 + 1, 32 << 10}, {32<<10 + 1, 64 << 10}, {100_000, 128 << 10}} {
		if !c.grow(st, step.need) {
			t.Fatal("the stream has ended")
		}
		st.assembly.memory.B = st.assembly.memory.B[:step.need]
		if n := s.memory.held.Load(); n != int64(step.held) {
			t.Errorf("%d bytes count for %d, want %d", n, step.need, step.held)
		}
	}
	if !c.reserve(st, messageCost) {
		t.Fatal("the stream has ended")
	}
	c.deliver(st)
	c.arrivals = nil
	m, ok := st.Take()
	if n := s.memory.held.Load(); !ok || len(m.Data) != 100_000 || n != 128<<10+messageCost {
		t.Errorf("%d bytes count for the whole message of %d", n, len(m.Data))
	}
	m.Release()
	m.Release()
	if n := s.memory.held.Load(); n != 0 {
		t.Errorf("%d bytes count after the release", n)
	}
	c.reserve(st, 1000)
	c.closed(st)
	if n := s.memory.held.Load() + s.memory.ending.Load() + s.options.Memory.Used(); n != 0 || c.reserve(st, 10) {
		t.Errorf("%d bytes count after the end", n)
	}
}

// TestChoice: of the connection with the most bytes, the newest of its large streams ends.
func TestChoice(t *testing.T) {
	s, conns, streams := idle(t, 2)
	s.options.Memory.SetLimit(4000) // the limit of messages is 1000
	large, small := conns[0], conns[1]
	for id, n := range map[uint32]int64{3: 300, 5: 290, 7: 140} {
		s.unused.enter(large)
		large.last = id
		large.open(id, Method{}, 0)
		large.reserve(large.streams[id], n)
	}
	small.reserve(streams[1], 200)
	if len(large.streams) != 4 {
		t.Fatal("a stream has ended below the limit")
	}
	small.reserve(streams[1], 100)
	if large.streams[5] != nil || len(large.streams) != 3 || len(small.streams) != 1 {
		t.Errorf("the streams %v and %v stay", large.streams, small.streams)
	}
}

// TestLeavingConnection: a connection with too many bytes is being closed, and its bytes still
// count, because a handler runs. No other connection and no other stream ends for them.
func TestLeavingConnection(t *testing.T) {
	s, conns, streams := idle(t, 2)
	s.options.Memory.SetLimit(1 << 20)
	hostile := streams[0]
	hostile.serving = true
	conns[0].finish()
	conns[0].mu.Lock()
	conns[0].count(hostile, 3*s.memory.limit())
	conns[0].mu.Unlock()
	first, second := conns[1].reserve(streams[1], 1000), conns[1].reserve(streams[1], 1000)
	if !first || !second || len(conns[1].streams) != 1 {
		t.Error("the stream of the other connection was told to end")
	}
}

// TestFullMemory: a stream that must end because of its memory runs the handler of its request, or gets
// the status; a handler that runs is asked first.
func TestFullMemory(t *testing.T) {
	for name, tt := range map[string]struct {
		method  string
		runs    bool // the handler runs before
		answers bool // the handler ends the stream when it is asked
		want    string
	}{
		"before the request":     {methodEcho, false, false, "8"},
		"no request":             {methodOne, false, false, "8"},
		"a request":              {methodEcho, true, false, "8"},
		"a request that answers": {methodEcho, true, true, "5"},
	} {
		t.Run(name, func(t *testing.T) {
			ready, full := make(chan struct{}), make(chan struct{})
			c := serve(t, func(o *Options) {
				o.MaxMessage = 80_000
				o.Memory.SetLimit(80_000)
				o.Methods[methodEcho] = Method{Request: true, Serve: func(s *Stream) error {
					if m, ok := s.Take(); ok {
						m.Release()
					}
					s.OnFull(func() bool {
						if tt.answers {
							close(full)
						}
						return tt.answers
					})
					close(ready)
					select {
					case <-full:
						return status.Error(codes.NotFound, "")
					case <-s.Context().Done():
						return context.Cause(s.Context())
					}
				}}
			}).connect(t)
			c.open(1, tt.method, false)
			if tt.runs {
				c.send(1, false, "x")
				<-ready
			}
			c.framer.WriteData(1, false, framed(long(80_000))[:maxFrame])
			for range 4 { // the room for the last bytes is above the limit
				c.framer.WriteData(1, false, make([]byte, maxFrame-1000))
			}
			if _, end := c.answer(1); end["grpc-status"] != tt.want {
				t.Errorf("got %v", end)
			}
		})
	}
}
