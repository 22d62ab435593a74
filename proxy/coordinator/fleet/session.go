package fleet

import (
	"bytes"
	"context"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
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
	m.update.Lease, m.update.TookUs = lease, 0
	m.out = fleetpb.AppendFast(m.out[:0], &m.update)
	s.link.Send(kindOf(fleetpb.Kind_KIND_RELEASE), m.out, false)
}

// Message implements link.Handler. It ignores the kinds and topics of later versions.
func (s *session) Message(kind uint8, payload []byte) error {
	switch fleetpb.Kind(kind) {
	case fleetpb.Kind_KIND_BUDGETS:
		var p published
		if err := p.read(payload); err != nil {
			return err
		}
		s.client.budgets.Load().tell(p.states)
		return nil
	case fleetpb.Kind_KIND_TOPIC:
		return s.topic(payload)
	}
	return nil
}

func (s *session) topic(payload []byte) error {
	var m fleetpb.Topic
	if err := decode(payload, &m, "a topic"); err != nil {
		return err
	}
	if topic := Topic(min(m.Topic, uint32(topics))); topic != TopicForms {
		if s.client.o.OnTopic != nil && topic < topics {
			return s.client.o.OnTopic(topic, m.Value)
		}
		return nil
	}
	d, err := readDemand(m.Value)
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

// maxAsks bounds the coordinator's requests that run at the same time.
const maxAsks = 16

// Call implements link.Handler. A call of a later version gets an empty answer.
func (s *session) Call(number uint32, kind uint8, payload []byte) error {
	if fleetpb.Kind(kind) != fleetpb.Kind_KIND_ADMIN {
		return s.link.Answer(number, nil)
	}
	var m fleetpb.AdminRequest
	if err := decode(payload, &m, "a request to the admin surface"); err != nil {
		return err
	}
	if s.client.o.Admin == nil {
		return s.link.Answer(number, adminAnswer(http.StatusServiceUnavailable, "", nil))
	}
	if s.asks.Add(1) > maxAsks {
		s.asks.Add(-1)
		return s.link.Answer(number, adminAnswer(http.StatusServiceUnavailable, "", nil))
	}
	s.asked.Go(func() {
		defer s.asks.Add(-1)
		s.link.Answer(number, s.client.admin(s.ctx, m.Method, m.Path, m.Body))
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
	out := adminAnswer(w.status, w.header.Get("Content-Type"), w.body.Bytes())
	if len(out) > link.MaxFrame {
		return adminAnswer(http.StatusInsufficientStorage, "", nil)
	}
	return out
}

func adminAnswer(status int, contentType string, body []byte) []byte {
	return fleetpb.Append(nil, &fleetpb.AdminAnswer{Status: uint32(status), ContentType: contentType, Body: body})
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
