package dashboard

import (
	"context"
	"io"
	"net/http"
	"sync"
	"time"
)

// Every is the time between two snapshots.
const Every = time.Second

// Snapshots returns the next snapshot as one line of text. One goroutine calls it, once
// every Every, beginning at once. It may take until ctx ends.
type Snapshots func(ctx context.Context) []byte

// Hub sends snapshots to all viewers as server-sent events. While nobody views, the hub has
// no goroutine and takes no snapshot. Safe for concurrent use.
type Hub struct {
	// Begin is called when the first viewer connects. Its result is dropped when the last viewer
	// has left.
	Begin func() Snapshots
	// End ends all streams when it is closed; nil: they end with their viewers.
	End <-chan struct{}

	mu      sync.Mutex
	viewers map[chan []byte]bool // guarded by mu
	last    []byte               // of the present viewers; nil before the first; guarded by mu
	stop    context.CancelFunc   // ends the goroutine of the present viewers; guarded by mu
}

// enter adds a viewer. The channel gets each snapshot, and holds the latest snapshot until the
// viewer receives it.
func (h *Hub) enter() chan []byte {
	viewer := make(chan []byte, 1)
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.viewers) == 0 {
		h.viewers = make(map[chan []byte]bool)
		var ctx context.Context
		ctx, h.stop = context.WithCancel(context.Background())
		go h.run(ctx, h.Begin())
	}
	h.viewers[viewer] = true
	if h.last != nil {
		viewer <- h.last
	}
	return viewer
}

// leave removes a viewer.
func (h *Hub) leave(viewer chan []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.viewers, viewer)
	if len(h.viewers) == 0 {
		h.stop()
		h.last = nil
	}
}

// run sends snapshots until ctx ends.
func (h *Hub) run(ctx context.Context, next Snapshots) {
	tick := time.NewTicker(Every)
	defer tick.Stop()
	for {
		h.send(ctx, next(ctx))
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// send gives a snapshot to all viewers, unless ctx has ended: then the viewers are others.
func (h *Hub) send(ctx context.Context, snapshot []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if ctx.Err() != nil {
		return
	}
	h.last = snapshot
	for viewer := range h.viewers {
		select {
		case <-viewer: // a slow viewer misses the older snapshot
		default:
		}
		viewer <- snapshot
	}
}

// ServeHTTP streams the snapshots to one viewer until the viewer leaves or End is closed.
func (h *Hub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	viewer := h.enter()
	defer h.leave(viewer)
	w.Header().Set("Content-Type", "text/event-stream")
	w.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(w).Flush
	for {
		select {
		case <-r.Context().Done():
			return
		case <-h.End:
			return
		case snapshot := <-viewer:
			for _, part := range [...]string{"event: snapshot\ndata: ", string(snapshot), "\n\n"} {
				if _, err := io.WriteString(w, part); err != nil {
					return
				}
			}
			if flush() != nil {
				return
			}
		}
	}
}
