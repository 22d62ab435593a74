package downstream

import (
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
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

// operatorLimit is how long the body of a request to the admin address may take.
const operatorLimit = 5 * time.Second

// LimitForOperators is Limit for the admin address. Each body may take 5 s. These bodies
// take no place of limits.max_reading, and no client's body takes a place of theirs.
func (b *Bodies) LimitForOperators(next http.Handler) http.Handler {
	return b.limit(nil, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if in := incomingOf(r.Context()); in != nil {
			in.answer = w.Header() // no filter reads these bodies
			in.limit(time.Now().Add(operatorLimit))
		}
		next.ServeHTTP(w, r)
	}))
}

// LimitBody gives the client that long from now for the body of r; 0 is no limit. The
// handler of r is one of Limit's.
func LimitBody(r *http.Request, limit time.Duration) {
	if limit > 0 && r.ContentLength != 0 {
		if in := incomingOf(r.Context()); in != nil {
			in.limit(time.Now().Add(limit))
		}
	}
}

// limit counts the bodies in readers, unless readers is nil.
func (b *Bodies) limit(readers *readers, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body == nil || r.Body == http.NoBody {
			next.ServeHTTP(w, r)
			return
		}
		in := &incoming{Context: r.Context(), ReadCloser: r.Body, config: b.config, clientOf: b.clientOf, readers: readers, rc: *http.NewResponseController(w), from: r}
		in.to = r.WithContext(in) // net/http looks at the body of its own request
		in.to.Body = in
		_ = in.rc.EnableFullDuplex() // HTTP/1.1 always has it; without it net/http reads the body before it answers
		answered := false
		defer func() {
			if in.leave(); answered {
				in.discard()
			}
		}()
		next.ServeHTTP(w, in.to)
		answered = true // not after a panic, by which a handler cuts the connection
	})
}

// maxWindow is the largest window of zstd that is decoded, in bytes: the one that
// every decoder must support (RFC 8878, 3.1.1.1.2).
const maxWindow = 8 << 20

// newUnzstd makes a decoder of zstd. Its calls may run at the same time, and write only
// into the buffers that they get.
func newUnzstd() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(runtime.GOMAXPROCS(0)), zstd.WithDecoderMaxWindow(maxWindow),
		zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderLowmem(true))
	if err != nil { // only wrong options fail
		panic(err)
	}
	return d
}
