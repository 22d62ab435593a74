package downstream

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

const (
	// rateGrace is how long a body may wait for its client before server.min_body_rate
	// applies.
	rateGrace = 5 * time.Second
	// unreadWait is how long the proxy waits for each further byte of a body whose
	// request was answered before the body's end, and unreadTime how long for all of
	// them; after unreadWait the body must come at fairRate. If the connection were
	// closed with unread bytes, it would be reset, and a client that sends all before it
	// reads would lose the answer.
	unreadWait = time.Second
	unreadTime = 30 * time.Second
	// fairRate is the rate in bytes per second for comparing bodies when one of them has
	// to make room. A body is behind by the time that it has taken, minus the time that
	// its bytes take at this rate.
	fairRate = 64 << 10
)

// incoming is the body of a client's request, which the exchange or a filter reads. It
// is also the context of the request, so that the exchange finds it. One goroutine at a
// time reads it, which may be another than that of the handler.
type incoming struct {
	context.Context
	io.ReadCloser // the body of net/http
	config        func() *config.Config
	clientOf      func(*http.Request) string
	readers       *readers // nil: the deadline is the body's only limit
	rc            http.ResponseController
	from, to      *http.Request // the request of net/http; the request of the handlers
	answer        http.Header   // of the answer, if only the handler's goroutine reads the body; else nil
	ended         atomic.Bool   // the end of the body has been read
	broken        atomic.Bool   // a deadline has ended a read; see mustClose
	got           atomic.Int64  // bytes
	since         atomic.Int64  // start of the running read in Unix nanoseconds; 0: no read runs
	waited        atomic.Int64  // nanoseconds in earlier reads
	due           int64         // guarded by the readers' mu; when a body at fairRate would have begun, in nanoseconds
	all, own      int           // guarded by the readers' mu; places in the heaps

	mu     sync.Mutex
	client string       // for limits; guarded by mu until the first read, constant from then on
	begun  bool         // guarded by mu; the first read has begun
	over   bool         // guarded by mu; deadlines of the connection no longer belong to the body
	why    *stoppedBody // guarded by mu; nil: the body was not stopped
}

type incomingKey struct{}

// Value implements context.Context.
func (b *incoming) Value(key any) any {
	if key == (incomingKey{}) {
		return b
	}
	return b.Context.Value(key)
}

// incomingOf returns the body of the request with that context, nil for none.
func incomingOf(ctx context.Context) *incoming {
	b, _ := ctx.Value(incomingKey{}).(*incoming)
	return b
}

// Read implements io.Reader. The error of a body that was stopped is a *stoppedBody.
func (b *incoming) Read(p []byte) (int, error) {
	now := time.Now()
	if b.begin() && b.readers != nil {
		b.readers.enter(b, now, b.config())
	}
	b.since.Store(now.UnixNano())
	if err := b.stopped(); err != nil {
		b.leave()
		return 0, err
	}
	n, err := b.ReadCloser.Read(p)
	b.got.Add(int64(n))
	if err == nil {
		b.since.Store(0) // first: this read must not count twice
		b.waited.Add(int64(time.Since(now)))
		return n, nil
	}
	b.leave()
	why := b.stopped()
	if why != nil || errors.Is(err, os.ErrDeadlineExceeded) {
		b.broken.Store(true)
		if b.answer != nil && b.mustClose() {
			b.answer.Set("Connection", "close")
		}
	}
	if err == io.EOF {
		b.ended.Store(true)
		if t := b.from.Trailer; t != nil && b.to.Trailer == nil { // else the two requests share the map
			b.to.Trailer = t
		}
		if b.readers == nil {
			b.rc.SetReadDeadline(time.Time{}) // else the request's context ends with the deadline
		}
	}
	if why != nil { // also at the end of the body, because the deadline may end the request's context
		err = why
	}
	return n, err
}

// mustClose reports whether the connection cannot serve another request. When a deadline
// ends a read of an HTTP/1.1 connection, net/http cancels the contexts of this request
// and of all later requests of the connection.
func (b *incoming) mustClose() bool { return b.from.ProtoMajor == 1 && b.broken.Load() }

// begin reports whether the read is the first one.
func (b *incoming) begin() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.begun {
		return false
	}
	b.begun = true
	if b.client == "" {
		b.client = b.clientOf(b.from)
	}
	return true
}

// countFor makes the body count for a client, unless a filter has begun to read it.
func (b *incoming) countFor(client string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.begun {
		b.client = client
	}
}

func (b *incoming) stopped() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.why == nil {
		return nil
	}
	return b.why
}

// stop ends the reading of the body for a reason. Safe for concurrent use.
func (b *incoming) stop(why *openai.Error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.over || b.why != nil {
		return
	}
	b.why = &stoppedBody{why}
	b.rc.SetReadDeadline(time.Unix(1, 0))
}

// limit sets the deadline of the whole body.
func (b *incoming) limit(by time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.why != nil {
		by = time.Unix(1, 0)
	}
	b.rc.SetReadDeadline(by)
}

// leave takes the body out of the limits.
func (b *incoming) leave() {
	if b.readers != nil {
		b.readers.leave(b)
	}
	b.mu.Lock()
	b.over = true
	b.mu.Unlock()
}

// discard reads the rest of a body whose request has been answered. If the rest does not
// come, discard closes an HTTP/1.1 connection: the rest must not be read as another request.
// discard also closes a connection that cannot serve another request.
// Over HTTP/2 the server then resets the stream with NO_ERROR, which tells the client to stop.
// Some clients lose the answer with this reset (curl 7.88, httpx 0.28), so it comes only if
// the rest does not. Over HTTP/3 the protocol tells the client to stop.
func (b *incoming) discard() {
	http1 := b.from.ProtoMajor == 1
	if b.from.ProtoMajor > 2 || b.ended.Load() {
		return
	}
	if b.from.Header.Get("Expect") != "" && b.begin() { // the client may wait for 100 Continue
		if http1 {
			b.rc.SetReadDeadline(time.Now()) // net/http then closes the connection
		}
		return
	}
	complete := b.rc.Flush() == nil && b.readRest()
	if http1 && (!complete || b.mustClose()) {
		panic(http.ErrAbortHandler) // the answer has been sent
	}
}

// readRest reads and drops the rest of the body, and reports whether the body was complete.
func (b *incoming) readRest() bool {
	piece := buffer.Get(buffer.FirstRead)
	defer piece.Free()
	begin, got := time.Now(), 0
	for {
		now := time.Now()
		fair := begin.Add(unreadWait + time.Duration(got)*time.Second/fairRate)
		if now.After(fair) || now.After(begin.Add(unreadTime)) {
			return false
		}
		b.rc.SetReadDeadline(now.Add(unreadWait))
		n, err := b.ReadCloser.Read(piece.B[:cap(piece.B)])
		if err != nil {
			return err == io.EOF
		}
		got += n
	}
}

// waiting returns how long the reader has waited for the body. Time in which a filter
// does not read does not count.
func (b *incoming) waiting(now int64) time.Duration {
	d := b.waited.Load()
	if since := b.since.Load(); since > 0 {
		d += max(0, now-since)
	}
	return time.Duration(d)
}

// tooSlow returns why the limits of cfg stop the body, nil if they do not.
func (b *incoming) tooSlow(now int64, cfg *config.Config) *openai.Error {
	waiting := b.waiting(now)
	if t := time.Duration(cfg.Server.ReadTimeout); t > 0 && waiting > t {
		return errBodyTimeout
	}
	rate := float64(cfg.Server.MinBodyRate)
	if float64(b.got.Load()) < rate*(waiting-rateGrace).Seconds() {
		return errBodySlow
	}
	return nil
}
