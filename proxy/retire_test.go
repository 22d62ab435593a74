package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// A front that has retired takes no connection, serves those that it has, and ends
// when the last one does.
func TestRetire(t *testing.T) {
	eachProtocol(t, func(t *testing.T, proto string, start func(setup) (*world, *http.Client)) {
		end := make(chan struct{})
		w, c := start(setup{engines: []*fakeEngine{{serve: func(c *engineConn, nth int) {
			if nth > 1 {
				c.json(200, unary)
				return
			}
			c.say(streamHead)
			c.chunks(eventA)
			<-end
			c.chunks(eventB, done)
			c.say("0\r\n\r\n")
		}}}})
		resp := open(t, t.Context(), c, completions(true))
		w.stopped.Store(true)
		w.front.Retire()
		w.front.Retire() // does nothing
		synctest.Wait()
		if _, err := w.public.dial(); err == nil {
			t.Error("a new connection is taken")
		}
		if _, err := w.admin.dial(); err == nil {
			t.Error("a new connection of operators is taken")
		}
		select {
		case err := <-w.ended:
			t.Fatalf("it ended with a stream: %v", err)
		case <-time.After(50 * time.Second): // beyond the drain's limit
		}
		close(end)
		body, err := io.ReadAll(resp.Body)
		if err != nil || string(body) != eventA+eventB+done {
			t.Errorf("%v: %q", err, body)
		}
		// A client of HTTP/2 has closed the connection, as it was asked to. That of
		// HTTP/1.1 is still there; a request on it is served, and is its last.
		if proto == "HTTP/1.1" {
			a := ask(t.Context(), c, "POST", "http://proxy"+completionsPath, completions(false))
			if a.status != 200 || a.body != unary {
				t.Errorf("on the kept connection: %+v", a)
			}
		}
		if err := <-w.ended; err != nil {
			t.Errorf("its end: %v", err)
		}
	})
}

// An answer of HTTP/1.1 says that it is the last one; an idle connection lives as
// long as ever.
func TestRetireKeepAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{engines: []*fakeEngine{{serve: func(c *engineConn, _ int) { c.json(200, unary) }}}})
		post := func(used bool) (io.Reader, func()) {
			conn, err := w.public.dial()
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
				if err != nil || string(text) != unary || resp.Close != w.front.retiring.Load() {
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
		w.front.Retire()
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
			t.Errorf("the fresh connection is closed after %v", d)
		}
		time.Sleep(55 * time.Second)
		ask()
		if d := gone(asked); d != time.Minute {
			t.Errorf("the connection is closed after %v", d)
		}
		if d := gone(idle); d != 2*time.Minute {
			t.Errorf("the idle connection is closed after %v", d)
		}
		if err := <-w.ended; err != nil {
			t.Errorf("its end: %v", err)
		}
	})
}

// What outlives the limit is told and cut; a signal drains as ever.
func TestRetireEnds(t *testing.T) {
	for _, signal := range []bool{false, true} {
		t.Run(fmt.Sprintf("signal %t", signal), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, setup{
					engines: []*fakeEngine{{serve: func(c *engineConn, _ int) {
						c.say(streamHead)
						c.chunks(eventA)
						c.hold()
					}}},
					config: func(c *config.Config) { c.Timeouts.StreamIdle = config.Duration(24 * time.Hour) },
				})
				resp := open(t, t.Context(), w.client, completions(true))
				w.stopped.Store(true)
				w.front.Retire()
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
					t.Errorf("cut after %v, want %v", d, limit)
				}
				w.client.CloseIdleConnections()
				if err := <-w.ended; err == nil || !strings.Contains(err.Error(), "1 exchanges were cut after") {
					t.Errorf("its end: %v", err)
				}
			})
		})
	}
}

// GOAWAY stands between two frames, wherever the writes end, not before the first
// one, and once.
func TestGoAway(t *testing.T) {
	frame := func(kind byte, payload string) string {
		return string([]byte{0, 0, byte(len(payload)), kind, 0, 0, 0, 0, 1}) + payload
	}
	frames := []string{frame(4, ""), frame(1, "head"), frame(0, strings.Repeat("x", 200)), frame(8, "1234"), frame(0, "")}
	all := strings.Join(frames, "")
	for size := 1; size <= len(all); size++ {
		for wanted := 0; wanted <= len(all); wanted += size {
			var g goAway
			conn := &sink{}
			for i := 0; i < len(all); i += size {
				if i == wanted {
					g.wanted.Store(true)
					g.put(conn)
				}
				if n, err := g.write(conn, []byte(all[i:min(i+size, len(all))])); err != nil || n != min(size, len(all)-i) {
					t.Fatal(n, err)
				}
			}
			if wanted >= len(all) {
				g.wanted.Store(true)
				g.put(conn)
			}
			got := conn.text.String()
			before, after, found := strings.Cut(got, string(goAwayFrame))
			if !found || before+after != all || !slices.Contains(ends(frames), len(before)) {
				t.Fatalf("writes of %d bytes, wanted after %d: %q", size, wanted, got)
			}
		}
	}
}

// sink keeps what is written.
type sink struct {
	net.Conn
	text strings.Builder
}

func (s *sink) Write(p []byte) (int, error) { return s.text.Write(p) }

// ends are where frames end.
func ends(frames []string) (at []int) {
	n := 0
	for _, f := range frames {
		n += len(f)
		at = append(at, n)
	}
	return at
}
