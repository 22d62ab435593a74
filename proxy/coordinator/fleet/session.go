package fleet

import (
	"bytes"
	"context"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/wire"
)

// session is a worker's connection to a coordinator, and the Handler of its frames.
type session struct {
	client  *Client
	link    *link.Conn
	process uint64 // of the coordinator
	ctx     context.Context
	entered bool          // the coordinator has sent its topics; used by the reader
	last    atomic.Uint64 // number of the last lease
	doubted atomic.Uint64 // link.Reads()+1 at the time of a late call; 0: none
	asks    atomic.Int32  // running requests of the coordinator
	asked   sync.WaitGroup
}

// doubt marks the session as suspect. After one late call, the next calls would probably
// be late too, until bytes arrive from the peer.
func (s *session) doubt() { s.doubted.Store(s.link.Reads() + 1) }

func (s *session) suspect() bool {
	at := s.doubted.Load()
	return at != 0 && at == s.link.Reads()+1
}

// drop informs the coordinator that a lease has ended or is not needed.
func (s *session) drop(lease uint64, m *scratch) {
	m.out = wire.AppendUint(m.out[:0], lease)
	s.link.Send(kindRelease, m.out, false)
}

// Message implements link.Handler.
func (s *session) Message(kind uint8, payload []byte) error {
	if kind == kindBudgets {
		var p published
		if err := p.read(payload); err != nil {
			return err
		}
		s.client.budgets.Load().tell(p.states)
		return nil
	}
	if kind != kindTopic || len(payload) == 0 || payload[0] >= byte(topics) {
		return link.Garbage("an unknown message")
	}
	topic, value := Topic(payload[0]), payload[1:]
	if topic != TopicForms {
		if s.client.o.OnTopic != nil {
			return s.client.o.OnTopic(topic, value)
		}
		return nil
	}
	d, err := readDemand(value)
	if err != nil {
		return err
	}
	s.client.forms.Store(&d)
	if !s.entered { // all topics have arrived before, with the numbers of instances
		s.entered = true
		s.client.enter(s)
	}
	return nil
}

// mostAsks bounds the coordinator's requests that run at the same time.
const mostAsks = 16

// Call implements link.Handler.
func (s *session) Call(number uint32, kind uint8, payload []byte) error {
	if kind != kindAsk {
		return link.Garbage("an unknown call")
	}
	r := newReader(payload)
	method, path := string(r.Text()), string(r.Text())
	if r.Failed() {
		return link.Garbage("a request to the admin surface")
	}
	if s.client.o.Admin == nil || s.asks.Add(1) > mostAsks {
		s.asks.Add(-1)
		return s.link.Answer(number, wire.AppendText(wire.AppendUint(nil, http.StatusServiceUnavailable), ""))
	}
	body := bytes.Clone(r.Rest())
	s.asked.Go(func() {
		defer s.asks.Add(-1)
		s.link.Answer(number, s.client.admin(s.ctx, method, path, body))
		s.link.Flush()
	})
	return nil
}

// admin answers a request by the admin routes.
func (c *Client) admin(ctx context.Context, method, path string, body []byte) []byte {
	w := &recorder{header: make(http.Header), status: http.StatusOK}
	r, err := http.NewRequestWithContext(ctx, method, path, bytes.NewReader(body))
	if err != nil {
		w.status = http.StatusBadRequest
	} else {
		c.o.Admin.ServeHTTP(w, r)
	}
	out := wire.AppendText(wire.AppendUint(nil, w.status), w.header.Get("Content-Type"))
	if len(out)+w.body.Len() > link.MostFrame {
		return wire.AppendText(wire.AppendUint(nil, http.StatusInsufficientStorage), "")
	}
	return append(out, w.body.Bytes()...)
}

// recorder is a ResponseWriter that stores the answer.
type recorder struct {
	header http.Header
	body   bytes.Buffer
	status int
	begun  bool
}

// Header implements http.ResponseWriter.
func (w *recorder) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter.
func (w *recorder) WriteHeader(status int) {
	if !w.begun && status >= 200 {
		w.status, w.begun = status, true
	}
}

// Write implements http.ResponseWriter.
func (w *recorder) Write(p []byte) (int, error) {
	w.begun = true
	return w.body.Write(p)
}
