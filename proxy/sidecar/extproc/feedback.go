package extproc

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// backlog is the largest part of an answer that waits to be sent to the picker, in bytes.
const backlog = 256 << 10

// errSlow ends a stream whose picker reads too slowly.
var errSlow = errors.New("the picker reads the answer too slowly")

// feedback is the part of an answer that the picker has not received yet.
type feedback struct {
	wake chan struct{} // there is something to send
	room chan struct{} // something has been sent

	mu      sync.Mutex
	pending []byte    // guarded by mu
	over    bool      // pending ends the answer; guarded by mu
	shown   time.Time // of the head, until the picker has answered it; zero: the picker owes nothing; guarded by mu
	begun   bool      // the sender runs; used by the request's goroutine
}

func (f *feedback) init() {
	f.wake, f.room = make(chan struct{}, 1), make(chan struct{}, 1)
}

// signal wakes the goroutine that waits for c.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// add appends as much of p as there is room for.
func (f *feedback) add(p []byte) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n = min(len(p), backlog-len(f.pending))
	f.pending = append(f.pending, p[:n]...)
	return n
}

// finish marks the end of the answer.
func (f *feedback) finish() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.over = true
}

// take returns what is to be sent, in exchange for an empty buffer.
func (f *feedback) take(empty []byte) (part []byte, over bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	part, f.pending = f.pending, empty[:0]
	return part, f.over
}

// owe notes that the picker is to answer the head from now on.
func (f *feedback) owe() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.shown = time.Now()
}

// owed returns since when the picker has owed the answer to the head; zero: it owes nothing. Then
// the picker owes nothing any more.
func (f *feedback) owed() (since time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	since, f.shown = f.shown, time.Time{}
	return since
}

// noteHead notes that the picker has answered the head, or that the stream has ended, for the
// answers that follow. All heads are trials of a half-open circuit, because none of them waits.
func (s *Stream) noteHead(answered bool) {
	since := s.feedback.owed()
	if since.IsZero() {
		return
	}
	now, heads := time.Now(), &s.client.heads
	if now.Sub(since) >= s.client.options.Timeout {
		heads.Failure()
	} else if answered && heads.Circuit(now) != circuit.Open {
		heads.Success()
	}
}

// Head shows the picker the head of the answer, and returns the changes that the picker makes to
// its lines. served is the endpoint that has answered, as the picker named it; "" if none has. A
// picker that does not answer in time, or whose stream has ended, changes nothing. While the
// picker is late with the heads of other answers, Head does not wait. late reports that Head has
// not waited, or in vain. Call Head before Body and End.
//
// From Head on, the end of the request's context does not end the stream, because a client may
// leave as soon as it has the whole answer. The caller must call End or Abort.
func (s *Stream) Head(status int, lines []upstream.Field, served string) (changes HeaderMutation, late bool) {
	if s.ctx.Err() != nil {
		return HeaderMutation{}, false
	}
	s.feedback.begun = true
	defer s.detach()
	s.feedback.owe()
	head := answerHeadMessage(status, lines, served)
	waits := s.client.heads.Closed() // before the head is sent: a quick answer closes the circuit
	go func() {                      // ends with the answer, or with the stream's context
		if s.grpc.Send(head) == nil {
			s.sendAnswer()
		}
	}()
	if !waits {
		return HeaderMutation{}, true
	}
	limit := time.NewTimer(s.client.options.Timeout)
	defer limit.Stop()
	select {
	case m := <-s.changes:
		return m, false
	case <-limit.C:
		s.client.heads.Failure()
		return HeaderMutation{}, true
	case <-s.ctx.Done():
		return HeaderMutation{}, false
	}
}

// Body shows the picker a part of the answer's body. It copies p and waits only for a picker
// that is far behind, once, and not while the picker is late with other answers: then the picker
// sees no more of the answer. lost reports that this has happened now.
func (s *Stream) Body(p []byte) (lost bool) {
	if !s.feedback.begun {
		return false
	}
	var late <-chan time.Time
	for len(p) > 0 && s.ctx.Err() == nil {
		n := s.feedback.add(p)
		p = p[n:]
		signal(s.feedback.wake)
		if len(p) == 0 {
			break
		}
		if late == nil {
			if !s.client.heads.Closed() {
				s.cancel(errSlow)
				return true
			}
			t := time.NewTimer(s.client.options.Timeout)
			defer t.Stop()
			late = t.C
		}
		select {
		case <-s.feedback.room:
		case <-s.ctx.Done():
		case <-s.request.Done(): // the caller ends the stream
			return false
		case <-late:
			s.client.heads.Failure()
			s.cancel(errSlow)
			return true
		}
	}
	return false
}

// sendAnswer sends the body of the answer as it comes.
func (s *Stream) sendAnswer() {
	var buffer []byte
	for {
		select {
		case <-s.feedback.wake:
		case <-s.ctx.Done():
			return
		}
		part, over := s.feedback.take(buffer)
		signal(s.feedback.room)
		for rest := part; len(rest) > 0 || over; {
			n := min(MaxPart, len(rest))
			last := over && n == len(rest)
			if s.grpc.Send(answerBodyMessage(rest[:n], last)) != nil {
				return // the receiver ends too
			}
			if rest = rest[n:]; last {
				_ = s.grpc.CloseSend() // never fails
				return
			}
		}
		buffer = part
	}
}

// End ends the stream after the whole answer has been shown, or aborts the stream if the answer
// has never begun. It does not wait: the picker has some seconds to read the rest.
func (s *Stream) End() {
	if !s.feedback.begun {
		s.Abort()
		return
	}
	s.feedback.finish()
	signal(s.feedback.wake)
	late := time.AfterFunc(finishLimit, func() { s.cancel(context.DeadlineExceeded) })
	context.AfterFunc(s.ctx, func() { late.Stop() })
}
