package takeover

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"
)

const path = "/v1/completions"

// load sends requests without a pause. It checks the text of each answer.
type load struct {
	t        *testing.T
	scheme   string
	addr     string
	tls      *tls.Config // nil: none
	want     []string    // by prompt
	stop     atomic.Bool
	answered atomic.Int64
	failed   atomic.Int64
	kinds    sync.Map // name -> *atomic.Int64
	wg       sync.WaitGroup
	closers  []func()
}

// prompts have different lengths, and so have their answers.
const prompts = 6

func body(prompt int, stream bool) []byte {
	return fmt.Appendf(nil, `{"model":"sim","prompt":%q,"max_tokens":%d,"stream":%t}`,
		fmt.Sprintf("prompt %d ", prompt)+strings.Repeat("this text is repeated many times. ", 1+3*prompt), 2+6*prompt, stream)
}

// startLoad starts clients of every kind.
func startLoad(t *testing.T, w *world, secure bool) *load {
	t.Helper()
	l := &load{t: t, scheme: "http", addr: w.addr}
	if secure {
		l.scheme, l.tls = "https", &tls.Config{InsecureSkipVerify: true}
	}
	for p := range prompts {
		resp, err := http.Post(w.alone.URL()+path, "application/json", bytes.NewReader(body(p, false)))
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		text, err := unaryText(b)
		if err != nil || text == "" {
			t.Fatalf("unaryText(b) = %v, %s", err, b)
		}
		l.want = append(l.want, text)
	}
	for _, h2 := range []bool{false, true} {
		client := l.client(h2)
		for _, stream := range []bool{false, true} {
			for range 3 {
				l.ask(fmt.Sprintf("go h2=%t stream=%t", h2, stream), stream, func(p int) (string, error) { return viaGo(client, l.scheme+"://"+l.addr+path, p, stream) })
			}
		}
	}
	for _, stream := range []bool{false, true} {
		for range 2 {
			raw := &rawClient{load: l}
			l.closers = append(l.closers, raw.close)
			l.ask(fmt.Sprintf("raw stream=%t", stream), stream, func(p int) (string, error) { return raw.do(p, stream) })
		}
	}
	if secure {
		l.askHTTP3()
	}
	versions := []string{"--http1.1"}
	if secure { // curl 7.88 cannot use a connection of --http2-prior-knowledge twice
		versions = append(versions, "--http2")
	}
	for _, version := range versions {
		l.wg.Go(func() {
			for !l.stop.Load() {
				l.curl(version)
			}
		})
	}
	return l
}

// askHTTP3 sends requests over two connections that are kept, and over a new
// one each time. quic-go's client sends a request again only if the server
// refused it before it began.
func (l *load) askHTTP3() {
	client := func() *http.Client { return &http.Client{Transport: &http3.Transport{TLSClientConfig: l.tls.Clone()}} }
	end := func(c *http.Client) { c.Transport.(*http3.Transport).Close() }
	url := l.scheme + "://" + l.addr + path
	for _, stream := range []bool{false, true} {
		kept := client()
		l.closers = append(l.closers, func() { end(kept) })
		for range 3 {
			l.ask(fmt.Sprintf("h3 stream=%t", stream), stream, func(p int) (string, error) { return viaGo(kept, url, p, stream) })
		}
		l.ask(fmt.Sprintf("h3 new connection stream=%t", stream), stream, func(p int) (string, error) {
			fresh := client()
			defer end(fresh)
			return viaGo(fresh, url, p, stream)
		})
	}
}

func (l *load) client(h2 bool) *http.Client {
	var p http.Protocols
	switch {
	case !h2:
		p.SetHTTP1(true)
	case l.tls != nil:
		p.SetHTTP2(true)
	default:
		p.SetUnencryptedHTTP2(true)
	}
	tr := &http.Transport{Protocols: &p, TLSClientConfig: l.tls.Clone(), MaxIdleConnsPerHost: 100}
	l.closers = append(l.closers, tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// ask starts one client that sends a request, waits a little, and repeats.
func (l *load) ask(kind string, stream bool, do func(prompt int) (string, error)) {
	counter := new(atomic.Int64)
	if c, loaded := l.kinds.LoadOrStore(kind, counter); loaded {
		counter = c.(*atomic.Int64)
	}
	l.wg.Go(func() {
		for !l.stop.Load() {
			p := rand.IntN(prompts)
			text, err := do(p)
			l.judge(kind, p, text, err)
			counter.Add(1)
			if rand.IntN(2) == 0 {
				time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
			}
		}
	})
}

func (l *load) judge(kind string, p int, text string, err error) {
	if err == nil && text != l.want[p] {
		err = fmt.Errorf("the text is %q, not %q", text, l.want[p])
	}
	if err != nil && l.failed.Add(1) <= 10 {
		l.t.Errorf("%s, at %s: %v", kind, time.Now().Format("15:04:05.000000"), err)
	}
	l.answered.Add(1)
}

// await returns when that many requests have been answered.
func (l *load) await(n int64) {
	for deadline := time.Now().Add(patience); l.answered.Load() < n && time.Now().Before(deadline); {
		time.Sleep(5 * time.Millisecond)
	}
}

// end stops the clients and asserts that every kind of client got answers.
func (l *load) end() {
	l.stop.Store(true)
	l.wg.Wait()
	for _, f := range l.closers {
		f()
	}
	l.kinds.Range(func(kind, n any) bool {
		if n.(*atomic.Int64).Load() < takeovers {
			l.t.Errorf("%s: only %d answers", kind, n.(*atomic.Int64).Load())
		}
		return true
	})
	l.t.Logf("%d requests, %d failed", l.answered.Load(), l.failed.Load())
}

// viaGo sends one request. Without GetBody the client cannot send a body twice,
// so there is no hidden retry.
func viaGo(c *http.Client, url string, p int, stream bool) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	b := body(p, stream)
	req, err := http.NewRequestWithContext(ctx, "POST", url, bytes.NewReader(b))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	if t, tcp := c.Transport.(*http.Transport); tcp && !t.Protocols.HTTP2() && !t.Protocols.UnencryptedHTTP2() {
		req.GetBody = nil
	}
	resp, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	return text(resp, stream)
}

func text(resp *http.Response, stream bool) (string, error) {
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", fmt.Errorf("after %d bytes: %w", len(b), err)
	}
	if resp.StatusCode != 200 {
		return "", fmt.Errorf("status %d: %s", resp.StatusCode, b)
	}
	if stream {
		return streamText(b)
	}
	return unaryText(b)
}

type choices struct {
	Choices []struct{ Text string }
}

func unaryText(b []byte) (string, error) {
	var c choices
	if err := json.Unmarshal(b, &c); err != nil || len(c.Choices) != 1 {
		return "", fmt.Errorf("no answer: %w: %.200q", err, b)
	}
	return c.Choices[0].Text, nil
}

func streamText(b []byte) (string, error) {
	var text strings.Builder
	for line := range strings.Lines(string(b)) {
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if data == "[DONE]" {
			return text.String(), nil
		}
		if !ok {
			continue
		}
		var c choices
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			return "", fmt.Errorf("event %q: %w", data, err)
		}
		for _, choice := range c.Choices {
			text.WriteString(choice.Text)
		}
	}
	return "", fmt.Errorf("the stream has no end: %q", b)
}

// rawClient writes requests on one connection as long as the answers allow it,
// and never repeats a request.
type rawClient struct {
	load *load
	conn net.Conn
	r    *bufio.Reader
}

func (c *rawClient) close() {
	if c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
}

func (c *rawClient) do(p int, stream bool) (said string, err error) {
	nth := "next"
	if c.conn == nil {
		nth = "first"
		if c.conn, err = net.Dial("tcp", c.load.addr); err != nil {
			return "", err
		}
		if c.load.tls != nil {
			c.conn = tls.Client(c.conn, c.load.tls)
		}
		c.r = bufio.NewReader(c.conn)
	}
	defer func() {
		if err != nil {
			c.close()
			err = fmt.Errorf("%s request of the connection: %w", nth, err)
		}
	}()
	c.conn.SetDeadline(time.Now().Add(patience))
	b := body(p, stream)
	if _, err := fmt.Fprintf(c.conn, "POST %s HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n%s", path, len(b), b); err != nil {
		return "", err
	}
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	said, err = text(resp, stream)
	if resp.Close {
		c.close()
	}
	return said, err
}

// curl sends ten requests in one run of the program, which reuses its connections.
func (l *load) curl(version string) {
	const n = 10
	args := []string{"-sS", "-k", version, "--max-time", "60"}
	for range n {
		if len(args) > 5 {
			args = append(args, "--next", "-sS", "-k", version, "--max-time", "60")
		}
		args = append(args, "--data-binary", string(body(1, false)), "-H", "Content-Type: application/json", "-w", "\n%{http_code}\n", l.scheme+"://"+l.addr+path)
	}
	out, err := exec.Command("curl", args...).CombinedOutput()
	if err == nil && strings.Count(string(out), "\n200\n") != n {
		err = errors.New("not all were answered with 200")
	}
	if err != nil && l.failed.Add(1) <= 10 {
		l.t.Errorf("curl %s: %v\n%.3000s", version, err, out)
	}
	l.answered.Add(n)
}
