package dashboard

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

func TestMain(m *testing.M) { proxytest.Main(m) }

// counted returns a hub whose snapshots are numbers, with the numbers of viewings and of
// snapshots so far.
func counted() (h *Hub, begun, taken *atomic.Int64) {
	begun, taken = new(atomic.Int64), new(atomic.Int64)
	return &Hub{Begin: func() Snapshots {
		begun.Add(1)
		return func(context.Context) []byte { return fmt.Append(nil, taken.Add(1)) }
	}}, begun, taken
}

// TestHubTakesOneSnapshotForAll: all viewers get the same snapshots, one a second. Nothing
// is taken before the first viewer comes and after the last one has left.
func TestHubTakesOneSnapshotForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, begun, taken := counted()
		time.Sleep(10 * Every)
		if taken.Load() != 0 {
			t.Fatal("snapshots without a viewer")
		}
		one := h.enter()
		if got := string(<-one); got != "1" {
			t.Errorf("the first snapshot is %s", got)
		}
		two := h.enter()
		if got := string(<-two); got != "1" {
			t.Errorf("a later viewer gets %s at once", got)
		}
		time.Sleep(Every + Every/2)
		if a, b := string(<-one), string(<-two); a != "2" || b != "2" {
			t.Errorf("after a second: %s and %s", a, b)
		}
		time.Sleep(3 * Every)
		if got := string(<-one); got != "5" {
			t.Errorf("a slow viewer gets %s, not the latest snapshot", got)
		}
		h.leave(one)
		h.leave(two)
		synctest.Wait()
		before := taken.Load()
		time.Sleep(10 * Every)
		if taken.Load() != before {
			t.Error("snapshots after the last viewer has left")
		}
		three := h.enter()
		if got := string(<-three); got != fmt.Sprint(before+1) || begun.Load() != 2 {
			t.Errorf("the next viewer gets %s in viewing %d", got, begun.Load())
		}
		h.leave(three)
	})
}

// TestHubDropsALateSnapshot: a snapshot that ends after its viewers have left reaches no
// later viewer.
func TestHubDropsALateSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		first := true
		h := &Hub{Begin: func() Snapshots {
			if first {
				first = false
				return func(context.Context) []byte { <-release; return []byte("old") }
			}
			return func(context.Context) []byte { return []byte("new") }
		}}
		h.leave(h.enter())
		viewer := h.enter()
		if got := string(<-viewer); got != "new" {
			t.Errorf("got %s", got)
		}
		close(release)
		synctest.Wait()
		select {
		case got := <-viewer:
			t.Errorf("got %s", got)
		default:
		}
		h.leave(viewer)
	})
}

// TestHubStream: a viewer reads events, and the end of the hub ends the stream.
func TestHubStream(t *testing.T) {
	h, _, _ := counted()
	end := make(chan struct{})
	h.End = end
	server := httptest.NewServer(h)
	defer server.Close()
	resp, err := http.Get(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got := resp.Header.Get("Content-Type"); got != "text/event-stream" {
		t.Errorf("Content-Type %q", got)
	}
	lines := bufio.NewScanner(resp.Body)
	var got []string
	for lines.Scan() {
		if got = append(got, lines.Text()); len(got) == 3 {
			close(end)
		}
	}
	if text := strings.Join(got, "\n"); !strings.HasPrefix(text, "event: snapshot\ndata: 1\n") || lines.Err() != nil {
		t.Errorf("got %q, %v", text, lines.Err())
	}
	server.Client().CloseIdleConnections()
	http.DefaultClient.CloseIdleConnections()
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.viewers) != 0 {
		t.Error("the viewer is still there")
	}
}
