//go:build unix

package upstream

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/usage"
)

// slurp reads requests of size bytes after the end of the head, without allocating, and
// calls f after each.
func slurp(br *bufio.Reader, size int, f func() error) {
	for {
		for {
			line, err := br.ReadSlice('\n')
			if err != nil {
				return
			}
			if len(line) == 2 {
				break
			}
		}
		if _, err := br.Discard(size); err != nil {
			return
		}
		if f() != nil {
			return
		}
	}
}

// reportCPU reports the processor time per operation since start, including that of the
// fake engine in the same process.
func reportCPU(b *testing.B, start time.Duration) {
	b.ReportMetric(float64(usage.ProcessTime()-start)/float64(b.N), "cpu-ns/op")
}

// agentFields are the header lines of a typical leg.
var agentFields = []Field{
	{"Content-Type", "application/json"}, {"Accept", "*/*"}, {"User-Agent", "OpenAI/Python 1.40.0"},
	{"Authorization", "Bearer none"}, {"X-Request-Id", "0123456789abcdef0123456789abcdef"},
}

// BenchmarkRequest measures one call on a reused connection: body out, 1 KB in.
func BenchmarkRequest(b *testing.B) {
	answer := []byte("HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 04:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: 1024\r\ncontent-type: application/json\r\n\r\n")
	answer = append(answer, bytes.Repeat([]byte("x"), 1024)...)
	for _, size := range []int{2 << 10, 7 << 10, 15 << 10, 32 << 10, 256 << 10} {
		b.Run(fmt.Sprintf("body=%dK", size>>10), func(b *testing.B) {
			o := listen(b, func(c *net.TCPConn, br *bufio.Reader, _ int) {
				slurp(br, size, func() error {
					_, err := c.Write(answer)
					return err
				})
			})
			cl := New(o)
			defer cl.CloseIdle()
			req := &Request{
				Method: "POST", Path: "/v1/chat/completions", Header: agentFields,
				Body:        [][]byte{bytes.Repeat([]byte("x"), size)},
				HeadTimeout: time.Minute, IdleTimeout: time.Minute,
			}
			p := make([]byte, 4096)
			b.ReportAllocs()
			start := usage.ProcessTime()
			for b.Loop() {
				resp, err := cl.Do(b.Context(), req)
				if err != nil {
					b.Fatal(err)
				}
				for err == nil {
					_, err = resp.Read(p)
				}
				if err != io.EOF {
					b.Fatal(err)
				}
				resp.Close()
			}
			reportCPU(b, start)
		})
	}
}

// BenchmarkEvents measures one event on each of 100 streams. All events are sent before
// any is read: the processor time is that of 100 events.
func BenchmarkEvents(b *testing.B) {
	event := []byte("c8\r\n" + string(bytes.Repeat([]byte("x"), 200)) + "\r\n")
	const streams = 100
	conns := make(chan net.Conn, streams)
	o := listen(b, func(c *net.TCPConn, br *bufio.Reader, _ int) {
		slurp(br, 0, func() error {
			_, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
			conns <- c
			return err
		})
	})
	cl := New(o)
	var read sync.WaitGroup // events of one round
	var readers sync.WaitGroup
	var engines []net.Conn
	for range streams {
		resp, err := cl.Do(b.Context(), &Request{Path: "/", IdleTimeout: time.Minute})
		if err != nil {
			b.Fatal(err)
		}
		engines = append(engines, <-conns)
		readers.Go(func() {
			defer resp.Close()
			p := make([]byte, 4096)
			for n, err := resp.Read(p); err == nil; n, err = resp.Read(p) {
				read.Add(-n / 200)
			}
		})
	}
	b.ReportAllocs()
	start := usage.ProcessTime()
	for b.Loop() {
		read.Add(streams)
		for _, c := range engines {
			c.Write(event)
		}
		read.Wait()
	}
	reportCPU(b, start)
	for _, c := range engines {
		c.Close()
	}
	readers.Wait()
}

// BenchmarkIdleStream reports the memory of one open stream that waits for its next
// event: the client's side plus that of the fake engine, which is the same.
func BenchmarkIdleStream(b *testing.B) {
	o := listen(b, func(c *net.TCPConn, br *bufio.Reader, _ int) {
		slurp(br, 0, func() error {
			_, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
			return err
		})
	})
	const streams = 200
	for b.Loop() {
		cl := New(o)
		before := inUse()
		var open []*Response
		for range streams {
			resp, err := cl.Do(b.Context(), &Request{Path: "/", IdleTimeout: time.Minute})
			if err != nil {
				b.Fatal(err)
			}
			resp.Read(make([]byte, 10))
			open = append(open, resp)
		}
		b.ReportMetric(float64(inUse()-before)/streams, "B/stream")
		for _, resp := range open {
			resp.Close()
		}
	}
}

func inUse() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

func BenchmarkChunks(b *testing.B) {
	event := append(append([]byte("c8\r\n"), bytes.Repeat([]byte("x"), 200)...), "\r\n"...)
	buf := make([]byte, len(event))
	d := framing{kind: byChunks, state: inSize}
	b.SetBytes(int64(len(event)))
	for b.Loop() {
		copy(buf, event)
		d.decode(buf)
	}
}

func BenchmarkParseHead(b *testing.B) {
	raw := "HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 04:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: 1024\r\ncontent-type: application/json\r\n\r\n"
	b.ReportAllocs()
	for b.Loop() {
		if _, err := parseHead(raw); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAlive(b *testing.B) {
	o := listen(b, func(c *net.TCPConn, br *bufio.Reader, _ int) { br.ReadByte() })
	o = o.withDefaults()
	c, err := dial(b.Context(), &o, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer c.abort()
	b.ReportAllocs()
	for b.Loop() {
		if !c.alive() {
			b.Fatal("dead")
		}
	}
}
