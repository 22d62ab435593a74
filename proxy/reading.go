package proxy

import (
	"container/heap"
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
	// rateGrace is how long a body may wait for its client before
	// server.min_body_rate counts.
	rateGrace = 5 * time.Second
	// sweepEvery is how often the bodies that are being read are checked.
	sweepEvery = time.Second
	// unreadWait is how long the proxy waits for each further byte of a body that has
	// been answered before its end, and unreadTime how long for all of them; the body
	// must come at fairRate after unreadWait. A connection that was closed with unread
	// bytes would be reset, and a client that sends all before it reads would lose the
	// answer.
	unreadWait = time.Second
	unreadTime = 30 * time.Second
	// fairRate is the rate, in bytes a second, by which bodies are compared when
	// one has to make room: a body is behind by the time that it has taken, less the
	// time that its bytes take at this rate.
	fairRate = 64 << 10
)

// Reasons to stop reading a body.
var (
	errBodySlow = &openai.Error{Status: 408, Type: "invalid_request_error", Code: "body_timeout", Message: "the request body came more slowly than server.min_body_rate"}
	errReading  = &openai.Error{Status: 408, Type: "rate_limit_error", Code: "reading_limit", Message: "too many request bodies are being read; this one was the slowest"}
)

// stoppedBody is the error of a body that the proxy has stopped reading.
type stoppedBody struct{ why *openai.Error }

func (e *stoppedBody) Error() string { return e.why.Message }

// Unwrap makes the reason known, and to filters that a deadline has passed.
func (e *stoppedBody) Unwrap() []error { return []error{e.why, os.ErrDeadlineExceeded} }

// incoming is the body of a client's request, whoever reads it: the exchange or a
// filter. It is also the context of the request, in which the exchange finds it.
// One goroutine at a time reads it, and not always that of the handler.
type incoming struct {
	context.Context
	io.ReadCloser // as net/http gave it
	s             *Server
	readers       *readers // nil: the deadline is the body's only limit
	rc            http.ResponseController
	from, to      *http.Request // as net/http made it; as the handlers see it
	ended         atomic.Bool   // its end has been read
	got           atomic.Int64  // bytes
	since         atomic.Int64  // when the read under way began, in Unix nanoseconds; 0: none is
	waited        atomic.Int64  // nanoseconds in earlier reads
	due           int64         // guarded by the readers' mu; when a body at fairRate would have begun, in nanoseconds
	all, own      int           // guarded by the readers' mu; places in the heaps

	mu     sync.Mutex
	client string       // for limits; guarded by mu until the first read, constant from then on
	begun  bool         // guarded by mu; the first read has begun
	over   bool         // guarded by mu; the connection is not the body's any more
	why    *stoppedBody // guarded by mu; nil: nothing has stopped it
}

type incomingKey struct{}

// Value implements context.Context.
func (b *incoming) Value(key any) any {
	if key == (incomingKey{}) {
		return b
	}
	return b.Context.Value(key)
}

// incomingOf is the body of the request whose context that is; nil for none.
func incomingOf(ctx context.Context) *incoming {
	b, _ := ctx.Value(incomingKey{}).(*incoming)
	return b
}

// bounded gives requests with a body one that the server's limits bound.
func (s *Server) bounded(next http.Handler) http.Handler { return boundedBy(&s.readers, s, next) }

// operatorBody is how long the body of a request to the admin address may take.
const operatorBody = 5 * time.Second

// boundedForOperators gives each body operatorBody. These bodies take no place of
// limits.max_reading, and no client's body takes a place of theirs.
func (s *Server) boundedForOperators(next http.Handler) http.Handler {
	limited := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if b := incomingOf(r.Context()); b != nil {
			b.limit(time.Now().Add(operatorBody))
		}
		next.ServeHTTP(w, r)
	})
	return boundedBy(nil, s, limited)
}

// boundedBy counts bodies in readers, unless readers is nil.
func boundedBy(readers *readers, s *Server, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body == nil || r.Body == http.NoBody {
			next.ServeHTTP(w, r)
			return
		}
		b := &incoming{Context: r.Context(), ReadCloser: r.Body, s: s, readers: readers, rc: *http.NewResponseController(w), from: r}
		b.to = r.WithContext(b) // net/http looks at the body of its own request
		b.to.Body = b
		_ = b.rc.EnableFullDuplex() // always there over HTTP/1.1; without it net/http reads the body before it answers
		answered := false
		defer func() {
			if b.leave(); answered {
				b.discard()
			}
		}()
		next.ServeHTTP(w, b.to)
		answered = true // else a handler cuts the connection by its panic
	})
}

// Read implements io.Reader. The error of a body that was stopped is a *stoppedBody.
func (b *incoming) Read(p []byte) (int, error) {
	now := time.Now()
	if b.begin() && b.readers != nil {
		b.readers.enter(b, now, b.s.cfg.Load())
	}
	b.since.Store(now.UnixNano())
	if err := b.stopped(); err != nil {
		b.leave()
		return 0, err
	}
	n, err := b.ReadCloser.Read(p)
	b.got.Add(int64(n))
	if err == nil {
		b.since.Store(0) // first: nobody may count this read twice
		b.waited.Add(int64(time.Since(now)))
		return n, nil
	}
	b.leave()
	if err == io.EOF {
		b.ended.Store(true)
		if t := b.from.Trailer; t != nil && b.to.Trailer == nil { // else both have one map
			b.to.Trailer = t
		}
		if b.readers == nil {
			b.rc.SetReadDeadline(time.Time{}) // else the request's context ends with the deadline
		}
	} else if why := b.stopped(); why != nil {
		err = why
	}
	return n, err
}

// begin reports whether the read is the first one.
func (b *incoming) begin() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.begun {
		return false
	}
	b.begun = true
	if b.client == "" {
		b.client = clientOf(b.from)
	}
	return true
}

// of makes the body count for a client, unless a filter has begun to read it.
func (b *incoming) of(client string) {
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

// stop ends the reading of the body, for a reason. Any goroutine may call it.
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

// leave ends the body's part in the limits.
func (b *incoming) leave() {
	if b.readers != nil {
		b.readers.leave(b)
	}
	b.mu.Lock()
	b.over = true
	b.mu.Unlock()
}

// discard reads the rest of a body whose request has been answered, and closes the
// connection if the rest does not come: what remains must not be taken for another
// request. Over HTTP/2 and HTTP/3 the protocol tells the client to stop.
func (b *incoming) discard() {
	if b.from.ProtoMajor != 1 || b.ended.Load() {
		return
	}
	if b.from.Header.Get("Expect") != "" && b.begin() { // the client may wait for a word to send the body
		b.rc.SetReadDeadline(time.Now()) // net/http answers and closes
		return
	}
	if b.rc.Flush() != nil || !b.readRest() {
		panic(http.ErrAbortHandler) // the answer is out
	}
}

// readRest reads the body without keeping it, and reports whether its end came.
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

// waiting is how long the body has kept its reader waiting. A time in which a
// filter does not want to read does not count.
func (b *incoming) waiting(now int64) time.Duration {
	d := b.waited.Load()
	if since := b.since.Load(); since > 0 {
		d += max(0, now-since)
	}
	return time.Duration(d)
}

// tooSlow is why the body is to be stopped by the limits of cfg; nil: it is not.
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

// readers is the bodies that are being read. It lets at most limits.max_reading be
// read at a time, and of one client its share: one more takes the place of the body
// that is most behind. Safe for concurrent use. The zero value has none.
type readers struct {
	mu      sync.Mutex
	all     readerHeap             // guarded by mu
	clients map[string]*readerHeap // guarded by mu; none is empty
	spare   []*readerHeap          // guarded by mu; empty ones, for new clients
	armed   bool                   // guarded by mu; the next sweep is due
	cfg     *config.Config         // guarded by mu; as it was for the last body
}

func (l *readers) enter(b *incoming, now time.Time, cfg *config.Config) {
	l.mu.Lock()
	l.cfg = cfg
	var stopped []*incoming
	own := l.clients[b.client]
	share := cfg.Limits.ReadingShare()
	for own != nil && share > 0 && len(own.list) >= share {
		stopped = append(stopped, l.takeSlowest(own, now))
		own = l.clients[b.client]
	}
	for len(l.all.list) >= cfg.Limits.Reading() {
		stopped = append(stopped, l.takeSlowest(&l.all, now))
		own = l.clients[b.client]
	}
	if own == nil {
		own = l.newClient(b.client)
	}
	b.due = now.UnixNano()
	heap.Push(&l.all, b)
	heap.Push(own, b)
	if !l.armed {
		l.armed = true
		time.AfterFunc(sweepEvery, l.sweep)
	}
	l.mu.Unlock()
	for _, b := range stopped {
		b.stop(errReading)
	}
}

// newClient makes a heap for a client without one; mu is held.
func (l *readers) newClient(client string) *readerHeap {
	own := &readerHeap{own: true}
	if n := len(l.spare); n > 0 {
		own, l.spare = l.spare[n-1], l.spare[:n-1]
	}
	if l.clients == nil {
		l.clients = make(map[string]*readerHeap)
	}
	l.clients[client] = own
	return own
}

// takeSlowest takes the body out that is most behind; mu is held. A body that has
// come on since it was last looked at gets its new place first.
func (l *readers) takeSlowest(h *readerHeap, now time.Time) *incoming {
	for {
		b := h.list[0]
		// Only the time in which the reader waited for the client counts.
		due := now.UnixNano() - int64(b.waiting(now.UnixNano())) + b.got.Load()*int64(time.Second)/fairRate
		if due <= b.due || len(h.list) == 1 {
			l.remove(b)
			return b
		}
		b.due = due
		heap.Fix(&l.all, b.all-1)
		heap.Fix(l.clients[b.client], b.own-1)
	}
}

func (l *readers) leave(b *incoming) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b.all > 0 {
		l.remove(b)
	}
}

// remove takes b out; mu is held.
func (l *readers) remove(b *incoming) {
	heap.Remove(&l.all, b.all-1)
	own := l.clients[b.client]
	heap.Remove(own, b.own-1)
	b.all, b.own = 0, 0
	if len(own.list) == 0 {
		delete(l.clients, b.client)
		if len(l.spare) < 64 {
			l.spare = append(l.spare, own)
		}
	}
}

// sweep stops the bodies that come too slowly.
func (l *readers) sweep() {
	now := time.Now().UnixNano()
	type slow struct {
		b   *incoming
		why *openai.Error
	}
	var stopped []slow
	l.mu.Lock()
	for _, b := range l.all.list {
		if why := b.tooSlow(now, l.cfg); why != nil {
			stopped = append(stopped, slow{b, why})
		}
	}
	for _, s := range stopped {
		l.remove(s.b)
	}
	if l.armed = len(l.all.list) > 0; l.armed {
		time.AfterFunc(sweepEvery, l.sweep)
	}
	l.mu.Unlock()
	for _, s := range stopped {
		s.b.stop(s.why)
	}
}

// len is how many bodies are being read.
func (l *readers) len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.all.list)
}

// readerHeap implements heap.Interface; the body that is most behind is first.
type readerHeap struct {
	list []*incoming
	own  bool // of one client
}

// Len implements heap.Interface.
func (h *readerHeap) Len() int { return len(h.list) }

// Less implements heap.Interface.
func (h *readerHeap) Less(i, j int) bool { return h.list[i].due < h.list[j].due }

// Swap implements heap.Interface.
func (h *readerHeap) Swap(i, j int) {
	h.list[i], h.list[j] = h.list[j], h.list[i]
	h.place(i)
	h.place(j)
}

// place notes where the body at i is, counted from 1.
func (h *readerHeap) place(i int) {
	if h.own {
		h.list[i].own = i + 1
	} else {
		h.list[i].all = i + 1
	}
}

// Push implements heap.Interface.
func (h *readerHeap) Push(v any) {
	h.list = append(h.list, v.(*incoming))
	h.place(len(h.list) - 1)
}

// Pop implements heap.Interface.
func (h *readerHeap) Pop() any {
	end := len(h.list) - 1
	b := h.list[end]
	h.list[end], h.list = nil, h.list[:end]
	return b
}

// bodyStopped reports whether err is a body that did not come in time.
func bodyStopped(err error) bool {
	var oe *openai.Error
	return errors.As(err, &oe) && oe.Status == http.StatusRequestTimeout
}
