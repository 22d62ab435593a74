package extproc

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestEndOutlivesRequest: the picker sees the end of an answer although the request's context
// ends at once, after End, or before End because the client has left with the whole answer.
func TestEndOutlivesRequest(t *testing.T) {
	for _, end := range []func(*Stream, func()){
		func(s *Stream, leave func()) { s.End(); leave() },
		func(s *Stream, leave func()) { leave(); synctest.Wait(); s.End() },
	} {
		outlives(t, end)
	}
}

func outlives(t *testing.T, end func(s *Stream, leave func())) {
	bubble(t, func(t *testing.T) {
		ended := make(chan answered, 1)
		_, c := started(t, Options{}, func(s *call) error {
			_, body, _ := s.request()
			s.Send(headers(set(HeaderDestination, "10.0.0.1:80")))
			s.Send(bodyPart(body, true))
			ended <- s.answer(nil)
			return nil
		})
		ctx, leave := context.WithCancel(t.Context())
		s, _, err := c.Pick(ctx, request("{}"))
		if err != nil {
			t.Fatal(err)
		}
		s.Head(200, nil, "")
		s.Body([]byte(long))
		end(s, leave)
		c.Close() // waits for the stream
		if a := <-ended; !a.whole || a.body != long {
			t.Errorf("the picker saw %d bytes, whole %t", len(a.body), a.whole)
		}
	})
}

// TestSlowReader: a picker that answers heads but reads no body costs one answer the time-out. Its
// stream ends. The next answers do not wait.
func TestSlowReader(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, c := started(t, Options{}, func(s *call) error {
			_, body, _ := s.request()
			s.Send(headers(set(HeaderDestination, "10.0.0.1:80")))
			s.Send(bodyPart(body, true))
			s.Recv()
			s.Send(answerHead(nil))
			<-s.Context().Done()
			return nil
		})
		for i, want := range []time.Duration{time.Second, 0, 0} {
			s, _, err := c.Pick(t.Context(), request("{}"))
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			s.Head(200, nil, "")
			lost := 0
			for range 20 {
				if s.Body([]byte(long)) {
					lost++
				}
			}
			if took := time.Since(began); lost != 1 || took != want {
				t.Errorf("answer %d: %d losses in %v, want one in %v", i, lost, took, want)
			}
			s.End()
			<-s.done
		}
	})
}

// TestLateHeads: a picker that chooses but does not answer the head of the answer costs one answer
// the time-out. The next answers do not wait until the circuit is half open and the picker has
// answered a head in time.
func TestLateHeads(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var delay atomic.Int64 // of the picker's answer to a head; -1: it never comes
		_, c := started(t, Options{}, func(s *call) error {
			_, body, _ := s.request()
			s.Send(headers(set(HeaderDestination, "10.0.0.1:80")))
			s.Send(bodyPart(body, true))
			s.Recv()
			if d := delay.Load(); d < 0 {
				<-s.Context().Done()
				return nil
			} else {
				time.Sleep(time.Duration(d))
			}
			s.Send(answerHead(set("x-session-token", "abc")))
			s.answer(nil)
			return nil
		})
		// one serves a request whose answer takes two seconds, and returns how long the head
		// waited and whether it has the picker's changes.
		one := func() (time.Duration, bool) {
			s, _, err := c.Pick(t.Context(), request("{}"))
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			m, late := s.Head(200, nil, "")
			took := time.Since(began)
			if late == (len(m.Set) > 0) {
				t.Errorf("late %t with the changes %+v", late, m)
			}
			time.Sleep(2 * time.Second)
			s.End()
			<-s.done
			return took, !late
		}
		expect := func(what string, n int, want time.Duration, changed bool) {
			t.Helper()
			for i := range n {
				if took, got := one(); took != want || got != changed {
					t.Errorf("%s, answer %d: waited %v, changed %t; want %v, %t", what, i, took, got, want, changed)
				}
			}
		}
		expect("a picker in time", 3, 0, true)
		delay.Store(-1)
		expect("the first late head", 1, time.Second, false)
		expect("no answer", 10, 0, false)
		delay.Store(int64(1500 * time.Millisecond))
		expect("late answers", 10, 0, false)
		delay.Store(0)
		expect("in time, while the circuit is open", 1, 0, false)
		expect("in time, half open", 1, 0, false)
		expect("closed", 3, 0, true)
		delay.Store(int64(1500 * time.Millisecond))
		expect("late again", 1, time.Second, false)
		delay.Store(0)
		expect("in time, half open again", 1, 0, false)
		expect("closed again", 1, 0, true)
	})
}

// TestNeverEnds: a picker that does not end its stream after the answer loses it.
func TestNeverEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, c := started(t, Options{}, func(s *call) error {
			_, body, _ := s.request()
			s.Send(headers(set(HeaderDestination, "10.0.0.1:80")))
			s.Send(bodyPart(body, true))
			<-s.Context().Done()
			return nil
		})
		s, _, err := c.Pick(t.Context(), request("{}"))
		if err != nil {
			t.Fatal(err)
		}
		s.Head(200, nil, "")
		began := time.Now()
		s.End()
		<-s.done
		if took := time.Since(began); took != finishLimit {
			t.Errorf("the stream ended after %v", took)
		}
	})
}
