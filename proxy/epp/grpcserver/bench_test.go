package grpcserver

import (
	"bufio"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"

	"github.com/pdproxy/pdproxy/internal/dev/usage"
	"github.com/pdproxy/pdproxy/proxy/buffer"
)

// echoes returns each of the n messages of a stream.
const echoes = 4

// raw is a codec of grpc-go that leaves messages as they are.
type raw struct{}

// Name implements encoding.CodecV2.
func (raw) Name() string { return "proto" }

// Marshal implements encoding.CodecV2.
func (raw) Marshal(v any) (mem.BufferSlice, error) { return *v.(*mem.BufferSlice), nil }

// Unmarshal implements encoding.CodecV2.
func (raw) Unmarshal(data mem.BufferSlice, v any) error {
	data.Ref()
	*v.(*mem.BufferSlice) = data
	return nil
}

var _ encoding.CodecV2 = raw{}

// servers are the servers of the benchmark. Each returns echoes messages of a stream, and then ends it.
var servers = map[string]func(l net.Listener) (stop func()){
	"own": func(l net.Listener) func() {
		s := New(Options{MaxMessage: 1 << 20, MaxStreams: 1000, FirstMessage: time.Minute, Memory: new(buffer.Budget), Log: slog.New(slog.DiscardHandler),
			Methods: map[string]Method{methodEcho: {Request: true, Serve: func(s *Stream) error {
				for n := range echoes {
					m, _ := receive(s)
					if err := s.Send(n == echoes-1, Parts{m.Data}); err != nil {
						return err
					}
					m.Release()
				}
				return nil
			}}}})
		go s.Serve(l) // ends with stop
		return func() { s.Drain(); s.Cut(io.EOF) }
	},
	"grpc-go": func(l net.Listener) func() {
		s := grpc.NewServer(grpc.ForceServerCodecV2(raw{}), grpc.NumStreamWorkers(idleWorkers), grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
			for range echoes {
				m := new(mem.BufferSlice)
				if err := s.RecvMsg(m); err != nil {
					return err
				}
				if err := s.SendMsg(m); err != nil {
					return err
				}
			}
			return nil
		}))
		go s.Serve(l) // ends with stop
		return s.Stop
	},
	"net/http": func(l net.Listener) func() {
		handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Trailer", "Grpc-Status")
			w.Header().Set("Content-Type", contentType)
			in, message := bufio.NewReader(r.Body), make([]byte, 64<<10)
			for range echoes {
				if _, err := io.ReadFull(in, message[:messageHead]); err != nil {
					return
				}
				whole := message[:messageHead+binary.BigEndian.Uint32(message[1:])]
				if _, err := io.ReadFull(in, whole[messageHead:]); err != nil {
					return
				}
				w.Write(whole)
				w.(http.Flusher).Flush()
			}
			w.Header().Set("Grpc-Status", "0")
		})
		protocols := new(http.Protocols)
		protocols.SetUnencryptedHTTP2(true)
		server := &http.Server{Handler: handler, Protocols: protocols}
		go server.Serve(l) // ends with stop
		return func() { server.Close() }
	},
}

// BenchmarkStreams measures the CPU time of a stream with four messages in both directions, eight at a
// time: in this server, in that of grpc-go and in that of net/http. The client is the same, and its
// time is in the figures.
func BenchmarkStreams(b *testing.B) {
	for _, size := range []int{200, 2 << 10, 16<<10 - messageHead} {
		for _, name := range []string{"own", "grpc-go", "net/http"} {
			b.Run(strconv.Itoa(size)+"/"+name, func(b *testing.B) {
				l, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					b.Fatal(err)
				}
				defer servers[name](l)()
				nc, err := net.Dial("tcp", l.Addr().String())
				if err != nil {
					b.Fatal(err)
				}
				defer nc.Close()
				began := usage.ProcessTime()
				echoAll(b, nc, b.N, size)
				b.ReportMetric(float64(usage.ProcessTime()-began)/float64(b.N), "cpu-ns/op")
			})
		}
	}
}

// turns writes everything before it reads.
type turns struct {
	net.Conn
	out *bufio.Writer
}

// Read implements io.Reader.
func (t turns) Read(p []byte) (int, error) {
	if err := t.out.Flush(); err != nil {
		return 0, err
	}
	return t.Conn.Read(p)
}

// echoAll runs n streams, eight at a time, on a connection.
func echoAll(b *testing.B, nc net.Conn, n, size int) {
	out := bufio.NewWriterSize(nc, 1<<20)
	c := &client{Conn: nc, framer: http2.NewFramer(out, bufio.NewReaderSize(turns{nc, out}, 64<<10))}
	c.encode = newEncoder(c)
	c.framer.SetReuseFrames()
	out.WriteString(http2.ClientPreface)
	c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
	c.framer.WriteWindowUpdate(0, 1<<30) // enough for all
	left := map[uint32]int{}             // bytes that a stream must return before it sends the next message
	message := framed(long(size))
	next := uint32(1)
	open := func() {
		if int(next) < 2*n {
			c.open(next, methodEcho, false)
			c.framer.WriteData(next, false, message)
			left[next] = len(message)
			next += 2
		}
	}
	var once sync.Once
	got := 0
	for ended := 0; ended < n; {
		f, err := c.framer.ReadFrame()
		if err != nil {
			b.Fatal(err)
		}
		switch h := f.Header(); h.Type {
		case http2.FrameSettings:
			once.Do(func() {
				for range 8 {
					open()
				}
			})
		case http2.FrameData:
			got += int(h.Length)
			if left[h.StreamID] -= int(h.Length); left[h.StreamID] == 0 {
				left[h.StreamID] = len(message)
				c.framer.WriteData(h.StreamID, false, message)
			}
		case http2.FrameHeaders:
			if h.Flags.Has(http2.FlagHeadersEndStream) {
				ended++
				open()
			}
		}
	}
	if want := n * echoes * len(message); got != want {
		b.Fatalf("%d bytes came back, want %d", got, want)
	}
}
