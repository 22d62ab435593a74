package websocket_test

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// responseEvents are the events of a whole response with that id. The front is all but the last one.
func responseEvents(id string) (front, last string) {
	event := func(kind, more string) string {
		return fmt.Sprintf("event: %s\ndata: {\"type\":%q%s}\n\n", kind, kind, more)
	}
	return event("response.created", `,"response":{"id":"`+id+`"}`) + event("response.output_text.delta", `,"delta":"a"`),
		event("response.completed", `,"response":{"id":"`+id+`"}`)
}

// socket is a client's WebSocket.
type socket struct {
	*websocket.Conn
	t *testing.T
}

// socket opens a WebSocket to the Responses API.
func openSocket(w *world.World, header ...string) *socket {
	w.T.Helper()
	s, resp, err := dialSocket(w, "/v1/responses", header...)
	if err != nil {
		w.T.Fatalf("%v: %+v", err, resp)
	}
	return s
}

func dialSocket(w *world.World, path string, header ...string) (*socket, *http.Response, error) {
	h := http.Header{}
	for i := 0; i < len(header); i += 2 {
		h.Add(header[i], header[i+1])
	}
	c, resp, err := websocket.Dial(w.T.Context(), "ws://proxy"+path, &websocket.DialOptions{HTTPClient: w.Client, HTTPHeader: h})
	if err != nil {
		return nil, resp, err
	}
	w.T.Cleanup(func() { c.CloseNow() })
	c.SetReadLimit(-1)
	return &socket{c, w.T}, resp, nil
}

func (s *socket) write(message string) {
	s.t.Helper()
	if err := s.Write(s.t.Context(), websocket.MessageText, []byte(message)); err != nil {
		s.t.Fatal(err)
	}
}

// next returns the next message.
func (s *socket) next() string {
	s.t.Helper()
	_, b, err := s.Read(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	return string(b)
}

// wants reads messages with these types.
func (s *socket) wants(kinds ...string) {
	s.t.Helper()
	for _, kind := range kinds {
		if got := s.next(); !strings.HasPrefix(got, `{"type":"`+kind+`"`) {
			s.t.Fatalf("got %s, want type %s", got, kind)
		}
	}
}

// fails reads an error message.
func (s *socket) fails(status int, code string) {
	s.t.Helper()
	var m struct {
		Type   string
		Status int
		Error  struct{ Code, Message, Type string }
	}
	got := s.next()
	if err := json.Unmarshal([]byte(got), &m); err != nil || m.Type != "error" || m.Status != status || m.Error.Code != code || m.Error.Message == "" || m.Error.Type == "" {
		s.t.Errorf("got %s, %v, want %d %s", got, err, status, code)
	}
}

// ends reads the end of the WebSocket.
func (s *socket) ends(code websocket.StatusCode) {
	s.t.Helper()
	_, got, err := s.Read(s.t.Context())
	if websocket.CloseStatus(err) != code {
		s.t.Errorf("got %q, %v, want status %d", got, err, code)
	}
}

const create = `{"type":"response.create","model":"m","input":"x"}`

// TestWebSocket: each message runs as one ordinary request, also for filters, keys and limits.
func TestWebSocket(t *testing.T) {
	var seen []string // written by one request at a time
	s := world.Wrapped(func(h http.Handler, w http.ResponseWriter, r *http.Request) {
		seen = append(seen, r.Method+" "+r.URL.Path)
		h.ServeHTTP(w, r)
	})
	s.Sockets, s.Keys = true, world.KeyLine("n", "k")
	e := &world.Engine{Serve: func(c *world.Conn, nth int) {
		front, last := responseEvents(fmt.Sprintf("resp_%d", nth))
		c.Stream(": keep-alive\n\n", front[:20], front[20:], last, world.Done)
	}}
	s.Engines = []*world.Engine{e}
	s.Config = func(c *config.Config) { c.Limits.PerClient, c.Limits.MaxExchanges = 1, 1 }
	w := world.New(t, s)
	c := openSocket(w, "Authorization", "Bearer k", "X-Custom", "1", "X-Request-Id", "r")
	for _, message := range []string{
		create,
		` {"previous_response_id":"resp_1", "model":"m","stream":false,"background":false,"generate":true,"stream_id":null,"input":"y","type":"response.create"} `,
		create,
	} {
		c.write(message)
		c.wants("response.created", "response.output_text.delta", "response.completed")
	}
	if err := c.Close(websocket.StatusNormalClosure, ""); err != nil {
		t.Error(err)
	}
	w.Wait()
	if _, ok := w.Explain("r-3"); !ok {
		t.Error("the requests have no ids of their own")
	}
	legs := slices.DeleteFunc(e.Seen(), func(l world.Leg) bool { return l.Method == "GET" }) // the search for the earlier response
	if len(legs) != 3 || len(seen) != 3 || seen[0] != "POST /v1/responses" {
		t.Fatalf("got %d legs; the filter saw %q", len(legs), seen)
	}
	for i, want := range []string{
		`{"stream":true,"model":"m","input":"x"}`,
		` {"previous_response_id":"resp_1", "model":"m","stream":true,"background":false,"input":"y"} `,
	} {
		if legs[i].Body != want {
			t.Errorf("got body %s, want %s", legs[i].Body, want)
		}
	}
	for name := range legs[0].Header {
		if name == "Upgrade" || strings.HasPrefix(name, "Sec-") {
			t.Errorf("the engine received a line of the handshake: %s", name)
		}
	}
	if legs[0].Header.Get("X-Custom") != "1" {
		t.Errorf("got header %v", legs[0].Header)
	}
}

// TestWebSocketErrors: after an error of one message the WebSocket serves the next one.
func TestWebSocketErrors(t *testing.T) {
	var behave func(c *world.Conn)
	w := world.New(t, world.Setup{Sockets: true, Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { behave(c) }}},
		Config: func(c *config.Config) { c.Server.MaxBody, c.Retry.Attempts = 100_000, 1 }})
	front, last := responseEvents("resp_1")
	whole := func(c *world.Conn) { c.Stream(front, last) }
	answers := func(status int, body string) func(*world.Conn) {
		return func(c *world.Conn) { c.JSON(status, body) }
	}
	c := openSocket(w)
	for _, tt := range []struct {
		name, message string
		behave        func(*world.Conn)
		begins        bool // the client receives events before the error
		status        int
		code          string
	}{
		{"no JSON", `{"type":`, whole, false, 400, "invalid_json"},
		{"no object", `[]`, whole, false, 400, "invalid_json"},
		{"empty", ``, whole, false, 400, "invalid_json"},
		{"a key twice", `{"type":"response.create","type":"x"}`, whole, false, 400, "duplicate_key"},
		{"no type", `{"model":"m"}`, whole, false, 400, "unsupported_message"},
		{"unknown type", `{"type":"response.cancel"}`, whole, false, 400, "unsupported_message"},
		{"wrong type", `{"type":1}`, whole, false, 400, "unsupported_message"},
		{"background", `{"type":"response.create","background":true}`, whole, false, 400, "unsupported_message"},
		{"no generation", `{"type":"response.create","generate":false}`, whole, false, 400, "unsupported_message"},
		{"streams", `{"type":"response.create","stream_id":"a"}`, whole, false, 400, "unsupported_message"},
		{"wrong field", `{"type":"response.create","model":1}`, whole, false, 400, "invalid_type"},
		{"unknown model", `{"type":"response.create","model":"no","input":"x"}`, whole, false, 404, "model_not_found"},
		{"refused by the engine", create, answers(400, `{"error":{"message":"m","type":"BadRequestError","param":null,"code":400}}`), false, 400, "400"},
		{"no stream", create, answers(200, `{"id":"resp_1"}`), false, 502, "leg_failed"},
		{"the engine fails", create, (*world.Conn).HangUp, false, 502, "leg_failed"},
		{"the engine dies", create, func(c *world.Conn) {
			c.Send(world.StreamHead)
			c.Chunks(front)
			c.HangUp()
		}, true, 502, "stream_broken"},
	} {
		behave = tt.behave
		c.write(tt.message)
		if tt.begins {
			c.wants("response.created", "response.output_text.delta")
		}
		c.fails(tt.status, tt.code)
		behave = whole
		c.write(create)
		c.wants("response.created", "response.output_text.delta", "response.completed")
		if t.Failed() {
			t.Fatal(tt.name)
		}
	}
	c.write(`{"type":"response.create","input":"` + strings.Repeat("a", 100_000) + `"}`)
	c.fails(413, "body_too_large")
	c.ends(websocket.StatusMessageTooBig)
	c = openSocket(w)
	if err := c.Write(t.Context(), websocket.MessageBinary, []byte(create)); err != nil {
		t.Fatal(err)
	}
	c.fails(400, "unsupported_message")
	c.ends(websocket.StatusUnsupportedData)
	for _, text := range []string{"\xff", `{"type":"response.create","input":"` + "\xc3\x28" + `"}`, `{"type":"response.create","input":"` + "\xed\xa0\x80" + `"}`, `{"type":"response.create"}` + "\xe2\x82"} {
		c = openSocket(w)
		c.write(text)
		c.ends(websocket.StatusInvalidFramePayloadData)
	}
}

// TestWebSocketOfFilter: an error of a filter keeps its text and its status.
func TestWebSocketOfFilter(t *testing.T) {
	s := world.Wrapped(func(_ http.Handler, w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "denied by the filter", http.StatusForbidden)
	})
	s.Sockets, s.Engines = true, []*world.Engine{{}}
	c := openSocket(world.New(t, s))
	c.write(create)
	_, data, err := c.Read(t.Context())
	if err != nil || !strings.Contains(string(data), `"status":403,"error":{"code":null,"message":"denied by the filter","param":null,"type":"permission_error"}`) {
		t.Errorf("got %s, %v", data, err)
	}
}

// TestWebSocketMemory: a message that does not fit in the memory for requests gets an error.
func TestWebSocketMemory(t *testing.T) {
	w := world.New(t, world.Setup{Sockets: true, Engines: []*world.Engine{{}}, Config: func(c *config.Config) { c.Limits.BufferMemory = 64 << 10 }})
	c := openSocket(w)
	c.write(`{"type":"response.create","input":"` + strings.Repeat("a", 200_000) + `"}`)
	c.fails(503, "memory_limit")
	c.ends(websocket.StatusTryAgainLater)
}

// TestWebSocketOneResponse: one response runs at a time. A message after the last event is in time,
// even if the engine has not ended its answer.
func TestWebSocketOneResponse(t *testing.T) {
	front, last := responseEvents("resp_1")
	proceed := make(chan bool)
	w := world.New(t, world.Setup{Sockets: true, Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) {
		c.Send(world.StreamHead)
		c.Chunks(front)
		<-proceed
		c.Chunks(last)
		<-proceed
		c.Send("0\r\n\r\n")
	}}}})
	c := openSocket(w)
	c.write(create)
	c.wants("response.created", "response.output_text.delta")
	c.write(create)
	c.fails(409, "response_in_progress")
	proceed <- true
	c.wants("response.completed")
	c.write(create)
	c.write(create)
	c.fails(409, "response_in_progress")
	proceed <- true
	c.wants("response.created", "response.output_text.delta")
	proceed <- true
	c.wants("response.completed")
	proceed <- true
}

// TestWebSocketHandshake: keys and origins are checked before the connection becomes a WebSocket.
func TestWebSocketHandshake(t *testing.T) {
	const page = "https://chat.example"
	for _, origins := range [][]string{nil, {page}, {"*"}} {
		w := world.New(t, world.Setup{Sockets: true, Keys: world.KeyLine("n", "k"), Engines: []*world.Engine{{}}, Config: func(c *config.Config) { c.Server.CORSOrigins = origins }})
		status := func(allowed bool) int {
			if allowed {
				return 101
			}
			return 403
		}
		for _, tt := range []struct {
			path   string
			header []string
			status int
		}{
			{"/v1/responses", []string{"Authorization", "Bearer k"}, 101},
			{"/v1/responses/", []string{"X-Api-Key", "k"}, 101},
			{"/v1/responses", nil, 401},
			{"/v1/responses", []string{"Authorization", "Bearer no"}, 401},
			{"/v1/responses", []string{"Authorization", "Bearer k", "Origin", page}, status(origins != nil)},
			{"/v1/responses", []string{"Authorization", "Bearer k", "Origin", "https://other.example"}, status(origins != nil && origins[0] == "*")},
			{"/v1/responses", []string{"Authorization", "Bearer k", "Origin", "http://proxy"}, status(origins != nil && origins[0] == "*")}, // the proxy has no pages
			{"/v1/responses", []string{"Authorization", "Bearer k", "Origin", ""}, status(origins != nil && origins[0] == "*")},
			{"/v1/responses", []string{"Authorization", "Bearer k", "Origin", page, "Origin", "null"}, 403},
			{"/v1/responses", []string{"Authorization", "Bearer k", "OpenAI-Beta", "responses_websockets=2026-02-06"}, 426}, // Codex
			{"/v1/chat/completions", []string{"Authorization", "Bearer k"}, 426},
			{"/v1/nothing", []string{"Authorization", "Bearer k"}, 404},
		} {
			if len(tt.header) == 6 && origins == nil {
				continue // without origins no rule reads the second line
			}
			c, resp, err := dialSocket(w, tt.path, tt.header...)
			if resp == nil || resp.StatusCode != tt.status || (c == nil) != (tt.status != 101) {
				t.Errorf("origins %q, %s %q: got %v, %v, want %d", origins, tt.path, tt.header, resp, err, tt.status)
				continue
			}
			if c == nil {
				if b, err := io.ReadAll(resp.Body); err != nil || !strings.HasPrefix(string(b), `{"error":{"message":`) || resp.Header.Get("X-Request-Id") == "" {
					t.Errorf("%s %q: got %s, %v", tt.path, tt.header, b, err)
				}
			}
		}
	}
}

// TestWebSocketByHand: a handshake and frames as RFC 6455 has them, without a library. Bytes of
// frames may look like a broken request of HTTP.
func TestWebSocketByHand(t *testing.T) {
	front, last := responseEvents("resp_1")
	e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.Stream(front, last) }}
	w := world.New(t, world.Setup{Sockets: true, Engines: []*world.Engine{e}})
	head := "GET /v1/responses HTTP/1.1\r\nHost: proxy\r\nConnection: keep-alive, Upgrade, x-hop\r\nX-Hop: 1\r\nUpgrade: WebSocket\r\n"
	const key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
	for _, tt := range []struct {
		name, lines string
		status      int
	}{
		{"good", "Sec-WebSocket-Version: 13\r\n" + key, 101},
		{"no key", "Sec-WebSocket-Version: 13\r\n", 400},
		{"two keys", "Sec-WebSocket-Version: 13\r\n" + key + key, 400},
		{"wrong version", "Sec-WebSocket-Version: 8\r\n" + key, 400},
		{"body", "Sec-WebSocket-Version: 13\r\nContent-Length: 2\r\n" + key, 400},
	} {
		conn, err := w.DialPublic(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, head+tt.lines+"\r\n"); err != nil {
			t.Fatal(err)
		}
		if tt.name == "body" {
			io.WriteString(conn, "{}")
		}
		br := bufio.NewReader(conn)
		resp, err := http.ReadResponse(br, nil)
		if err != nil || resp.StatusCode != tt.status {
			t.Fatalf("%s: got %+v, %v", tt.name, resp, err)
		}
		if tt.status != 101 {
			if b, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(b), `"code":"unsupported_message"`) {
				t.Errorf("%s: got %s, %v", tt.name, b, err)
			}
			continue
		}
		if got := resp.Header.Get("Sec-WebSocket-Accept"); got != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" { // RFC 6455, 1.3
			t.Errorf("got key %q", got)
		}
		var frames []byte
		for i, part := range []string{create[:9], create[9:]} { // a message in two frames with a ping between them
			frames = append(frames, byte(1-i)|byte(i<<7), 0x80|byte(len(part)), '\n', 'a', '\r', '\n')
			for j := range len(part) {
				frames = append(frames, part[j]^"\na\r\n"[j%4])
			}
			if i == 0 {
				frames = append(frames, 0x89, 0x80, 0, 0, 0, 0)
			}
		}
		for _, b := range frames {
			conn.Write([]byte{b})
		}
		var got []string
		for len(got) < 4 {
			h := make([]byte, 2)
			if _, err := io.ReadFull(br, h); err != nil {
				t.Fatal(err)
			}
			n := int(h[1])
			if n == 126 {
				var long [2]byte
				io.ReadFull(br, long[:])
				n = int(binary.BigEndian.Uint16(long[:]))
			}
			text := make([]byte, n)
			if _, err := io.ReadFull(br, text); err != nil {
				t.Fatal(err)
			}
			got = append(got, fmt.Sprintf("%x %.26s", h[0], text))
		}
		want := []string{"8a ", `81 {"type":"response.created"`, `81 {"type":"response.output_te`, `81 {"type":"response.complete`}
		for i := range want {
			if !strings.HasPrefix(got[i], want[i][:min(len(want[i]), 28)]) {
				t.Errorf("got frames %q", got)
			}
		}
		if leg := e.Seen()[0]; leg.Body != `{"stream":true,"model":"m","input":"x"}` || leg.Header.Get("X-Hop") != "" {
			t.Errorf("the engine received %+v", leg)
		}
	}
}
