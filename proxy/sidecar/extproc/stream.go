package extproc

import (
	"context"
	"io"

	service "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

// Stream is one ext_proc stream: one request and its answer. The goroutine of the request uses
// the exported methods. Another goroutine receives the picker's messages until the stream has
// ended, and from Head on a third one sends the answer.
type Stream struct {
	client  *Client
	ctx     context.Context // of the stream
	cancel  context.CancelCauseFunc
	request context.Context // of the request
	detach  func() bool     // keeps the end of request from ending the stream
	grpc    service.ExternalProcessor_ProcessClient
	choice  chan outcome        // from the receiver, once
	changes chan HeaderMutation // of the head of the answer, from the receiver, once
	done    chan struct{}       // closed when the receiver has ended

	feedback feedback
}

// outcome is the end of the first phase of a stream.
type outcome struct {
	decision *Decision
	err      error
}

// open begins a stream. Its goroutines end when the stream ends.
func (c *Client) open(ctx context.Context) *Stream {
	s := &Stream{client: c, request: ctx, choice: make(chan outcome, 1), changes: make(chan HeaderMutation, 1), done: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.detach = context.AfterFunc(ctx, func() { s.cancel(context.Cause(ctx)) })
	s.feedback.init()
	return s
}

// ask sends the request and waits for the decision.
func (s *Stream) ask(r *Request) (*Decision, error) {
	picker, err := s.client.enter() // ended leaves
	if err == nil {
		s.grpc, err = picker.Process(s.ctx)
	}
	if err != nil {
		s.ended()
		return nil, err
	}
	go s.receive(answer{original: r.Body, most: s.client.options.MaxBody, reserve: r.Reserve}) // ends with the stream's context
	s.sendRequest(r)
	o := <-s.choice // comes also if the stream ends
	return o.decision, o.err
}

// sendRequest sends the request. The receiver has the reason of an error.
func (s *Stream) sendRequest(r *Request) {
	if s.grpc.Send(headMessage(r)) != nil {
		return
	}
	for rest := r.Body; len(rest) > 0; {
		part := rest[:min(MaxPart, len(rest))]
		rest = rest[len(part):]
		if s.grpc.Send(bodyMessage(part, len(rest) == 0 && len(r.Trailer) == 0)) != nil {
			return
		}
	}
	if len(r.Trailer) > 0 {
		_ = s.grpc.Send(trailerMessage(r.Trailer)) // the receiver gets the error too
	}
}

// receive receives the picker's messages until the stream ends: first the decision, then the
// answers to the parts of the answer. Of these only the changes of the head count.
func (s *Stream) receive(a answer) {
	defer s.ended()
	if !s.receiveChoice(&a) {
		return
	}
	for {
		m, err := s.grpc.Recv()
		if err != nil {
			return
		}
		if h := m.GetResponseHeaders(); h != nil {
			s.noteHead(true)
			select {
			case s.changes <- mutationOf(h.GetResponse().GetHeaderMutation()):
			default: // the first counts
			}
		}
	}
}

// receiveChoice receives messages up to the decision. It returns false if the stream has ended.
func (s *Stream) receiveChoice(a *answer) bool {
	for {
		m, err := s.grpc.Recv()
		if err != nil {
			if err == io.EOF {
				err = &Error{Reason: StreamClosed}
			}
			if a.endsUnchanged() {
				err = nil
			}
			s.choice <- outcome{&a.decision, err}
			return false
		}
		over, err := a.take(m)
		if err != nil {
			s.choice <- outcome{nil, err}
			s.cancel(err)
			return false
		}
		if over {
			s.choice <- outcome{&a.decision, nil}
			if a.decision.Refusal != nil { // the picker reads no more
				s.cancel(context.Canceled)
				return false
			}
			return true
		}
	}
}

// ended frees what the stream holds. The receiver calls it, or ask if there is no receiver.
func (s *Stream) ended() {
	s.noteHead(false)
	s.detach()
	s.cancel(context.Canceled)
	close(s.done)
	s.client.leave()
}

// Abort ends the stream at once: the picker sees that the request has ended without an answer.
func (s *Stream) Abort() { s.cancel(context.Canceled) }
