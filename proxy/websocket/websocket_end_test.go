package websocket_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// TestWebSocketClientLeaves: the engine's request is cancelled, in each way to leave.
func TestWebSocketClientLeaves(t *testing.T) {
	front, _ := responseEvents("resp_1")
	for name, leave := range map[string]func(*socket){
		"close frame": func(c *socket) { c.Close(websocket.StatusNormalClosure, "") },
		"cut":         func(c *socket) { c.CloseNow() },
		"broken frame": func(c *socket) {
			// A message that is larger than all limits, while the response runs.
			c.Write(t.Context(), websocket.MessageText, []byte(strings.Repeat("a", 200_000)))
			for _, _, err := c.Read(t.Context()); err == nil; _, _, err = c.Read(t.Context()) {
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			cancelled := make(chan bool)
			w := world.New(t, world.Setup{Sockets: true, Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) {
				c.Send(world.StreamHead)
				c.Chunks(front)
				c.Hold()
				close(cancelled)
			}}}, Config: func(c *config.Config) { c.Server.MaxBody = 100_000 }})
			c := openSocket(w)
			c.write(create)
			c.wants("response.created", "response.output_text.delta")
			leave(c)
			<-cancelled
			w.Wait()
			w.Outcome(telemetry.OutcomeCancelled)
		})
	}
}

// TestWebSocketCut: a response that a filter cuts ends the WebSocket, because the client must not
// take it for a whole response.
func TestWebSocketCut(t *testing.T) {
	s := world.Wrapped(func(http.Handler, http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	s.Sockets, s.Engines = true, []*world.Engine{{}}
	c := openSocket(world.New(t, s))
	c.write(create)
	c.ends(websocket.StatusInternalError)
}

// TestWebSocketDrain: idle WebSockets are closed at once, and a running response ends before its
// WebSocket is closed. A successor has the same effect as a drain.
func TestWebSocketDrain(t *testing.T) {
	front, last := responseEvents("resp_1")
	for name, leave := range map[string]func(*world.World){
		"drain":     func(w *world.World) { w.End() },
		"successor": func(w *world.World) { w.Front.StopAccepting() },
	} {
		t.Run(name, func(t *testing.T) {
			proceed := make(chan bool)
			w := world.New(t, world.Setup{Sockets: true, Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) {
				c.Send(world.StreamHead)
				c.Chunks(front)
				<-proceed
				c.Chunks(last)
				c.Send("0\r\n\r\n")
			}}}})
			idle, busy := openSocket(w), openSocket(w)
			busy.write(create)
			busy.wants("response.created", "response.output_text.delta")
			leave(w)
			idle.ends(websocket.StatusGoingAway)
			close(proceed)
			busy.wants("response.completed")
			busy.ends(websocket.StatusGoingAway)
			if err := <-w.Over; err != nil {
				t.Error(err)
			}
			w.Over <- nil
		})
	}
}

// TestWebSocketCutByDrain: a response that does not end within the drain's limit ends with an error,
// and the server does not wait for a client that does not close its WebSocket.
func TestWebSocketCutByDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		front, _ := responseEvents("resp_1")
		w := world.New(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			c.Chunks(front)
			c.Hold()
		}}}})
		silent, c := openSocket(w), openSocket(w)
		c.write(create)
		c.wants("response.created", "response.output_text.delta")
		w.End()
		c.fails(502, "draining")
		c.ends(websocket.StatusGoingAway)
		if err := <-w.Over; err == nil || !strings.Contains(err.Error(), "1 exchanges were cut") {
			t.Errorf("got %v", err)
		}
		w.Over <- nil
		if _, _, err := silent.Read(t.Context()); err == nil {
			t.Error("a WebSocket is open after the drain")
		}
	})
}

// TestWebSocketIdle: a WebSocket without a response ends after server.idle_timeout. A client that
// does not answer a ping loses it.
func TestWebSocketIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		front, last := responseEvents("resp_1")
		w := world.New(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			c.Chunks(front)
			time.Sleep(5 * time.Minute)
			c.Chunks(last)
			c.Send("0\r\n\r\n")
		}}}, Config: func(c *config.Config) {
			c.Server.IdleTimeout, c.Timeouts.StreamIdle = config.Duration(time.Minute), config.Duration(10*time.Minute)
		}})
		dead := openSocket(w) // which does not read the ping
		c := openSocket(w)
		c.write(create)
		c.wants("response.created", "response.output_text.delta", "response.completed")
		begin := time.Now()
		c.ends(websocket.StatusNormalClosure)
		if d := time.Since(begin); d != time.Minute {
			t.Errorf("the idle WebSocket ended after %v", d)
		}
		if _, _, err := dead.Read(t.Context()); websocket.CloseStatus(err) != -1 {
			t.Errorf("the client that does not answer: got %v, want no close frame", err)
		}
	})
}

// TestWebSocketSlowMessage: a message has the time limits of a body.
func TestWebSocketSlowMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := world.New(t, world.Setup{Engines: []*world.Engine{{}}, Config: func(c *config.Config) {
			c.Server.ReadTimeout, c.Server.MinBodyRate = config.Duration(20*time.Second), 0
		}})
		c := openSocket(w)
		m, err := c.Writer(t.Context(), websocket.MessageText)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(m, strings.Repeat(" ", 10_000)); err != nil { // more than the client's buffer
			t.Fatal(err)
		}
		begin := time.Now()
		c.fails(408, "body_timeout")
		c.ends(websocket.StatusPolicyViolation)
		if d := time.Since(begin); d != 20*time.Second {
			t.Errorf("the message ended after %v", d)
		}
	})
}

// TestWebSocketPlaces: a WebSocket keeps its place among the connections until it ends.
func TestWebSocketPlaces(t *testing.T) {
	w := world.New(t, world.Setup{Sockets: true, Engines: []*world.Engine{{}}, Config: func(c *config.Config) { c.Limits.MaxConnections, c.Limits.MaxConnectionsPerAddress = 3, 2 }})
	w.Prometheus.MustRegister(w.Front)
	first, second := openSocket(w), openSocket(w)
	if got := w.Metric("pdproxy_connections_open", "tcp"); got != 2 {
		t.Errorf("got %v open connections, want 2", got)
	}
	if _, resp, err := dialSocket(w, "/v1/responses"); err == nil { // the answer may come before the handshake is sent
		t.Errorf("a third WebSocket of one address: got %v", resp)
	}
	if got := w.Metric("pdproxy_connections_refused_total", "max_connections_per_address"); got != 1 {
		t.Errorf("got %v refused connections, want 1", got)
	}
	for _, c := range []*socket{first, second} {
		if err := c.Close(websocket.StatusNormalClosure, ""); err != nil {
			t.Error(err)
		}
	}
	for w.Metric("pdproxy_connections_open", "tcp") > 0 {
		time.Sleep(time.Millisecond)
	}
}
