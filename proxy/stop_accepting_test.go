package proxy

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
)

// After StopAccepting the server accepts no connection and serves the open ones. The
// server ends when the last connection ends.
func TestStopAccepting(t *testing.T) {
	eachProtocol(t, func(t *testing.T, proto string, start func(setup) (*world, *http.Client)) {
		end := make(chan struct{})
		w, c := start(setup{engines: []*fakeEngine{{serve: func(c *engineConn, nth int) {
			if nth > 1 {
				c.json(200, unary)
				return
			}
			c.send(streamHead)
			c.chunks(eventA)
			<-end
			c.chunks(eventB, done)
			c.send("0\r\n\r\n")
		}}}})
		resp := open(t, t.Context(), c, completions(true))
		w.stopped.Store(true)
		w.front.StopAccepting()
		w.front.StopAccepting() // does nothing
		synctest.Wait()
		if _, err := w.public.Dial(); err == nil {
			t.Error("the server accepts a new connection")
		}
		if _, err := w.admin.Dial(); err == nil {
			t.Error("the server accepts a new admin connection")
		}
		select {
		case err := <-w.ended:
			t.Fatalf("the server ended during a stream: %v", err)
		case <-time.After(50 * time.Second): // longer than the drain's limit
		}
		close(end)
		body, err := io.ReadAll(resp.Body)
		if err != nil || string(body) != eventA+eventB+done {
			t.Errorf("%v: %q", err, body)
		}
		// The HTTP/2 client has closed its connection, because the server sent GOAWAY.
		// The HTTP/1.1 connection is still open. The server serves one request on it, and
		// then closes it.
		if proto == "HTTP/1.1" {
			a := ask(t.Context(), c, "POST", "http://proxy"+completionsPath, completions(false))
			if a.status != 200 || a.body != unary {
				t.Errorf("request on the open connection: got %+v", a)
			}
		}
		if err := <-w.ended; err != nil {
			t.Errorf("its end: %v", err)
		}
	})
}

// An HTTP/1.1 answer announces that it is the last one of its connection. The time limit
// of idle connections does not change.
func TestStopAcceptingKeepAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{engines: []*fakeEngine{{serve: func(c *engineConn, _ int) { c.json(200, unary) }}}})
		var last atomic.Bool // from now on answers announce the end of their connection
		post := func(used bool) (io.Reader, func()) {
			conn, err := w.public.Dial()
			if err != nil {
				t.Fatal(err)
			}
			br := bufio.NewReader(conn)
			ask := func() {
				t.Helper()
				body := completions(false)
				fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n%s", completionsPath, len(body), body)
				resp, err := http.ReadResponse(br, nil)
				if err != nil {
					t.Error(err)
					return
				}
				text, err := io.ReadAll(resp.Body)
				if err != nil || string(text) != unary || resp.Close != last.Load() {
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
		w.stopped.Store(true)
		w.front.StopAccepting()
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
		if d := gone(idle); d != 2*time.Minute {
			t.Errorf("the idle connection was closed after %v", d)
		}
		if err := <-w.ended; err != nil {
			t.Errorf("its end: %v", err)
		}
	})
}

// At the limit the proxy sends an error to the remaining clients and aborts their
// requests. A signal starts the same drain as before StopAccepting.
func TestStopAcceptingEnds(t *testing.T) {
	for _, signal := range []bool{false, true} {
		t.Run(fmt.Sprintf("signal %t", signal), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, setup{
					engines: []*fakeEngine{{serve: func(c *engineConn, _ int) {
						c.send(streamHead)
						c.chunks(eventA)
						c.hold()
					}}},
					config: func(c *config.Config) { c.Timeouts.StreamIdle = config.Duration(24 * time.Hour) },
				})
				resp := open(t, t.Context(), w.client, completions(true))
				w.stopped.Store(true)
				w.front.StopAccepting()
				begin, limit := time.Now(), time.Hour
				if signal {
					time.AfterFunc(time.Minute, w.end)
					limit = time.Minute + 30*time.Second
				}
				body, err := io.ReadAll(resp.Body)
				if err != nil || !strings.Contains(string(body), `"code":"draining"`) {
					t.Errorf("%v: %q", err, body)
				}
				if d := time.Since(begin); d != limit {
					t.Errorf("aborted after %v, want %v", d, limit)
				}
				w.client.CloseIdleConnections()
				if err := <-w.ended; err == nil || !strings.Contains(err.Error(), "1 exchanges were cut after") {
					t.Errorf("its end: %v", err)
				}
			})
		})
	}
}
