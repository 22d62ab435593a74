package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/internal/loadgen"
	"github.com/pdproxy/pdproxy/internal/plot"
)

// Protocols of a load.
const (
	protoH1    = "h1"     // plain HTTP/1.1, the raw client
	protoH1Std = "h1std"  // plain HTTP/1.1 with the client of the two below
	protoH1TLS = "h1tls"  // HTTP/1.1 over TLS
	protoH3    = "h3"     // HTTP/3
	modeClosed = "closed" // as many requests as answers allow
	modeOpen   = "open"   // requests at a fixed rate, independent of the answers
	modeSSE    = "sse"    // streams that start together, each to its end
	modeHold   = "hold"   // slow streams, held open
)

// load is one measurement: its requests and its target.
type load struct {
	Mode, Proto, Addr string

	Conns     int           // connections, each with one request at a time
	QUICConns int           // connections that carry them with HTTP/3
	Body      int           // bytes of a request's body
	Events    int           // events of an answer, 0: a unary answer
	Period    time.Duration // between two events of a stream, 0: no pause
	Rate      float64       // requests a second over all connections (open)
	For       time.Duration // how long (closed, open, hold)
	PIDs      pidList       // processes of the proxy
	Header    string        // line that every request gets (h1)
}

// closedLoad is a load of as many requests as answers allow.
func closedLoad(conns, body, events int, d time.Duration) load {
	return load{Mode: modeClosed, Proto: protoH1, Conns: conns, QUICConns: 4, Body: body, Events: events, For: d}
}

// openLoad is a load of unary requests of 2 KB, rate of them a second.
func openLoad(rate float64, d time.Duration) load {
	l := closedLoad(32, 2<<10, 0, d)
	l.Mode, l.Rate = modeOpen, rate
	return l
}

// sseLoad is a load of streams at the pace of a fast engine.
func sseLoad(conns, body, events int) load {
	return load{Mode: modeSSE, Proto: protoH1, Conns: conns, QUICConns: 4, Body: body, Events: events, Period: tokenPeriod}
}

// holdLoad is a load of streams that stay open for d.
func holdLoad(conns int, period, d time.Duration) load {
	return load{Mode: modeHold, Proto: protoH1, Conns: conns, QUICConns: 4, Body: 2 << 10, Events: slowEvents, Period: period, For: d}
}

// pidList is a flag of process ids, comma separated.
type pidList []int

func (p *pidList) String() string {
	texts := make([]string, len(*p))
	for i, pid := range *p {
		texts[i] = strconv.Itoa(pid)
	}
	return strings.Join(texts, ",")
}

func (p *pidList) Set(text string) error {
	*p = nil
	for one := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == ',' }) {
		pid, err := strconv.Atoi(one)
		if err != nil {
			return err
		}
		*p = append(*p, pid)
	}
	return nil
}

// args returns the command line of the load.
func (l *load) args() []string {
	return []string{"load", "-mode", l.Mode, "-proto", l.Proto, "-addr", l.Addr,
		"-conns", strconv.Itoa(l.Conns), "-quic-conns", strconv.Itoa(l.QUICConns),
		"-body", strconv.Itoa(l.Body), "-events", strconv.Itoa(l.Events), "-period", l.Period.String(),
		"-rate", strconv.FormatFloat(l.Rate, 'f', -1, 64), "-for", l.For.String(), "-pids", l.PIDs.String(), "-header", l.Header}
}

func parseLoad(args []string) (*load, error) {
	l := &load{}
	fs := flag.NewFlagSet("load", flag.ContinueOnError)
	fs.StringVar(&l.Mode, "mode", modeClosed, "closed, open, sse or hold")
	fs.StringVar(&l.Proto, "proto", protoH1, "h1, h1std, h1tls or h3")
	fs.StringVar(&l.Addr, "addr", "127.0.0.1:9000", "`address` of the proxy")
	fs.IntVar(&l.Conns, "conns", 32, "requests at a time, each on a connection of its own but with h3")
	fs.IntVar(&l.QUICConns, "quic-conns", 4, "connections with h3")
	fs.IntVar(&l.Body, "body", 2048, "`bytes` of a request's body")
	fs.IntVar(&l.Events, "events", 0, "events of an answer; 0: a unary answer")
	fs.DurationVar(&l.Period, "period", 0, "between two events")
	fs.Float64Var(&l.Rate, "rate", 0, "requests a second (open)")
	fs.DurationVar(&l.For, "for", 2*time.Second, "how long (closed, open, hold)")
	fs.StringVar(&l.Header, "header", "", "`line` that every request gets (h1, hold)")
	fs.Var(&l.PIDs, "pids", "processes of the proxy, comma separated; none: no CPU figures")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	return l, l.check()
}

func (l *load) check() error {
	switch {
	case !slices.Contains([]string{modeClosed, modeOpen, modeSSE, modeHold}, l.Mode):
		return fmt.Errorf("-mode: unknown mode %q", l.Mode)
	case !slices.Contains([]string{protoH1, protoH1Std, protoH1TLS, protoH3}, l.Proto):
		return fmt.Errorf("-proto: unknown protocol %q", l.Proto)
	case l.Conns < 1 || l.QUICConns < 1:
		return errors.New("-conns and -quic-conns: at least 1")
	case l.Mode == modeOpen && l.Rate <= 0:
		return errors.New("-rate: needed with -mode open")
	case (l.Mode == modeSSE || l.Mode == modeHold) && l.Events < 1:
		return errors.New("-events: needed with -mode sse and hold")
	case l.Mode == modeHold && l.Proto != protoH1:
		return errors.New("-proto: hold is measured over h1")
	}
	return nil
}

func loadCommand(args []string) error {
	l, err := parseLoad(args)
	if err != nil {
		return err
	}
	r, err := l.run()
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

// result is one line of a load. Values that its mode does not measure are 0.
type result struct {
	Requests   int     `json:"requests"`
	Events     int     `json:"events"`
	Errors     int     `json:"errors"`
	FirstError string  `json:"first_error,omitempty"`
	Seconds    float64 `json:"seconds"`

	CPURequest float64 `json:"cpu_us_per_request"` // user and system time of the proxy
	CPUEvent   float64 `json:"cpu_us_per_event"`
	Core       float64 `json:"core"` // share of one core that the proxy used

	Request loadgen.Spread `json:"request_ms"`     // to the end of the answer
	Event   loadgen.Spread `json:"event_ms"`       // from the backend to the client, without first events
	First   loadgen.Spread `json:"first_event_ms"` // from the request to the first event
	// RequestP999 is the time that one request of a thousand exceeds.
	RequestP999 float64 `json:"request_p999_ms"`

	RSS       float64 `json:"rss_mb"`
	StreamRSS float64 `json:"rss_kb_per_stream"`
	Open      int     `json:"open_streams"`
}

func (l *load) run() (*result, error) {
	if l.Mode == modeHold {
		return l.hold()
	}
	clients, err := l.connect()
	if err != nil {
		return nil, err
	}
	before, err := usageOf(l.PIDs)
	if err != nil {
		return nil, err
	}
	start := time.Now()
	total := l.drive(clients, start)
	seconds := time.Since(start).Seconds()
	after, err := usageOf(l.PIDs)
	if err != nil {
		return nil, err
	}
	for _, c := range clients {
		c.close()
	}
	r := total.result()
	used := after.minus(before)
	cpu := used.CPU.Seconds()
	r.Seconds, r.Core, r.RSS = seconds, cpu/seconds, float64(after.RSS)/(1<<20)
	r.CPURequest = per(cpu*1e6, r.Requests)
	r.CPUEvent = per(cpu*1e6, r.Events)
	return r, nil
}

func per(x float64, n int) float64 {
	if n == 0 {
		return 0
	}
	return x / float64(n)
}

func (l *load) connect() ([]client, error) {
	body := requestBody(l.Body, l.Events, l.Period)
	clients := make([]client, l.Conns)
	if l.Proto == protoH1 {
		for i := range clients {
			c, err := dialRaw(l.Addr, l.Header, body, 8<<10)
			if err != nil {
				return nil, err
			}
			clients[i] = c
		}
		return clients, nil
	}
	scheme := "https://"
	if l.Proto == protoH1Std {
		scheme = "http://"
	}
	transports := newTransports(l.Proto, l.Conns, l.QUICConns)
	for i := range clients {
		c := &stdClient{transport: transports[i%len(transports)], base: scheme + l.Addr, body: body}
		if err := c.connect(); err != nil {
			return nil, fmt.Errorf("connect: %w", err)
		}
		clients[i] = c
	}
	return clients, nil
}

// drive runs one worker for each client and waits for all of them.
func (l *load) drive(clients []client, start time.Time) *tally {
	tallies := make([]tally, len(clients))
	var wg sync.WaitGroup
	for i, c := range clients {
		w := &worker{load: l, client: c, tally: &tallies[i]}
		wg.Go(func() {
			switch l.Mode {
			case modeClosed:
				w.closed(start.Add(l.For))
			case modeOpen:
				gap := time.Duration(float64(len(clients)) / l.Rate * float64(time.Second))
				w.open(start.Add(gap*time.Duration(i)/time.Duration(len(clients))), gap, start.Add(l.For))
			case modeSSE:
				w.request(time.Now())
			}
		})
	}
	wg.Wait()
	total := &tally{}
	for i := range tallies {
		total.add(&tallies[i])
	}
	return total
}

// A worker makes the requests of one client. It stops at the first error,
// because the rest would not be the requested load.
type worker struct {
	load   *load
	client client
	tally  *tally
	lines  [4 << 10]byte
}

func (w *worker) closed(end time.Time) {
	for now := time.Now(); now.Before(end); now = time.Now() {
		if !w.request(now) {
			return
		}
	}
}

// open sends a request every gap. If the previous answer was late, the time of
// the request counts from its due time. The lateness of this program's own
// timers does not count.
func (w *worker) open(due time.Time, gap time.Duration, end time.Time) {
	for ; due.Before(end); due = due.Add(gap) {
		from := due
		if wait := time.Until(due); wait > 0 {
			time.Sleep(wait)
			from = time.Now()
		}
		if !w.request(from) {
			return
		}
	}
}

func (w *worker) request(from time.Time) bool {
	body, err := w.client.call()
	if err == nil && w.load.Events == 0 {
		_, err = io.Copy(io.Discard, body)
	} else if err == nil {
		err = w.stream(body, from)
	}
	if err != nil {
		w.tally.fail(err)
		return false
	}
	w.tally.requests = append(w.tally.requests, millis(time.Since(from)))
	return true
}

// stream reads a whole SSE answer and checks that it is complete.
func (w *worker) stream(body io.Reader, from time.Time) error {
	events := 0
	err := loadgen.ReadEvents(body, w.lines[:], func(data []byte) (bool, error) {
		now := time.Now()
		if age, ok := readStamp(data, now); ok {
			if events++; events == 1 {
				w.tally.first = append(w.tally.first, millis(now.Sub(from)))
			} else {
				w.tally.events = append(w.tally.events, millis(age))
			}
		}
		return false, nil
	})
	if err != nil || events != w.load.Events {
		return fmt.Errorf("stream with %d of %d events: %w", events, w.load.Events, cmp.Or(err, errEvents))
	}
	_, err = io.Copy(io.Discard, body) // the end of the message
	return err
}

var errEvents = errors.New("the number of events is wrong")

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// tally sums up the results of workers.
type tally struct {
	requests, events, first []float64 // ms
	errors                  int
	firstError              error
}

func (t *tally) fail(err error) {
	if t.errors++; t.firstError == nil {
		t.firstError = err
	}
}

func (t *tally) add(o *tally) {
	t.requests = append(t.requests, o.requests...)
	t.events = append(t.events, o.events...)
	t.first = append(t.first, o.first...)
	t.errors += o.errors
	if t.firstError == nil {
		t.firstError = o.firstError
	}
}

func (t *tally) result() *result {
	r := &result{Requests: len(t.requests), Events: len(t.events) + len(t.first), Errors: t.errors}
	if t.firstError != nil {
		r.FirstError = t.firstError.Error()
	}
	r.Request, r.Event, r.First = loadgen.NewSpread(t.requests), loadgen.NewSpread(t.events), loadgen.NewSpread(t.first)
	if len(t.requests) > 0 {
		r.RequestP999 = plot.Quantile(t.requests, 0.999) // sorted by NewSpread
	}
	return r
}
