package http1

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// TestPriorKnowledge: HTTP/2 without TLS whose first bytes come one by one, in two pieces, and at once.
func TestPriorKnowledge(t *testing.T) { eachReader(t, testPriorKnowledge) }

func testPriorKnowledge(t *testing.T, reader string) {
	p := startProgram(t, reader, false, "")
	var first, block bytes.Buffer
	first.WriteString(http2.ClientPreface)
	framer, fields := http2.NewFramer(&first, nil), hpack.NewEncoder(&block)
	framer.WriteSettings()
	for _, f := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":path", "/health"}, {":authority", "h"}} {
		fields.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
	}
	framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: true})
	for cut := range first.Len() {
		c := p.client(t)
		pieces := []string{first.String()[:cut], first.String()[cut:]}
		if cut == 1 {
			pieces = strings.Split(first.String(), "")
		}
		for _, piece := range pieces {
			c.send(piece)
		}
		if status := http2Status(c); status != "200" {
			t.Fatalf("cut at %d: %s", cut, status)
		}
		c.Close()
	}
}

// http2Status returns the status of the first answer.
func http2Status(c *client) (status string) {
	framer := http2.NewFramer(io.Discard, c.in)
	for {
		f, err := framer.ReadFrame()
		if err != nil {
			return err.Error()
		}
		if h, ok := f.(*http2.HeadersFrame); ok {
			hpack.NewDecoder(4096, func(f hpack.HeaderField) {
				if f.Name == ":status" {
					status = f.Value
				}
			}).Write(h.HeaderBlockFragment())
			return status
		}
	}
}

// TestDrain: after SIGTERM a running request ends, its answer announces the end of the connection,
// and connections without a request end.
func TestDrain(t *testing.T) { eachReader(t, testDrain) }

func testDrain(t *testing.T, reader string) {
	for _, secure := range []bool{false, true} {
		t.Run(fmt.Sprintf("TLS %v", secure), func(t *testing.T) {
			p := startProgram(t, reader, secure, "drain_timeout = \"30s\"")
			idle, busy, stream := p.client(t), p.client(t), p.client(t)
			idle.send(ping)
			idle.answer(200)
			busy.send(chat("wait", false))
			stream.send(chat("wait", true) + ping)
			resp := stream.head("POST")
			testbed.Eventually(t, "both requests are at the engine", func() bool { return len(p.with("wait")) == 2 })
			p.cmd.Process.Signal(syscall.SIGTERM)
			idle.ends()
			p.release <- struct{}{}
			p.release <- struct{}{}
			if a := busy.answer(200); a.body != unaryAnswer {
				t.Errorf("%q", a.body)
			}
			busy.ends()
			if b, err := io.ReadAll(resp.Body); err != nil || string(b) != firstEvent+lastEvent {
				t.Errorf("%q, %v", b, err)
			}
			stream.whole(200)
		})
	}
}

// TestTakeover: the connections of a process whose successor has the address are served. The next
// answer of each announces the end of the connection.
func TestTakeover(t *testing.T) { eachReader(t, testTakeover) }

func testTakeover(t *testing.T, reader string) {
	for _, secure := range []bool{false, true} {
		t.Run(fmt.Sprintf("TLS %v", secure), func(t *testing.T) {
			p := startProgram(t, reader, secure, "")
			idle, half, busy := p.client(t), p.client(t), p.client(t)
			idle.send(ping)
			idle.answer(200)
			request := chat("half", false)
			half.send(request[:len(request)-20])
			busy.send(chat("wait", true) + chat("behind", false))
			resp := busy.head("POST")
			p.run("--takeover")
			testbed.Eventually(t, "the successor has the address", func() bool {
				idle := p.client(t)
				defer idle.Close()
				idle.send(ping)
				return !idle.answer(200).Close && strings.Contains(p.logged(), "a successor has taken over")
			})
			idle.send(chat("old connection", false))
			if a := idle.answer(200); !a.Close || a.body != unaryAnswer {
				t.Errorf("%v %q", a.Header, a.body)
			}
			idle.ends()
			half.send(request[len(request)-20:])
			if a := half.answer(200); a.body != unaryAnswer {
				t.Errorf("%q", a.body)
			}
			p.release <- struct{}{}
			if b, err := io.ReadAll(resp.Body); err != nil || string(b) != firstEvent+lastEvent {
				t.Errorf("%q, %v", b, err)
			}
			if a := busy.answer(200); !a.Close || a.body != unaryAnswer {
				t.Errorf("%v %q", a.Header, a.body)
			}
			busy.ends()
			fresh := p.client(t)
			fresh.send(ping + ping)
			fresh.answer(200)
			fresh.answer(200)
		})
	}
}

// TestLimits: clients that are slow or silent.
func TestLimits(t *testing.T) { eachReader(t, testLimits) }

func testLimits(t *testing.T, reader string) {
	p := startProgram(t, reader, false, "read_header_timeout = \"1s\"\nread_timeout = \"2s\"\nidle_timeout = \"1s\"")
	for _, tt := range []struct {
		name, sent string
		before     int    // answers before the limit
		status     int    // of the answer at the limit; 0: none
		code       string // "": the connection may end without the answer
	}{
		{"nothing", "", 0, 0, ""},
		{"half a head", "GET /health HTTP/1.1\r\nHost: h\r\n", 0, 0, ""},
		{"half of the second head", ping + "GET /health HTTP/1.1\r\nHost: h\r\n", 1, 0, ""},
		{"no second request", ping, 1, 0, ""},
		{"half a body", post(chatPath, "{", "Content-Length: 100"), 0, 408, "body_timeout"},
		{"half a chunk", post(chatPath, "5\r\n{", "Transfer-Encoding: chunked"), 0, 408, "body_timeout"},
		{"half a trailer", post(chatPath, "2\r\n{}\r\n0\r\nX-T:", "Transfer-Encoding: chunked"), 0, 408, ""},
		{"half a body that nothing reads", post("/nothing", "{", "Content-Length: 100"), 0, 404, "not_found"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c := p.client(t)
			c.send(tt.sent)
			for range tt.before {
				c.answer(200)
			}
			switch {
			case tt.code != "":
				a := c.answer(tt.status)
				a.refusal(t, tt.code)
			case tt.status != 0:
				c.whole(tt.status)
			}
			c.ends()
		})
	}
}

// TestRefusedHeads: the answer to a refused head has an error as OpenAI's API has it, at the address
// of clients and of operators.
func TestRefusedHeads(t *testing.T) { eachReader(t, testRefusedHeads) }

func testRefusedHeads(t *testing.T, reader string) {
	p := startProgram(t, reader, false, "")
	list, _ := namedStreams(t)
	for _, n := range list {
		status, _, _ := strings.Cut(n.want[reader], " ")
		if status < "400" || status > "599" {
			continue // the first request is accepted
		}
		for _, addr := range []string{p.addr, p.admin} {
			conn, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			conn.SetDeadline(time.Now().Add(patience))
			go func() {
				conn.Write(n.stream)
				conn.(*net.TCPConn).CloseWrite()
			}()
			c := &client{conn, t, bufio.NewReader(conn)}
			resp := c.head("GET")
			b, err := io.ReadAll(resp.Body)
			if err != nil || strconv.Itoa(resp.StatusCode) != status || !resp.Close {
				t.Errorf("%s: got %d, close %v, %v, want %s", n.name, resp.StatusCode, resp.Close, err, status)
			}
			code := "invalid_head"
			if resp.StatusCode == 431 {
				code = "head_too_large"
			}
			wholeAnswer{resp, string(b)}.refusal(t, code)
			c.ends()
			conn.Close()
		}
	}
}
