package websocket

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	ws "github.com/coder/websocket"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// session is one open WebSocket. The goroutine of run writes the responses; the goroutine of
// read reads the messages.
type session struct {
	bridge  *Bridge
	ws      *ws.Conn
	conn    net.Conn        // below ws
	request *http.Request   // which opened the WebSocket
	ctx     context.Context // parent of the requests; it ends with the client's connection
	cancel  context.CancelFunc
	client  string // for limits

	// turns has two places, so that read never blocks and always notices that the client leaves:
	// one for a turn, because read sends none before the turn that it sent last is over, and one
	// for nil, which stands for a message that was refused.
	turns   chan *turn
	reading atomic.Bool   // a message is arriving
	quiet   chan struct{} // has a place; filled when reading becomes false
	gone    chan struct{} // closed when read has returned
	ending  ending        // set by read before it closes gone
	count   int           // requests so far; only run uses it
}

// ending is a close frame. The zero value is no frame.
type ending struct {
	code   ws.StatusCode
	reason string
}

// run serves the messages until the client leaves, is idle for too long, or must leave.
func (s *session) run(leaving <-chan struct{}) {
	go func() {
		defer close(s.gone)
		defer s.cancel()
		s.ending = s.read()
	}()
	defer func() {
		s.cancel()
		s.ws.CloseNow()
		<-s.gone
		close(s.turns)
		for t := range s.turns {
			if t != nil {
				t.body.Close()
			}
		}
	}()
	if end := s.serveAll(leaving); end.code != 0 {
		_ = s.ws.Close(end.code, end.reason) // the client may be gone
	}
}

// serveAll serves the messages and returns how the WebSocket ends.
func (s *session) serveAll(leaving <-chan struct{}) ending {
	half := s.bridge.idleTimeout() / 2
	idle := time.NewTimer(half)
	defer idle.Stop()
	pinged := false
	for {
		var t *turn
		select {
		case t = <-s.turns:
		case <-s.gone:
			return s.ending
		case <-leaving:
			var coming bool
			if t, coming = s.arriving(); !coming {
				return ending{ws.StatusGoingAway, reasonLeaving}
			}
		case <-idle.C:
			var coming bool
			if t, coming = s.arriving(); !coming && pinged {
				return ending{ws.StatusNormalClosure, reasonIdle}
			} else if !coming {
				pinged = true
				go s.ping(half / 2)
				idle.Reset(half)
				continue
			}
		}
		if t != nil && !s.serve(t) {
			return ending{ws.StatusInternalError, reasonCut}
		}
		pinged = false
		idle.Reset(half)
	}
}

// arriving waits for a message that has begun to arrive; the limits of bodies bound the wait. It
// returns the turn of the message, if the message was not refused. It returns false if no message
// arrives.
func (s *session) arriving() (t *turn, coming bool) {
	for {
		reading := s.reading.Load() // first: read sends the turn before it clears the flag
		select {
		case t = <-s.turns:
			return t, true
		default:
		}
		if !reading {
			return nil, false
		}
		select {
		case t = <-s.turns:
			return t, true
		case <-s.gone:
			return nil, true
		case <-s.quiet: // the flag may have been that of an earlier message
		}
	}
}

// arrived notes that no message is arriving any more.
func (s *session) arrived() {
	s.reading.Store(false)
	select {
	case s.quiet <- struct{}{}:
	default:
	}
}

// ping closes the connection of a client that does not answer within limit.
func (s *session) ping(limit time.Duration) {
	ctx, cancel := context.WithTimeout(s.ctx, limit)
	defer cancel()
	if s.ws.Ping(ctx) != nil {
		s.ws.CloseNow()
	}
}

// read reads messages until the connection ends, or until a message cannot be followed by
// another one.
func (s *session) read() ending {
	var last *turn
	for {
		kind, message, err := s.ws.Reader(context.Background()) // CloseNow ends it
		if err != nil {
			return ending{}
		}
		if last != nil && !last.over.Load() {
			s.fail(openai.NewError(openai.CodeResponseInProgress, "a response of this connection is in progress; wait for its end or open another connection"))
			if _, err := io.CopyN(io.Discard, message, int64(s.bridge.config().Server.MaxBody)+1); err != io.EOF {
				return ending{ws.StatusMessageTooBig, reasonRefused}
			}
			continue
		}
		s.reading.Store(true)
		t, end := s.receive(kind, message)
		if end.code != 0 {
			return end
		}
		if t != nil {
			last = t
			s.turns <- t
		} else if len(s.turns) == 0 {
			s.turns <- nil
		}
		s.arrived()
	}
}

// fail sends an error of the proxy.
func (s *session) fail(e *openai.Error) {
	_ = s.send(appendError(nil, e.Status, nil, e.AppendJSON(nil))) // read notices that the client has left
}

// send sends one message. The listener closes the connection if the client does not take the
// message within server.write_timeout.
func (s *session) send(message []byte) error {
	return s.ws.Write(context.Background(), ws.MessageText, message)
}

// serve runs the request of a turn, which is over then. It returns false if the response was
// cut: the client must not take the messages so far for a whole response.
func (s *session) serve(t *turn) (whole bool) {
	defer func() {
		t.over.Store(true)
		t.body.Close()
		if v := recover(); v != nil && v != http.ErrAbortHandler { // handlers cut a response with ErrAbortHandler
			panic(v)
		}
	}()
	s.count++
	a := &answer{session: s, turn: t, header: make(http.Header)}
	s.bridge.handler.ServeHTTP(a, t.request(s.ctx, s.request, s.count))
	a.finish()
	return true
}
