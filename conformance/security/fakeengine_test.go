package security

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http/httputil"
	"net/textproto"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// fakeEngine is an engine that records its requests, byte for byte, and answers according
// to the test. It uses no HTTP library, which would hide the bytes.
type fakeEngine struct {
	listener net.Listener
	wg       sync.WaitGroup

	// act answers one POST and returns true if the connection must end. nil:
	// every request gets a good answer. It must be set before the first
	// request.
	act func(c net.Conn, r received) (end bool)

	mu       sync.Mutex // guards what follows
	conns    map[net.Conn]bool
	accepted int        // connections so far
	seen     []received // the POSTs
}

// received is one request at an engine.
type received struct {
	line   string
	header []string // the lines as they came
	body   string
}

// values are the values of the header lines of that name.
func (r received) values(name string) (values []string) {
	for _, line := range r.header {
		if n, v, _ := strings.Cut(line, ":"); strings.EqualFold(strings.TrimSpace(n), name) {
			values = append(values, strings.TrimSpace(v))
		}
	}
	return values
}

const (
	goodAnswer = `{"id":"x","object":"chat.completion","model":"sim","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`
	goodEvent  = `data: {"id":"x","object":"chat.completion.chunk","model":"sim","choices":[{"index":0,"delta":{"content":"tok"},"finish_reason":null}]}` + "\n\n"
	lastEvent  = `data: {"id":"x","object":"chat.completion.chunk","model":"sim","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\ndata: [DONE]\n\n"
	streamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)

// jsonHead is the head of an answer of n bytes with further header lines.
func jsonHead(n int, lines ...string) string {
	return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n", strings.Join(lines, ""), n)
}

// chunk is text as one chunk.
func chunk(text string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(text), text) }

// newFakeEngine starts an engine that ends with the test.
func newFakeEngine(t *testing.T) *fakeEngine {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e := &fakeEngine{listener: l, conns: map[net.Conn]bool{}}
	e.wg.Go(e.accept)
	t.Cleanup(func() {
		l.Close()
		e.mu.Lock()
		for c := range e.conns {
			c.Close()
		}
		e.mu.Unlock()
		e.wg.Wait()
	})
	return e
}

// section is the engine's part of a configuration.
func (e *fakeEngine) section(role, connector string, keys ...string) string {
	return fmt.Sprintf("[[engine]]\nname = %q\nurl = \"http://%s\"\nrole = %q\nconnector = %q\n%s\n",
		e.name(role), e.listener.Addr(), role, connector, strings.Join(keys, "\n"))
}

// name returns the engine's name for that role in section.
func (e *fakeEngine) name(role string) string {
	return role + "-" + strconv.Itoa(e.listener.Addr().(*net.TCPAddr).Port)
}

// connections returns the number of connections so far.
func (e *fakeEngine) connections() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.accepted
}

func (e *fakeEngine) accept() {
	for {
		c, err := e.listener.Accept()
		if err != nil {
			return
		}
		e.mu.Lock()
		e.conns[c] = true
		e.accepted++
		e.mu.Unlock()
		e.wg.Go(func() {
			e.serve(c)
			c.Close()
			e.mu.Lock()
			delete(e.conns, c)
			e.mu.Unlock()
		})
	}
}

func (e *fakeEngine) serve(c net.Conn) {
	in := bufio.NewReader(c)
	for {
		r, err := readReceived(in)
		if err != nil {
			return
		}
		if strings.HasPrefix(r.line, "GET ") {
			answerProbe(c, strings.Fields(r.line)[1])
			continue
		}
		e.mu.Lock()
		e.seen = append(e.seen, r)
		e.mu.Unlock()
		if e.act == nil {
			answerWell(c, r)
		} else if e.act(c, r) {
			return
		}
	}
}

func readReceived(in *bufio.Reader) (r received, err error) {
	lines := textproto.NewReader(in)
	if r.line, err = lines.ReadLine(); err != nil {
		return r, err
	}
	for {
		line, err := lines.ReadLine()
		if err != nil {
			return r, err
		}
		if line == "" {
			break
		}
		r.header = append(r.header, line)
	}
	body := io.Reader(strings.NewReader(""))
	if n := r.values("Content-Length"); len(n) > 0 {
		size, err := strconv.ParseInt(n[0], 10, 64)
		if err != nil {
			return r, err
		}
		body = io.LimitReader(in, size)
	} else if len(r.values("Transfer-Encoding")) > 0 {
		body = httputil.NewChunkedReader(in)
	}
	b, err := io.ReadAll(body)
	r.body = string(b)
	return r, err
}

func answerProbe(c net.Conn, path string) {
	text := "{}"
	switch path {
	case "/v1/models":
		text = `{"object":"list","data":[{"id":"sim","object":"model"}]}`
	case "/version":
		text = `{"version":"0.32.0"}`
	}
	io.WriteString(c, jsonHead(len(text))+text)
}

func answerWell(c net.Conn, r received) {
	if strings.Contains(r.body, `"stream":true`) {
		io.WriteString(c, streamHead+chunk(goodEvent)+chunk(lastEvent)+"0\r\n\r\n")
		return
	}
	io.WriteString(c, jsonHead(len(goodAnswer))+goodAnswer)
}

// take returns the requests that contain a text in their body, and drops all
// recorded requests.
func (e *fakeEngine) take(text string) (found []received) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range e.seen {
		if strings.Contains(r.body, text) {
			found = append(found, r)
		}
	}
	e.seen = nil
	return found
}

// with returns the requests that contain a text in their body.
func (e *fakeEngine) with(text string) (found []received) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range e.seen {
		if strings.Contains(r.body, text) {
			found = append(found, r)
		}
	}
	return found
}
