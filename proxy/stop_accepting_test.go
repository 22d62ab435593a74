package proxy_test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// After StopAccepting the server accepts no connection and serves the open ones. The
// server ends when the last connection ends.
func TestStopAccepting(t *testing.T) {
	eachProtocol(t, func(t *testing.T, proto string, start func(world.Setup) (*world.World, *http.Client)) {
		end := make(chan struct{})
		w, c := start(world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, nth int) {
			if nth > 1 {
				c.JSON(200, world.Unary)
				return
			}
			c.Send(world.StreamHead)
			c.Chunks(world.EventA)
			<-end
			c.Chunks(world.EventB, world.Done)
			c.Send("0\r\n\r\n")
		}}}})
		resp := world.Open(t, t.Context(), c, world.Completions(true))
		w.Stopped.Store(true)
		w.Front.StopAccepting()
		w.Front.StopAccepting() // does nothing
		synctest.Wait()
		if _, err := w.Public.Dial(); err == nil {
			t.Error("the server accepts a new connection")
		}
		if _, err := w.Admin.Dial(); err == nil {
			t.Error("the server accepts a new admin connection")
		}
		select {
		case err := <-w.Over:
			t.Fatalf("the server ended during a stream: %v", err)
		case <-time.After(50 * time.Second): // longer than the drain's limit
		}
		close(end)
		body, err := io.ReadAll(resp.Body)
		if err != nil || string(body) != world.EventA+world.EventB+world.Done {
			t.Errorf("%v: %q", err, body)
		}
		// The HTTP/2 client has closed its connection, because the server sent GOAWAY.
		// The HTTP/1.1 connection is still open. The server serves one request on it, and
		// then closes it.
		if proto == "HTTP/1.1" {
			a := world.Ask(t.Context(), c, "POST", "http://proxy"+world.CompletionsPath, world.Completions(false))
			if a.Status != 200 || a.Body != world.Unary {
				t.Errorf("request on the open connection: got %+v", a)
			}
		}
		if err := <-w.Over; err != nil {
			t.Errorf("its end: %v", err)
		}
	})
}

// An HTTP/1.1 answer announces that it is the last one of its connection. The time limit
// of idle connections does not change.
func TestStopAcceptingKeepAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}})
		var last atomic.Bool // from now on answers announce the end of their connection
		post := func(used bool) (io.Reader, func()) {
			conn, err := w.Public.Dial()
			if err != nil {
				t.Fatal(err)
			}
			br := bufio.NewReader(conn)
			ask := func() {
				t.Helper()
				body := world.Completions(false)
				fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n%s", world.CompletionsPath, len(body), body)
				resp, err := http.ReadResponse(br, nil)
				if err != nil {
					t.Error(err)
					return
				}
				text, err := io.ReadAll(resp.Body)
				if err != nil || string(text) != world.Unary || resp.Close != last.Load() {
					t.Errorf("%v, close %v: %s", err, resp.Close, text)
				}
			}
			if used {
				ask()
			}
			return br, ask
		}
		asked, ask := post(true)
		idle, _ := post(true)
		fresh, askFresh := post(false)
		w.Stopped.Store(true)
		w.Front.StopAccepting()
		last.Store(true)
		begin := time.Now()
		gone := func(r io.Reader) time.Duration {
			if n, err := r.Read(make([]byte, 1)); n > 0 || err != io.EOF {
				t.Errorf("%d bytes, %v", n, err)
			}
			return time.Since(begin)
		}
		time.Sleep(5 * time.Second)
		askFresh()
		if d := gone(fresh); d != 5*time.Second {
			t.Errorf("the new connection was closed after %v", d)
		}
		time.Sleep(55 * time.Second)
		ask()
		if d := gone(asked); d != time.Minute {
			t.Errorf("the connection was closed after %v", d)
		}
		if d := gone(idle); d < 2*time.Minute || d > 2*time.Minute+2*time.Second {
			t.Errorf("the idle connection was closed after %v", d)
		}
		if err := <-w.Over; err != nil {
			t.Errorf("its end: %v", err)
		}
	})
}

// At the limit the proxy sends an error to the remaining clients and aborts their
// requests. A signal starts the same drain as before StopAccepting.
func TestStopAcceptingEnds(t *testing.T) {
	for _, signal := range []bool{false, true} {
		world.Run(t, fmt.Sprintf("signal %t", signal), func(t *testing.T) {
			w := newWorld(t, world.Setup{
				Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) {
					c.Send(world.StreamHead)
					c.Chunks(world.EventA)
					c.Hold()
				}}},
				Config: func(c *config.Config) { c.Timeouts.StreamIdle = config.Duration(24 * time.Hour) },
			})
			resp := world.Open(t, t.Context(), w.Client, world.Completions(true))
			w.Stopped.Store(true)
			w.Front.StopAccepting()
			begin, limit := time.Now(), time.Hour
			if signal {
				time.AfterFunc(time.Minute, w.End)
				limit = time.Minute + 30*time.Second
			}
			body, err := io.ReadAll(resp.Body)
			if err != nil || !strings.Contains(string(body), `"code":"draining"`) {
				t.Errorf("%v: %q", err, body)
			}
			if d := time.Since(begin); d != limit {
				t.Errorf("aborted after %v, want %v", d, limit)
			}
			w.Client.CloseIdleConnections()
			if err := <-w.Over; err == nil || !strings.Contains(err.Error(), "1 exchanges were cut after") {
				t.Errorf("its end: %v", err)
			}
		})
	}
}
