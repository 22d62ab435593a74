package clients

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

// h3Client is quic-go's client. Its requests end with the test.
type h3Client struct {
	*front
	transport *http3.Transport
}

func newH3(t *testing.T, f *front, roots *x509.CertPool, certs []tls.Certificate) *h3Client {
	c := &h3Client{front: f, transport: &http3.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: certs}}}
	t.Cleanup(func() { c.transport.Close() })
	return c
}

func (c *h3Client) do(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, c.URL+path, body)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := c.transport.RoundTrip(r)
	if err == nil && resp.ProtoMajor != 3 {
		err = fmt.Errorf("protocol %s", resp.Proto)
	}
	return resp, err
}

// chat requests a chat answer and returns its text. It calls each after every
// event of a stream.
func (c *h3Client) chat(ctx context.Context, maxTokens int, stream bool, each func(int)) (string, error) {
	resp, err := c.do(ctx, "POST", chatPath, strings.NewReader(chatBody(maxTokens, stream)))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 {
		body, _ := io.ReadAll(resp.Body)
		return "", fmt.Errorf("status %d: %.300s", resp.StatusCode, body)
	}
	if stream {
		return streamText(resp.Body, each)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	return chatText(body)
}

func ignore(int) {}

func TestHTTP3(t *testing.T) {
	fleet := startFleet(t, "vllm-nixl")
	ca := newAuthority(t, "ca")
	cert := ca.issue(t, "server")
	f := startProxy(t, fleet, setup{
		server: "read_timeout = \"1s\"", http3: true,
		tls: fmt.Sprintf("cert = %q\nkey = %q", cert.certFile, cert.key),
	})
	c := newH3(t, f, ca.pool(), nil)
	t.Run("unary", c.unary)
	t.Run("stream", c.stream)
	t.Run("parallel streams", c.parallel)
	t.Run("large body", c.largeBody)
	t.Run("errors", c.errors)
	t.Run("slow body", c.slowBody)
	t.Run("cancelled stream", c.cancelStream)
	t.Run("cancelled before the answer", c.cancelEarly)
	t.Run("closed connection", func(t *testing.T) { closeConnection(t, f, ca.pool()) })
	t.Run("no 0-RTT", func(t *testing.T) { noEarlyData(t, f, ca.pool()) })
	t.Run("nothing left", f.waitIdle)
	t.Run("drain", func(t *testing.T) {
		own := startProxy(t, fleet, setup{http3: true, tls: fmt.Sprintf("cert = %q\nkey = %q", cert.certFile, cert.key)})
		drain(t, own, newH3(t, own, ca.pool(), nil))
	})
}

func (c *h3Client) unary(t *testing.T) {
	text, err := c.chat(t.Context(), 12, false, nil)
	if want := c.aloneText(t, 12); err != nil || text != want {
		t.Errorf("got text %q, want %q as from one engine alone; error %v", text, want, err)
	}
}

func (c *h3Client) stream(t *testing.T) {
	events := 0
	text, err := c.chat(t.Context(), 12, true, func(n int) { events = n })
	if want := c.aloneText(t, 12); err != nil || text != want || events != 12 {
		t.Errorf("%d events, text %q, want %q as from one engine alone, error %v", events, text, want, err)
	}
}

// parallel opens 20 streams on one connection. The engines' state shows that
// all run at once.
func (c *h3Client) parallel(t *testing.T) {
	const streams = 20
	want := c.aloneText(t, 100)
	var wg sync.WaitGroup
	begun := make(chan struct{}, streams)
	for range streams {
		wg.Go(func() {
			text, err := c.chat(t.Context(), 100, true, func(n int) {
				if n == 1 {
					begun <- struct{}{}
				}
			})
			if err != nil || text != want {
				t.Errorf("got text %q, want %q as from one engine alone, error %v", text, want, err)
			}
		})
	}
	for range streams {
		<-begun
	}
	if n := c.engines(t).Running; n < 2 {
		t.Errorf("%d of %d streams run at once", n, streams)
	}
	wg.Wait()
	c.waitIdle(t)
}

// largeBody sends a body larger than QUIC's first flow-control windows.
func (c *h3Client) largeBody(t *testing.T) {
	body := fmt.Sprintf(`{"model":"sim","max_tokens":2,"messages":[],"prompt":"the sea","user":%q}`, strings.Repeat("u", 4<<20))
	resp, err := c.do(t.Context(), "POST", "/v1/completions", strings.NewReader(strings.Replace(body, `"messages":[],`, "", 1)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 {
		t.Errorf("got status %d, error %v: %.300s", resp.StatusCode, err, text)
	}
}

func (c *h3Client) errors(t *testing.T) {
	for _, tt := range []struct {
		name, method, path, body string
		status                   int
		code                     string
	}{
		{"unknown model", "POST", chatPath, strings.Replace(chatBody(2, true), "sim", "nobody", 1), 404, "model_not_found"},
		{"not JSON", "POST", chatPath, `{"model":`, 400, "invalid_json"},
		{"no such endpoint", "POST", "/nothing", "{}", 404, "not_found"},
		{"wrong method", "GET", chatPath, "", 405, "method_not_allowed"},
		{"too large", "POST", chatPath, strings.Repeat(" ", 17<<20), 413, "body_too_large"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			resp, err := c.do(t.Context(), tt.method, tt.path, strings.NewReader(tt.body))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != tt.status || !strings.Contains(string(body), `"code":"`+tt.code+`"`) {
				t.Errorf("got status %d, want %d, error %v: %s", resp.StatusCode, tt.status, err, body)
			}
		})
	}
}

// slowBody never sends the end of the body: its stream ends, and others continue.
func (c *h3Client) slowBody(t *testing.T) {
	body, hold := io.Pipe()
	defer hold.Close()
	go io.WriteString(hold, `{"model":"sim",`)
	resp, err := c.do(t.Context(), "POST", chatPath, body)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != 408 {
		t.Errorf("got status %d, want 408", resp.StatusCode)
	}
	c.waitIdle(t)
}

// cancelStream ends the request's context in the middle of a stream: the
// exchange is cancelled, and the connection remains usable.
func (c *h3Client) cancelStream(t *testing.T) {
	before := c.metric(t, "pdproxy_exchanges_total", `outcome="cancelled"`)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err := c.chat(ctx, 2000, true, func(n int) {
		if n == 5 {
			if running := c.engines(t).Running; running != 1 {
				t.Errorf("got %d running sequences during one stream", running)
			}
			cancel()
		}
	})
	if err == nil {
		t.Error("the stream ended like a complete one")
	}
	c.waitIdle(t)
	if n := c.metric(t, "pdproxy_exchanges_total", `outcome="cancelled"`) - before; n != 1 {
		t.Errorf("got %v exchanges counted as cancelled, want 1", n)
	}
	c.unary(t)
}

// cancelEarly cancels before the head of the answer arrives.
func (c *h3Client) cancelEarly(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := c.chat(ctx, 2000, false, nil)
		done <- err
	}()
	c.waitBusy(t, 1)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got error %v", err)
	}
	c.waitIdle(t)
}

// closeConnection closes the QUIC connection under three streams.
func closeConnection(t *testing.T, f *front, roots *x509.CertPool) {
	c := newH3(t, f, roots, nil)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if _, err := c.chat(t.Context(), 2000, true, ignore); err == nil {
				t.Error("the stream ended like a complete one")
			}
		})
	}
	c.waitBusy(t, 3)
	c.transport.Close()
	wg.Wait()
	f.waitIdle(t)
}

// sessions records when a session ticket arrives.
type sessions struct {
	tls.ClientSessionCache
	put chan struct{}
}

func (s sessions) Put(key string, state *tls.ClientSessionState) {
	s.ClientSessionCache.Put(key, state)
	select {
	case s.put <- struct{}{}:
	default:
	}
}

// noEarlyData resumes a session and offers data before the handshake is done.
// The proxy must not accept it, because a replayed POST would generate twice.
func noEarlyData(t *testing.T, f *front, roots *x509.CertPool) {
	cache := sessions{tls.NewLRUClientSessionCache(4), make(chan struct{}, 1)}
	conf := &tls.Config{RootCAs: roots, NextProtos: []string{http3.NextProtoH3}, ClientSessionCache: cache}
	first, err := quic.DialAddr(t.Context(), f.addr(), conf, nil)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-cache.put:
	case <-first.Context().Done():
		t.Fatal("no session ticket: ", context.Cause(first.Context()))
	}
	first.CloseWithError(0, "")

	second, err := quic.DialAddrEarly(t.Context(), f.addr(), conf, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer second.CloseWithError(0, "")
	select {
	case <-second.HandshakeComplete():
	case <-second.Context().Done():
		t.Fatal(context.Cause(second.Context()))
	}
	state := second.ConnectionState()
	if !state.TLS.DidResume || state.Used0RTT {
		t.Errorf("resumed %v, 0-RTT used %v; want true, false", state.TLS.DidResume, state.Used0RTT)
	}
}

// http3ClientCertificates checks over QUIC which clients are accepted.
func http3ClientCertificates(t *testing.T, f *front, ours *authority, member, stranger issued) {
	for _, tt := range []struct {
		name  string
		certs []tls.Certificate
		ok    bool
	}{
		{"none", nil, false},
		{"of another authority", stranger.load(t), false},
		{"ours", member.load(t), true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := newH3(t, f, ours.pool(), tt.certs).chat(t.Context(), 2, false, nil)
			if (err == nil) != tt.ok {
				t.Errorf("got error %v", err)
			}
		})
	}
}

// drain stops the proxy in the middle of a stream: the stream completes, and the process
// ends without a further signal.
func drain(t *testing.T, f *front, c *h3Client) {
	want := c.aloneText(t, 100)
	text, err := c.chat(t.Context(), 100, true, func(n int) {
		if n == 3 {
			f.terminate()
		}
	})
	if err != nil || text != want {
		t.Errorf("got text %q, want %q as from one engine alone, error %v", text, want, err)
	}
}
