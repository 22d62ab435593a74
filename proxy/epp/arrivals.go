package epp

import (
	"context"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	"github.com/pdproxy/pdproxy/proxy/buffer"
)

const (
	// memoryShare is the divisor of limits.buffer_memory for the bytes of messages.
	memoryShare = 4
	// frameCost is the memory of one part of a message beside its bytes: the objects of grpc-go.
	frameCost = 128
	// frameHead is the length of the head of a gRPC message, in bytes.
	frameHead = 5
	// writeQuota is the number of bytes that grpc-go holds for a stream before SendMsg waits. A
	// single message may be longer. Source: grpc-go internal/transport/controlbuf.go,
	// defaultWriteQuota.
	writeQuota = 64 << 10
)

// arrivals counts the memory of the messages of all gateways: from the arrival of the head of an
// HTTP/2 frame, before grpc-go allocates the frame's memory, until the request has taken the
// bytes. Above the limit, arrivals ends streams: first those of the connection with the most
// bytes. Safe for concurrent use.
type arrivals struct {
	memory *buffer.Budget // counts the bytes too
	least  int64          // bytes: the limit is not below, so that one stream can always be served

	held   atomic.Int64 // bytes
	ending atomic.Int64 // bytes of held that belong to streams that were told to end

	mu    sync.Mutex
	conns map[*conn]struct{} // open connections; guarded by mu
}

// limit returns the largest number of bytes.
func (r *arrivals) limit() int64 {
	whole := r.memory.Limit()
	if whole == 0 {
		return math.MaxInt64 / 2
	}
	return min(max(whole/memoryShare, r.least), whole)
}

// add counts n bytes more, or less.
func (r *arrivals) add(n int64) {
	r.held.Add(n)
	r.memory.Add(n)
}

// enforce ends streams while there are too many bytes. Their memory is free some time later. If
// the memory reaches twice the limit, for example because a gateway does not read the ends,
// enforce closes the connection with the most bytes.
func (r *arrivals) enforce() {
	limit := r.limit()
	if r.held.Load()-r.ending.Load() <= limit && r.held.Load() <= 2*limit {
		return
	}
	r.mu.Lock()
	var ended []func()
	for {
		c, bytes := r.most(func(c *conn) int64 { return c.held - c.ending })
		if bytes <= limit {
			break
		}
		ended = append(ended, c.endOne())
	}
	var closed *conn
	if c, bytes := r.most(func(c *conn) int64 { return c.held }); bytes > 2*limit {
		closed = c
	}
	r.mu.Unlock()
	for _, end := range ended {
		end()
	}
	if closed != nil {
		closed.Close()
	}
}

// most returns the connection with the most bytes, as of counts them, and the bytes of all
// connections; nil: no connection has bytes. The sum leaves out connections that are closing, so that
// no other connection ends because of their bytes. The caller holds r.mu.
func (r *arrivals) most(of func(*conn) int64) (found *conn, sum int64) {
	most := int64(0)
	for c := range r.conns {
		c.mu.Lock()
		n := of(c)
		c.mu.Unlock()
		if sum += n; n > most {
			found, most = c, n
		}
	}
	return found, sum
}

// enter counts the memory of an open connection.
func (r *arrivals) enter(c *conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conns == nil {
		r.conns = make(map[*conn]struct{})
	}
	r.conns[c] = struct{}{}
}

// connected reports whether a connection is open.
func (r *arrivals) connected() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.conns) > 0
}

// leave ends the counting of a connection that is closed.
func (r *arrivals) leave(c *conn) {
	r.mu.Lock()
	delete(r.conns, c)
	r.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, a := range c.streams {
		c.count(a, -a.held)
	}
	c.streams, c.over = nil, true
}

// arriving counts the messages of one stream of a connection: from the first frame of the stream
// until grpc-go has written its end, or the gateway has reset the stream. nil counts nothing.
type arriving struct {
	conn   *conn
	id     uint32 // of the stream
	bytes  int64  // that have arrived and that the request has not taken; guarded by conn.mu
	cost   int64  // memory of these bytes; guarded by conn.mu
	held   int64  // cost, and the memory of messages that wait to be written; guarded by conn.mu
	ending bool   // the stream was told to end; guarded by conn.mu
	end    func() // ends the stream, without waiting; guarded by conn.mu
}

// count changes the memory of a by n bytes. The caller holds c.mu.
func (c *conn) count(a *arriving, n int64) {
	a.held += n
	c.held += n
	if a.ending {
		c.ending += n
		c.arrivals.ending.Add(n)
	}
	c.arrivals.add(n)
}

// enter begins the counting of the stream whose head the connection has read last. The result
// ends when the stream must end.
func (c *conn) enter(ctx context.Context) context.Context {
	if c == nil {
		return ctx
	}
	ctx, cancel := context.WithCancelCause(ctx)
	a := &arriving{conn: c, id: c.last, end: func() { cancel(errMemory) }}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.over {
		if c.streams == nil {
			c.streams = make(map[uint32]*arriving)
		}
		c.streams[a.id] = a
	}
	return context.WithValue(ctx, arrivingKey{}, a)
}

// arrivingKey is the context key for the *arriving of a stream.
type arrivingKey struct{}

func arrivingOf(ctx context.Context) *arriving {
	a, _ := ctx.Value(arrivingKey{}).(*arriving)
	return a
}

// arrive counts a part of a message with n bytes, which follow. It returns false if the stream is
// not open or must end: nobody needs the bytes.
func (c *conn) arrive(id uint32, n int) bool {
	c.mu.Lock()
	a := c.streams[id]
	if a == nil || a.ending {
		c.mu.Unlock()
		return false
	}
	if n > 0 {
		cost := memoryOf(n)
		a.bytes += int64(n)
		a.cost += cost
		c.count(a, cost)
	}
	c.mu.Unlock()
	c.arrivals.enforce()
	return true
}

// memoryOf returns the memory of a part of a message: the buffers have sizes of powers of two.
func memoryOf(n int) int64 {
	if mem.IsBelowBufferPoolingThreshold(n) {
		return int64(n) + frameCost
	}
	return 1<<bits.Len(uint(n-1)) + frameCost
}

// leave ends the counting of a stream.
func (c *conn) leave(id uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if a := c.streams[id]; a != nil {
		c.count(a, -a.held)
		delete(c.streams, id)
	}
}

// endOne chooses the stream that must end, and returns the function that ends it: of the streams
// with at least half as many bytes as the largest one, the newest. So the older ones make progress.
func (c *conn) endOne() func() {
	c.mu.Lock()
	defer c.mu.Unlock()
	most := int64(0)
	for _, a := range c.streams {
		if !a.ending {
			most = max(most, a.held)
		}
	}
	var chosen *arriving
	for _, a := range c.streams {
		if !a.ending && a.held >= (most+1)/2 && (chosen == nil || a.id > chosen.id) {
			chosen = a
		}
	}
	if chosen == nil {
		return func() {}
	}
	chosen.ending = true
	c.ending += chosen.held
	c.arrivals.ending.Add(chosen.held)
	return chosen.end
}

// taken ends the counting of a message of n bytes that the request has taken.
func (a *arriving) taken(n int) {
	if a == nil {
		return
	}
	a.conn.mu.Lock()
	defer a.conn.mu.Unlock()
	if a.bytes == 0 || a.conn.streams[a.id] != a {
		return
	}
	bytes := min(int64(n+frameHead), a.bytes)
	cost := int64(float64(a.cost) * float64(bytes) / float64(a.bytes)) // all of it with the last byte
	a.bytes -= bytes
	a.cost -= cost
	a.conn.count(a, -cost)
}

// lend counts a message or a part of one until grpc-go has written it. held has the memory; nil:
// the garbage collector has. lend takes the reference.
func (a *arriving) lend(data []byte, held mem.Buffer) mem.Buffer {
	l := &lent{stream: a, held: held, n: int64(len(data))}
	a.conn.mu.Lock()
	if a.conn.streams[a.id] == a {
		a.conn.count(a, l.n)
	}
	a.conn.mu.Unlock()
	a.conn.arrivals.enforce()
	return mem.NewBuffer(&data, l)
}

// lent is the memory that grpc-go has until it has written the memory.
type lent struct {
	stream *arriving
	held   mem.Buffer
	n      int64 // bytes
}

// Get implements mem.BufferPool. Nothing calls Get.
func (l *lent) Get(length int) *[]byte { return mem.DefaultBufferPool().Get(length) }

// Put implements mem.BufferPool.
func (l *lent) Put(*[]byte) {
	if l.held != nil {
		l.held.Free()
	}
	a := l.stream
	a.conn.mu.Lock()
	defer a.conn.mu.Unlock()
	if a.conn.streams[a.id] == a {
		a.conn.count(a, -l.n)
	}
}

// onEnd sets the function that is called first when the stream must end. If it returns false, the
// stream is cut.
func (a *arriving) onEnd(first func() bool) {
	if a == nil {
		return
	}
	a.conn.mu.Lock()
	defer a.conn.mu.Unlock()
	cut := a.end
	a.end = func() {
		if !first() {
			cut()
		}
	}
}

// errMemory ends a stream that has no memory for its messages.
var errMemory = status.Error(codes.ResourceExhausted, "the memory of the proxy for messages of gateways is used up")
