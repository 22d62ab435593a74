package proxy

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"
)

// errRetired is the end of a front that has retired and served what it had.
var errRetired = errors.New("a successor serves")

// Retire leaves the sockets to a successor that has them too: when it returns
// this front accepts nothing any more. Connections that it has accepted are served
// on, as long as their clients want, or the limit of Serve. Clients are asked to
// make a new one: by GOAWAY at once, or by Connection: close with the next answer.
//
// A connection that is idle is not closed for that, because the client may just
// be writing a request that nothing says it could send again; it ends as all idle
// ones do, after server.idle_timeout. So a client sees no more than it always
// does.
func (f *Front) Retire() {
	if !f.retiring.CompareAndSwap(false, true) {
		return
	}
	f.closeListeners()
	f.clients.retire(&f.telling)
	close(f.retired)
}

// goOn serves a retired front's connections until there is none. What waits for
// those of HTTP/3 runs in the group of all until shutdown has ended it.
func (f *Front) goOn(ctx context.Context, all, accepting *sync.WaitGroup, failed <-chan error, limit time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errRetired)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	quiet, quicQuiet := make(chan struct{}), make(chan struct{})
	all.Go(func() {
		defer close(quicQuiet)
		_ = f.quic.shutdown(context.Background()) // its own errors keep nobody from serving
	})
	wg.Go(func() {
		defer close(quiet)
		if f.demux != nil {
			f.demux.finish()
		}
		accepting.Wait() // what was accepted is counted
		for _, none := range []<-chan struct{}{f.conns.Idle(), quicQuiet} {
			select {
			case <-none:
			case <-ctx.Done():
			}
		}
	})
	select {
	case <-quiet:
		return errRetired
	case err := <-failed:
		return err
	case <-ctx.Done():
		if context.Cause(ctx) == errRetired {
			return errRetired
		}
		return nil
	}
}

// lastAnswers makes the answers of a retired front the last ones of their
// connections. In HTTP/2 that header would be net/http's GOAWAY.
func (f *Front) lastAnswers(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f.retiring.Load() && r.ProtoMajor < 2 {
			w.Header().Set("Connection", "close")
		}
		h.ServeHTTP(w, r)
	})
}
