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

	"github.com/klauspost/compress/zstd"
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

// Bodies limits the request bodies that one server reads at a time, and the memory that
// it holds for them. Safe for concurrent use.
type Bodies struct {
	memory   *buffer.Budget
	config   func() *config.Config
	clientOf func(*http.Request) string

	clients buffer.Clients // the memory that large requests hold, by client
	readers readers
	zstd    func() *zstd.Decoder // made at its first call
}

// NewBodies returns the limits of a server whose requests count in memory. Config returns
// the configuration as it is now, and clientOf the name of a client for limits; they must
// be safe for concurrent use.
func NewBodies(memory *buffer.Budget, config func() *config.Config, clientOf func(*http.Request) string) *Bodies {
	return &Bodies{memory: memory, config: config, clientOf: clientOf, zstd: sync.OnceValue(newUnzstd)}
}

// Reading returns how many bodies of clients are being read.
func (b *Bodies) Reading() int { return b.readers.len() }

// Limit returns a handler whose requests have bodies with the server's limits.
func (b *Bodies) Limit(next http.Handler) http.Handler { return b.limit(&b.readers, next) }

// limit counts the bodies in readers, unless readers is nil.
func (b *Bodies) limit(readers *readers, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		whole, _ := r.Body.(interface{ Whole() bool })
		if r.Body == nil || r.Body == http.NoBody || whole != nil && whole.Whole() { // no read waits for the client
			next.ServeHTTP(w, r)
			return
		}
		in := &incoming{Context: r.Context(), ReadCloser: r.Body, config: b.config, clientOf: b.clientOf, readers: readers, rc: *http.NewResponseController(w), from: r}
		in.to = r.WithContext(in) // net/http looks at the body of its own request
		in.to.Body = in
		_ = in.rc.EnableFullDuplex() // HTTP/1.1 always has it; without it net/http reads the body before it answers
		answered := false
		defer func() {
			if in.ended.Load() {
				return
			}
			if _ = in.leave(); answered {
				in.discard()
			}
		}()
		next.ServeHTTP(w, in.to)
		answered = true // not after a panic, by which a handler cuts the connection
	})
}

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
	all, own      int           // guarded by the readers' mu; places in the heaps, or all in unsorted, from 1; 0: none

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

// LimitBody gives the client that long from now for the body of r; 0 is no limit. The
// handler of r is one of Limit's.
func LimitBody(r *http.Request, limit time.Duration) {
	if limit <= 0 || r.ContentLength == 0 {
		return
	}
	b := incomingOf(r.Context())
	if b == nil {
		return
	}
	by := time.Now().Add(limit)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.why != nil {
		by = time.Unix(1, 0)
	}
	b.rc.SetReadDeadline(by)
}

// Read implements io.Reader. The error of a body that was stopped is a *stoppedBody.
func (b *incoming) Read(p []byte) (int, error) {
	now := time.Now()
	b.mu.Lock()
	first, why := !b.begun, b.why
	if b.begun = true; first && b.client == "" {
		b.client = b.clientOf(b.from)
	}
	b.mu.Unlock()
	if first && b.readers != nil {
		b.readers.enter(b, now, b.config())
	}
	b.since.Store(now.UnixNano())
	if why != nil {
		_ = b.leave()
		return 0, why
	}
	n, err := b.ReadCloser.Read(p) // fails if stop comes now
	b.got.Add(int64(n))
	if err == nil {
		b.since.Store(0) // first: this read must not count twice
		b.waited.Add(int64(time.Since(now)))
		return n, nil
	}
	why = b.leave()
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
		return n, why
	}
	return n, err
}

// leave ends the reading of the body: it leaves its place to another one, and its limits end. It
// returns why the body was stopped.
func (b *incoming) leave() *stoppedBody {
	if b.readers != nil {
		b.readers.leave(b)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over = true
	return b.why
}

// mustClose reports whether the connection cannot serve another request. When a deadline
// ends a read of an HTTP/1.1 connection, net/http cancels the contexts of this request
// and of all later requests of the connection.
func (b *incoming) mustClose() bool { return b.from.ProtoMajor == 1 && b.broken.Load() }

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

// discard reads the rest of a body whose request has been answered before the body's end. If
// the rest does not come, discard closes an HTTP/1.1 connection: the rest must not be read as
// another request. discard also closes a connection that cannot serve another request.
// Over HTTP/2 the server then resets the stream with NO_ERROR, which tells the client to stop.
// Some clients lose the answer with this reset (curl 7.88, httpx 0.28), so it comes only if
// the rest does not. Over HTTP/3 the protocol tells the client to stop.
func (b *incoming) discard() {
	http1 := b.from.ProtoMajor == 1
	if b.from.ProtoMajor > 2 {
		return
	}
	b.mu.Lock()
	begun := b.begun
	b.begun = true
	b.mu.Unlock()
	if !begun && b.from.Header.Get("Expect") != "" { // the client may wait for 100 Continue
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

// operatorLimit is how long the body of a request to the admin address may take.
const operatorLimit = 5 * time.Second

// LimitForOperators is Limit for the admin address. Each body may take 5 s. These bodies
// take no place of limits.max_reading, and no client's body takes a place of theirs.
func (b *Bodies) LimitForOperators(next http.Handler) http.Handler {
	return b.limit(nil, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if in := incomingOf(r.Context()); in != nil {
			in.answer = w.Header() // no filter reads these bodies
		}
		LimitBody(r, operatorLimit)
		next.ServeHTTP(w, r)
	}))
}
