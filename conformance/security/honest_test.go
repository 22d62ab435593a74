package security

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

const chatPath = "/v1/chat/completions"

// chat is the body of a chat request with that prompt.
func chat(prompt string, stream bool) string {
	return fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":3,"stream":%t}`, prompt, stream)
}

// honestPatience is how long an honest client waits for an answer. Alone it gets one
// within milliseconds.
const honestPatience = 20 * time.Second

// honestClient is a client that keeps to the protocol and keeps its connections.
// It is safe for concurrent use.
type honestClient struct {
	http  *http.Client
	url   string
	major int    // 1, 2 or 3
	close func() // its connections
}

// client returns a client of the proxy over HTTP of that major version. It
// connects from the loopback address from.
func (p *proxyProcess) client(major int, from string) *honestClient {
	local := &net.TCPAddr{IP: net.ParseIP(from)}
	conf := &tls.Config{InsecureSkipVerify: true} // the certificate is self-signed
	c := &honestClient{url: "http://" + p.addr, major: major}
	if p.secure {
		c.url = "https://" + p.addr
	}
	if major == 3 {
		t := &http3.Transport{TLSClientConfig: conf, Dial: func(ctx context.Context, addr string, tc *tls.Config, qc *quic.Config) (*quic.Conn, error) {
			return dialQUIC(ctx, from, addr, tc, qc)
		}}
		c.http, c.close = &http.Client{Transport: t}, func() { t.Close() }
		return c
	}
	t := &http.Transport{TLSClientConfig: conf, Protocols: new(http.Protocols), DialContext: (&net.Dialer{LocalAddr: local}).DialContext}
	t.Protocols.SetHTTP1(major == 1)
	t.Protocols.SetHTTP2(major == 2 && p.secure)
	t.Protocols.SetUnencryptedHTTP2(major == 2 && !p.secure)
	c.http, c.close = &http.Client{Transport: t}, t.CloseIdleConnections
	return c
}

// dialQUIC opens a connection from a separate socket, which ends with it.
func dialQUIC(ctx context.Context, from, to string, tc *tls.Config, qc *quic.Config) (*quic.Conn, error) {
	remote, err := net.ResolveUDPAddr("udp", to)
	if err != nil {
		return nil, err
	}
	socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(from)})
	if err != nil {
		return nil, err
	}
	t := &quic.Transport{Conn: socket}
	conn, err := t.Dial(ctx, remote, tc, qc)
	if err != nil {
		t.Close()
		socket.Close()
		return nil, err
	}
	context.AfterFunc(conn.Context(), func() {
		t.Close()
		socket.Close()
	})
	return conn, nil
}

// errStatus is an answer with an error status.
type errStatus struct {
	status int
	body   string
}

func (e *errStatus) Error() string { return fmt.Sprintf("status %d: %.300s", e.status, e.body) }

// post sends a body and returns the whole answer.
func (c *honestClient) post(path, body string, header ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), honestPatience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, "POST", c.url+path, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	r.Header.Set("Content-Type", "application/json")
	for n := 0; n+1 < len(header); n += 2 {
		r.Header.Add(header[n], header[n+1])
	}
	resp, err := c.http.Do(r)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.ProtoMajor != c.major {
		err = fmt.Errorf("protocol %s", resp.Proto)
	}
	if err == nil && resp.StatusCode != 200 {
		err = &errStatus{resp.StatusCode, string(text)}
	}
	return string(text), err
}

// ask sends one chat request and returns nil if it got a whole answer.
func (c *honestClient) ask(prompt string, stream bool) error {
	text, err := c.post(chatPath, chat(prompt, stream))
	if err != nil {
		return err
	}
	if stream && !strings.Contains(text, "data: [DONE]") {
		return fmt.Errorf("the stream has no end: %.300q", text)
	}
	if !strings.Contains(text, `"choices"`) {
		return fmt.Errorf("no answer: %.300q", text)
	}
	return nil
}

// majors returns the major versions of HTTP that the proxy supports.
func (p *proxyProcess) majors() []int {
	if p.secure {
		return []int{1, 2, 3}
	}
	return []int{1, 2}
}

// serves asserts that an honest client is served over every protocol, unary and
// streamed. An answer that asks the client to retry is no failure if a success
// follows within a few seconds.
func (p *proxyProcess) serves(what string) {
	p.t.Helper()
	for _, major := range p.majors() {
		c := p.client(major, "127.0.0.1")
		for _, stream := range []bool{false, true} {
			if err := askAgain(c, stream); err != nil {
				p.t.Errorf("%s: an honest client over HTTP/%d, stream %t: %v", what, major, stream, err)
			}
		}
		c.close()
	}
}

func askAgain(c *honestClient, stream bool) (err error) {
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		err = c.ask("honest", stream)
		if later := new(errStatus); !errors.As(err, &later) || later.status != 429 && later.status != 503 {
			return err
		}
	}
	return err
}

// within runs f in a separate goroutine and returns false if f takes longer than d.
func within(d time.Duration, f func()) bool {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
		return true
	case <-time.After(d):
		return false
	}
}

// TestHonest is the control of all attacks: without a hostile client every
// request is served.
func TestHonest(t *testing.T) {
	t.Parallel()
	for _, secure := range []bool{false, true} {
		e := newFakeEngine(t)
		p := startProxy(t, setup{secure: secure, sections: e.section("both", "vllm-nixl")})
		p.serves("alone")
		p.nothingLeft()
	}
}
