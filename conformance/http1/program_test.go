package http1

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/textproto"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// program is the built pdproxy in front of one engine.
type program struct {
	*engine
	t      *testing.T
	addr   string
	admin  string
	tls    bool
	config string
	log    *os.File
	cmd    *exec.Cmd // the first process
}

// startProgram runs the program until the test ends. keys are further keys of [server].
func startProgram(t *testing.T, reader string, secure bool, keys string) *program {
	t.Helper()
	p := &program{engine: startEngine(t), t: t, addr: testbed.FreeAddr(t), admin: testbed.FreeAddr(t), tls: secure}
	dir := t.TempDir()
	text := fmt.Sprintf("[server]\nlisten = %q\nhttp1 = %q\n%s\n", p.addr, reader, keys)
	if secure {
		text += "[server.tls]\nself_signed = true\n"
	}
	text += fmt.Sprintf("[admin]\nlisten = %q\n[fleet]\ndir = %q\n[[engine]]\nname = \"e\"\nurl = \"http://%s\"\nrole = \"both\"\nconnector = \"none\"\n",
		p.admin, filepath.Join(dir, "run"), p.engine.listener.Addr())
	p.config = filepath.Join(dir, "config.toml")
	if err := os.WriteFile(p.config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var err error
	if p.log, err = os.Create(filepath.Join(dir, "log")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if logged := p.logged(); t.Failed() || strings.Contains(logged, "panic") {
			t.Errorf("log:\n%.5000s", logged)
		}
		p.log.Close()
	})
	p.cmd = p.run()
	testbed.Eventually(t, "the program serves", p.ready)
	return p
}

// run starts a process of the program, which takes over from another one.
func (p *program) run(flags ...string) *exec.Cmd {
	p.t.Helper()
	path, err := pdproxy()
	if err != nil {
		p.t.Fatal(err)
	}
	cmd := exec.Command(path, append([]string{"run", p.config}, flags...)...)
	cmd.Stderr = p.log
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }()
	p.t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM) // an error means that it has ended
		<-ended
	})
	return cmd
}

func (p *program) logged() string {
	b, _ := os.ReadFile(p.log.Name())
	return string(b)
}

func (p *program) ready() bool {
	resp, err := http.Get("http://" + p.admin + "/readyz")
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == 200
}

// dial opens a connection of a client.
func (p *program) dial() (net.Conn, error) {
	if p.tls {
		return tls.Dial("tcp", p.addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}})
	}
	return net.Dial("tcp", p.addr)
}

// engine is an engine that records its requests byte for byte. It uses no HTTP server, which would
// hide the bytes.
type engine struct {
	listener net.Listener
	wg       sync.WaitGroup
	release  chan struct{} // ends one answer that waits

	mu      sync.Mutex
	conns   map[net.Conn]bool
	seen    []received // the POSTs
	running int        // requests without an end
}

// received is one request at the engine.
type received struct {
	header []string
	body   string
}

const (
	unaryAnswer = `{"id":"x","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`
	firstEvent  = `data: {"id":"x","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}` + "\n\n"
	lastEvent   = `data: {"id":"x","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\ndata: [DONE]\n\n"
)

func startEngine(t *testing.T) *engine {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{listener: l, release: make(chan struct{}), conns: map[net.Conn]bool{}}
	e.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			e.mu.Lock()
			e.conns[c] = true
			e.mu.Unlock()
			e.wg.Go(func() { e.serve(c) })
		}
	})
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

func (e *engine) serve(c net.Conn) {
	defer c.Close()
	for in := bufio.NewReader(c); ; {
		line, r, err := readRequest(in)
		if err != nil {
			return
		}
		if strings.HasPrefix(line, "GET ") { // probes
			text := `{"object":"list","data":[{"id":"m","object":"model"}]}`
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
			continue
		}
		e.mu.Lock()
		e.seen = append(e.seen, r)
		e.running++
		e.mu.Unlock()
		err = e.answer(c, in, r.body)
		e.mu.Lock()
		e.running--
		e.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// answer obeys three words if they are in the body: hints, wait, stream.
func (e *engine) answer(c net.Conn, in *bufio.Reader, body string) error {
	wait := func() error {
		if !strings.Contains(body, "wait") {
			return nil
		}
		left := make(chan struct{})
		go func() { // the proxy sends no other request before the answer
			in.Peek(1)
			close(left)
		}()
		select {
		case <-left:
			return io.ErrUnexpectedEOF
		case <-e.release:
			c.SetReadDeadline(time.Unix(1, 0))
			<-left
			return c.SetReadDeadline(time.Time{})
		}
	}
	if strings.Contains(body, "hints") {
		io.WriteString(c, "HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n")
	}
	if !strings.Contains(body, `"stream":true`) {
		if err := wait(); err != nil {
			return err
		}
		_, err := fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(unaryAnswer), unaryAnswer)
		return err
	}
	fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(firstEvent), firstEvent)
	if err := wait(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(c, "%x\r\n%s\r\n0\r\n\r\n", len(lastEvent), lastEvent)
	return err
}

func readRequest(in *bufio.Reader) (line string, r received, err error) {
	lines := textproto.NewReader(in)
	if line, err = lines.ReadLine(); err != nil {
		return "", r, err
	}
	body := io.Reader(strings.NewReader(""))
	for {
		h, err := lines.ReadLine()
		if err != nil {
			return "", r, err
		}
		if h == "" {
			break
		}
		r.header = append(r.header, h)
		name, value, _ := strings.Cut(h, ": ")
		switch strings.ToLower(name) {
		case "content-length":
			n, err := strconv.ParseInt(value, 10, 64)
			if err != nil {
				return "", r, err
			}
			body = io.LimitReader(in, n)
		case "transfer-encoding":
			body = httputil.NewChunkedReader(in)
		}
	}
	b, err := io.ReadAll(body)
	r.body = string(b)
	return line, r, err
}

// with returns the requests with a text in their bodies.
func (e *engine) with(text string) (found []received) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range e.seen {
		if strings.Contains(r.body, text) {
			found = append(found, r)
		}
	}
	return found
}

// forget drops the recorded requests.
func (e *engine) forget() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.seen = nil
}

// framed are names that no header at the engine has, because they belong to the client's connection.
var framed = []string{"transfer-encoding", "upgrade", "http2-settings", "trailer", "te", "expect", "keep-alive", "proxy-connection", "x-t"}

// faults returns the lines of a header that describe another body or another connection.
func (r received) faults() (faults []string) {
	lengths := 0
	for _, h := range r.header {
		name, value, _ := strings.Cut(strings.ToLower(h), ": ")
		if name == "content-length" {
			lengths++
		}
		if slices.Contains(framed, name) || strings.ContainsAny(h, "\r\n\x00") || name == "content-length" && (lengths > 1 || value != strconv.Itoa(len(r.body))) {
			faults = append(faults, h)
		}
	}
	return faults
}

// idle waits until no request is at the engine.
func (e *engine) idle(t *testing.T) {
	t.Helper()
	testbed.Eventually(t, "the engine has no request", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.running == 0
	})
}

const chatPath = "/v1/chat/completions"

// chatBody is the body of a chat request with that prompt.
func chatBody(prompt string, stream bool) string {
	return fmt.Sprintf(`{"model":"m","stream":%t,"messages":[{"role":"user","content":%q}]}`, stream, prompt)
}

// chat is a whole chat request with further header lines.
func chat(prompt string, stream bool, lines ...string) string {
	body := chatBody(prompt, stream)
	return post(chatPath, body, append(lines, fmt.Sprintf("Content-Length: %d", len(body)))...)
}

func post(path, body string, lines ...string) string {
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: h\r\n%s\r\n\r\n%s", path, strings.Join(lines, "\r\n"), body)
}

// TestProgramStreams sends random streams of chat requests to the built program. The engine receives
// only bodies that net/http and llhttp find in the stream, in their order, and each of them has its
// answer.
func TestProgramStreams(t *testing.T) { eachReader(t, testProgramStreams) }

func testProgramStreams(t *testing.T, reader string) {
	p := startProgram(t, reader, false, "")
	streams, seed := number(t, "HTTP1_STREAMS", usualStreams)/4, number(t, "HTTP1_SEED", 1)
	var sent, reached atomic.Int64
	testbed.Parallel(streams, 8, func(n int) {
		seed := uint64(seed + n)
		marker := fmt.Sprintf("stream-%d-", seed)
		s := chatStream(seed, marker)
		l := readLLHTTP(t, s)
		if otherProtocol(s) || bytes.Contains(s, []byte("HEAD ")) { // answers without a body
			return
		}
		o, err := server{name: "program", dial: p.dial, recorder: newRecorder()}.send(mostRequests(s, l), split(rng(seed), s)...)
		if err != nil {
			t.Errorf("seed %d: %v\n%q", seed, err, s)
			return
		}
		var got []string
		for _, r := range p.with(marker) {
			got = append(got, r.body)
			if faults := r.faults(); len(faults) > 0 {
				t.Errorf("seed %d: the engine received %q\n%q", seed, faults, s)
			}
		}
		answered := 0
		for _, a := range o.answers {
			if a.status == 200 {
				answered++
			}
		}
		if answered < len(got) && !o.reset { // other requests get 200, too
			t.Errorf("seed %d: %+v to %d requests at the engine\n%q", seed, o.answers, len(got), s)
		}
		for reader, bodies := range map[string][]string{"llhttp": l.whole(), "net/http": libraryBodies(s)} {
			if reader == "llhttp" && l.refused != "" && judged(l.refused) {
				continue
			}
			if rest := missing(got, bodies); rest != "" {
				t.Errorf("seed %d: the engine received %q, which %s does not find in\n%q", seed, rest, reader, s)
			}
		}
		sent.Add(1)
		if len(got) > 0 {
			reached.Add(1)
		}
	})
	p.idle(t)
	t.Logf("%d streams, %d of them reached the engine", sent.Load(), reached.Load())
	if reached.Load() < sent.Load()/10 {
		t.Error("the streams are of little use")
	}
}

// missing returns the first of got that is not in bodies behind the one before.
func missing(got, bodies []string) string {
	for _, g := range got {
		i := slices.Index(bodies, g)
		if i < 0 {
			return g
		}
		bodies = bodies[i+1:]
	}
	return ""
}
