package conformance

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// breakage is one failure of a stream: behind a number of events, in a way.
type breakage struct {
	after int
	how   string // one of the constants below
}

const (
	cutOff    = "cut off"           // the connection breaks
	midEvent  = "cut in an event"   // the connection breaks inside the next event
	stalls    = "hangs"             // nothing comes any more
	noClosing = "ends early"        // the answer ends without its closing event
	anError   = "an error event"    // of the engine
	aborted   = "abort as a reason" // the finish reason
)

var breakages = []string{cutOff, midEvent, stalls, noClosing, anError, aborted}

// breaker stands before the engines of a fleet and breaks their streams.
type breaker struct {
	t    *testing.T
	mu   sync.Mutex
	next []breakage          // of the next streams; guarded by mu
	keys map[string]breakage // of the first streams of requests with a line breakKey; guarded by mu
	// change changes an event of an engine's stream, the number of which counts from 0, or answers a
	// request for a path in the engine's place; guarded by mu. nil: not.
	change  func(n int, event string) string
	answer  func(w http.ResponseWriter, r *http.Request) bool
	random  *rand.Rand // draws the failures of two thirds of the streams; guarded by mu; nil: none
	streams int        // begun; guarded by mu
	served  int        // the engine of the last stream, in the order of before; guarded by mu
	servers int
	names   []string       // of the engines, in that order
	frozen  [4]atomic.Bool // engines, in the order of before, that answer nothing
	pause   time.Duration  // between the last event of a stream and the end of its connection
}

// alone makes each connection serve one request, so that none is left at the end.
var alone = &http.Transport{DisableKeepAlives: true}

// plan sets the failures of the next streams.
func (b *breaker) plan(list ...breakage) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.next, b.streams = list, 0
}

// breakKey is the header line of a request for whose first stream planFor has set a failure.
const breakKey = "X-Break"

// planFor sets the failure of the first stream with a key.
func (b *breaker) planFor(key string, fails breakage) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.keys[key] = fails
}

// planned reports whether the stream with a key is still to come.
func (b *breaker) planned(key string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, ok := b.keys[key]
	return ok
}

// before returns the URL at which the engine of spec is reached through the breaker.
func (b *breaker) before(spec *config.Engine) {
	to, n := spec.URL, b.servers
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { b.serve(w, r, to, n) }))
	b.t.Cleanup(s.Close)
	b.servers++
	b.names = append(b.names, spec.Name)
	spec.URL = s.URL
}

func (b *breaker) serve(w http.ResponseWriter, r *http.Request, to string, n int) {
	body, err := io.ReadAll(r.Body) // only then the end of the connection ends the request's context
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	frozen := &b.frozen[n]
	await(r, frozen)
	b.mu.Lock()
	answer := b.answer
	b.mu.Unlock()
	if answer != nil && answer(w, r) {
		return
	}
	req, err := http.NewRequestWithContext(r.Context(), r.Method, to+r.URL.String(), r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	req.Header, req.ContentLength = r.Header.Clone(), r.ContentLength
	resp, err := alone.RoundTrip(req)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer resp.Body.Close()
	for k, v := range resp.Header {
		w.Header()[k] = v
	}
	w.WriteHeader(resp.StatusCode)
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		io.Copy(w, resp.Body)
		return
	}
	b.mu.Lock()
	fails := breakage{after: -1}
	if b.random != nil && b.random.IntN(3) > 0 {
		fails = breakage{b.random.IntN(30), breakages[b.random.IntN(len(breakages))]}
	}
	if len(b.next) > 0 {
		fails, b.next = b.next[0], b.next[1:]
	}
	if planned, ok := b.keys[r.Header.Get(breakKey)]; ok {
		fails = planned
		delete(b.keys, r.Header.Get(breakKey))
	}
	b.streams++
	b.served = n
	change := b.change
	b.mu.Unlock()
	b.relay(w, r, resp.Body, fails, change, frozen)
}

// await waits while an engine is frozen, at most until the proxy closes the connection.
func await(r *http.Request, frozen *atomic.Bool) {
	for frozen.Load() && r.Context().Err() == nil {
		time.Sleep(time.Millisecond)
	}
}

func (b *breaker) relay(w http.ResponseWriter, r *http.Request, events io.Reader, fails breakage, change func(int, string) string, frozen *atomic.Bool) {
	rc := http.NewResponseController(w)
	rc.Flush() // a connection that ends without a byte of the answer makes the proxy send the leg again
	lines := bufio.NewReader(events)
	event, n := "", 0
	for {
		if n == fails.after && event == "" {
			switch fails.how {
			case cutOff:
				time.Sleep(b.pause)
				panic(http.ErrAbortHandler)
			case stalls:
				<-r.Context().Done()
				return
			case noClosing:
				return
			case anError:
				fmt.Fprint(w, "data: {\"error\":{\"message\":\"no\",\"type\":\"InternalServerError\",\"code\":500}}\n\ndata: [DONE]\n\n")
				return
			case aborted:
				fmt.Fprint(w, "data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\ndata: [DONE]\n\n")
				return
			}
		}
		line, err := lines.ReadString('\n')
		if err != nil {
			return
		}
		if event += line; line != "\n" {
			continue
		}
		if n == fails.after { // inside it
			io.WriteString(w, event[:len(event)/2])
			rc.Flush()
			time.Sleep(b.pause)
			panic(http.ErrAbortHandler)
		}
		if change != nil {
			event = change(n, event)
		}
		await(r, frozen)
		io.WriteString(w, event)
		rc.Flush()
		event = ""
		n++
	}
}

// startBroken starts a fleet whose engines are behind a breaker, and whose streams are continued.
// Without a pair, the engines are of role both.
func startBroken(t *testing.T, connector string, pair bool, o fleetOptions) (*fleet, *breaker) {
	t.Helper()
	b := &breaker{t: t, keys: map[string]breakage{}}
	change := o.config
	o.config = func(c *config.Config) {
		c.Retry.Continue = config.ContinueOn
		c.Retry.MinBudget = 1 << 20
		c.Circuit.Failures = 1 << 20
		for i := range c.Engines {
			b.before(&c.Engines[i])
		}
		if change != nil {
			change(c)
		}
	}
	if pair {
		f := startFleet(t, connector, o)
		f.base.goroutines, f.base.descriptors = f.base.goroutines+b.servers, f.base.descriptors+b.servers
		return f, b
	}
	f := &fleet{t: t, connector: connector, base: measure()}
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Health.Interval, cfg.Health.Timeout = config.Duration(100*time.Millisecond), config.Duration(2*time.Second)
	cfg.Server.ExposePlacement = true
	for n := range 2 {
		c := enginesim.Config{Connector: connector, Role: enginesim.RoleBoth}
		if o.engine != nil {
			o.engine(enginesim.RoleBoth, n, &c)
		}
		e := startEngine(t, c)
		f.decode = append(f.decode, e)
		cfg.Engines = append(cfg.Engines, engineSpec(fmt.Sprintf("e%d", n), enginesim.RoleBoth, connector, e))
	}
	f.alone = startEngine(t, enginesim.Config{Connector: connector, Role: enginesim.RoleBoth})
	o.config(&cfg)
	f.base.goroutines, f.base.descriptors = f.base.goroutines+b.servers, f.base.descriptors+b.servers
	f.startNode(&cfg, o.log)
	f.waitReady()
	return f, b
}
