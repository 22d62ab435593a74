//go:build linux

package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"time"
)

const (
	prompts = 4
	// giveUp is the time after which a client without an answer stops waiting.
	giveUp = 100 * time.Second
	// pause is the longest time between two requests of a client.
	pause = 700 * time.Millisecond
	// watchEvery is the interval of measurements of the machine's load.
	watchEvery = 100 * time.Millisecond
)

// body returns a request. The last prompt has a long answer, so that there are
// always streams that cannot begin anew.
func body(prompt int, stream bool) []byte {
	tokens := 2 + 8*prompt
	if prompt == prompts-1 {
		tokens = 150
	}
	return fmt.Appendf(nil, `{"model":"sim","prompt":%q,"max_tokens":%d,"ignore_eos":true,"stream":%t}`,
		fmt.Sprintf("prompt %d ", prompt)+strings.Repeat("this text is repeated many times. ", 1+3*prompt), tokens, stream)
}

// client sends requests to one host, one after the other.
type client struct {
	p      *proxy
	h2     bool
	stream bool
	fresh  bool // each request has a separate connection
	http   *http.Client
}

func (c *client) String() string {
	kind := "H1"
	if c.h2 {
		kind = "h2c"
	}
	if c.fresh {
		kind += ", new connection"
	}
	if c.stream {
		kind += ", stream"
	}
	return kind + ", host " + c.p.host.name
}

// outcome is the result of one request.
type outcome struct {
	c               *client
	prompt          int
	began, ended    time.Time
	reused          bool // its connection was older than the request
	prefill, decode string
	err             error // nil: the right answer
	broke           bool  // its connection broke
	again           time.Duration
	againErr        error // of the second request after a break
}

func (o *outcome) took() time.Duration { return o.ended.Sub(o.began) }

func (o *outcome) String() string {
	return fmt.Sprintf("%s, prompt %d, from %s for %v, engines %s %s, reused %t: %v", o.c, o.prompt, o.began.Format("15:04:05.000"), o.took().Round(time.Millisecond), o.prefill, o.decode, o.reused, o.err)
}

// stall is the delay by the machine itself: the time of a request of one token
// to the engine without a proxy.
type stall struct{ began, ended time.Time }

// load holds clients that send requests from start to stop.
type load struct {
	want    []string // the text of each prompt
	clients []*client
	alone   *client // of the engine that is asked alone

	mu       sync.Mutex
	outcomes []*outcome
	stalls   []stall
	quit     chan struct{}
	wg       sync.WaitGroup
}

func newLoad(w *world) *load {
	w.t.Helper()
	l := &load{alone: &client{p: &proxy{process: w.alone}, http: newClient(false, false)}}
	w.t.Cleanup(l.alone.http.CloseIdleConnections)
	for p := range prompts {
		text, err := l.alone.ask(p, false, &outcome{})
		if err != nil || text == "" {
			w.t.Fatalf("answer of the lone engine %q: %v", text, err)
		}
		l.want = append(l.want, text)
	}
	for _, p := range w.proxies {
		for _, kind := range []struct{ h2, stream, fresh bool }{
			{false, false, false}, {false, true, false}, {true, false, false}, {true, true, false}, {false, false, true}, {false, true, true},
		} {
			c := &client{p: p, h2: kind.h2, stream: kind.stream, fresh: kind.fresh}
			c.http = newClient(kind.h2, kind.fresh)
			l.clients = append(l.clients, c)
			w.t.Cleanup(c.http.CloseIdleConnections)
		}
	}
	return l
}

func newClient(h2, fresh bool) *http.Client {
	var p http.Protocols
	p.SetHTTP1(!h2)
	p.SetUnencryptedHTTP2(h2)
	return &http.Client{Transport: &http.Transport{Protocols: &p, DisableKeepAlives: fresh}}
}

// start makes all clients send requests.
func (l *load) start() {
	l.quit = make(chan struct{})
	l.wg.Go(l.watch)
	for _, c := range l.clients {
		l.wg.Go(func() {
			for {
				select {
				case <-l.quit:
					return
				case <-time.After(rand.N(pause)):
				}
				o := l.one(c)
				l.mu.Lock()
				l.outcomes = append(l.outcomes, o)
				l.mu.Unlock()
			}
		})
	}
}

// stop waits for the running requests and returns the results of all requests,
// and the load of the machine.
func (l *load) stop() ([]*outcome, []stall) {
	close(l.quit)
	l.wg.Wait()
	all, stalls := l.outcomes, l.stalls
	l.outcomes, l.stalls = nil, nil
	return all, stalls
}

// watch sends requests to the engine without a proxy.
func (l *load) watch() {
	for {
		select {
		case <-l.quit:
			return
		case <-time.After(watchEvery):
		}
		s := stall{began: time.Now()}
		_, _ = l.alone.ask(0, false, &outcome{}) // only its duration matters
		s.ended = time.Now()
		l.stalls = append(l.stalls, s) // read when this has ended
	}
}

// stalled returns the longest stall during a request.
func stalled(o *outcome, stalls []stall) (longest time.Duration) {
	for _, s := range stalls {
		if s.ended.After(o.began) && s.began.Before(o.ended) {
			longest = max(longest, s.ended.Sub(s.began))
		}
	}
	return longest
}

// one sends a request, and a second one over a new connection if the first one
// broke.
func (l *load) one(c *client) *outcome {
	o := &outcome{c: c, prompt: rand.IntN(prompts), began: time.Now()}
	text, err := c.ask(o.prompt, c.stream, o)
	o.ended = time.Now()
	if err == nil && text != l.want[o.prompt] {
		err = fmt.Errorf("the text is %q, not %q", text, l.want[o.prompt])
	}
	if o.err = err; !o.broke {
		return o
	}
	second := &client{p: c.p, http: newClient(c.h2, true)}
	defer second.http.CloseIdleConnections()
	text, o.againErr = second.ask(o.prompt, c.stream, &outcome{})
	o.again = time.Since(o.ended)
	if o.againErr == nil && text != l.want[o.prompt] {
		o.againErr = fmt.Errorf("the text is %q, not %q", text, l.want[o.prompt])
	}
	return o
}

// ask sends a request and reads its answer. The HTTP/1.1 client cannot send a
// body twice here, so there is no hidden retry.
func (c *client) ask(prompt int, stream bool, o *outcome) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), giveUp)
	defer cancel()
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) { o.reused = i.Reused }})
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.p.url+"/v1/completions", bytes.NewReader(body(prompt, stream)))
	if err != nil {
		return "", err
	}
	r.Header.Set("Content-Type", "application/json")
	if !c.h2 {
		r.GetBody = nil
	}
	resp, err := c.http.Do(r)
	if err != nil {
		o.broke = ctx.Err() == nil
		return "", err
	}
	defer resp.Body.Close()
	o.prefill, o.decode = resp.Header.Get("X-Pdproxy-Prefill"), resp.Header.Get("X-Pdproxy-Decode")
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		o.broke = ctx.Err() == nil
		return "", fmt.Errorf("after %d bytes: %w", len(b), err)
	}
	if resp.StatusCode != http.StatusOK {
		return "", errStatus{resp.StatusCode, string(b)}
	}
	if !stream {
		return text(b)
	}
	var all strings.Builder
	for line := range strings.Lines(string(b)) {
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if data == "[DONE]" {
			return all.String(), nil
		}
		if !ok {
			continue
		}
		piece, err := text([]byte(data))
		if err != nil {
			return "", err
		}
		all.WriteString(piece)
	}
	return "", errors.New("the stream has no end")
}

// errStatus is an answer with a wrong status.
type errStatus struct {
	code int
	body string
}

func (e errStatus) Error() string { return fmt.Sprintf("status %d: %s", e.code, e.body) }

// errEvent is an error event in a stream.
type errEvent string

func (e errEvent) Error() string { return "an error event: " + string(e) }

// text returns the text of an answer or of an event.
func text(b []byte) (string, error) {
	var c struct {
		Choices []struct{ Text string }
		Error   json.RawMessage
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return "", fmt.Errorf("%q: %w", b, err)
	}
	if c.Error != nil {
		return "", errEvent(c.Error)
	}
	var all strings.Builder
	for _, choice := range c.Choices {
		all.WriteString(choice.Text)
	}
	return all.String(), nil
}
