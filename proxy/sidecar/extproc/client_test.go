package extproc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// TestExchange: the picker gets the whole request and the whole answer, and its changes come back.
func TestExchange(t *testing.T) {
	for _, size := range []int{10, len(long)} {
		bubble(t, func(t *testing.T) {
			var head map[string]string
			var body string
			var seen answered
			_, c := started(t, Options{}, func(s *call) error {
				m, err := s.Recv()
				if err != nil {
					return err
				}
				head = headOf(m.GetRequestHeaders().GetHeaders())
				hint := m.GetMetadataContext().GetFilterMetadata()[SubsetSpace].GetFields()[SubsetKey].GetListValue().GetValues()
				if len(hint) != 2 || hint[1].GetStringValue() != "10.0.0.2:80" {
					t.Errorf("the subset is %v", hint)
				}
				for over := false; !over; {
					if m, err = s.Recv(); err != nil {
						return err
					}
					body += string(m.GetRequestBody().GetBody())
					over = m.GetRequestTrailers() != nil
				}
				s.Send(headers(set(HeaderDestination, "10.0.0.1:80, 10.0.0.2:80,", HeaderPrefill, "10.0.0.3:80", "X-Slo", "5", ":path", "/x", "content-length", "7")))
				s.Send(bodyPart(body[:4], false))
				s.Send(bodyPart(body[4:], true))
				seen = s.answer(set("x-session-token", "abc"))
				return nil
			})
			r := request(long[:size])
			r.Header, r.Trailer, r.Subset = []upstream.Field{{Name: "X-Client", Value: "v"}}, []upstream.Field{{Name: "X-End", Value: "e"}}, []string{"10.0.0.1:80", "10.0.0.2:80"}
			r.Reserve = func(int) error { return errors.New("the body has not changed") }
			s, d, err := c.Pick(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			if want := []string{"10.0.0.1:80", "10.0.0.2:80"}; !slices.Equal(d.Destinations, want) || !slices.Equal(d.Prefill, []string{"10.0.0.3:80"}) || d.Changed {
				t.Errorf("the decision is %+v", d)
			}
			if len(d.Header.Set) != 1 || d.Header.Set[0] != (SetLine{upstream.Field{Name: "x-slo", Value: "5"}, Overwrite}) {
				t.Errorf("the lines are %+v", d.Header.Set)
			}
			if head[":path"] != "/v1/completions" || head["x-client"] != "v" || head["content-length"] != fmt.Sprint(size) || body != long[:size] {
				t.Errorf("the picker got %v and %d bytes", head, len(body))
			}
			m, late := s.Head(200, []upstream.Field{{Name: "Content-Type", Value: "text/event-stream"}}, "10.0.0.2:80")
			if late || len(m.Set) != 1 || m.Set[0].Value != "abc" {
				t.Errorf("the answer changes by %+v", m)
			}
			for i := 0; i < len(long); i += 1000 {
				if s.Body([]byte(long[i:min(i+1000, len(long))])) {
					t.Fatal("the answer is lost")
				}
			}
			s.End()
			synctest.Wait()
			if seen.body != long || !seen.whole || seen.served != "10.0.0.2:80" || seen.head[":status"] != "200" || seen.head["content-type"] != "text/event-stream" {
				t.Errorf("the picker saw %v of %q, %d bytes, whole %t", seen.head, seen.served, len(seen.body), seen.whole)
			}
		})
	}
}

// TestChoices: the forms in which pickers give their choice.
func TestChoices(t *testing.T) {
	const body = `{"model":"a","prompt":"x"}`
	for name, tt := range map[string]struct {
		serve  func(*call) error
		want   string // destinations
		body   string // that the engines get; "": that of the client
		status int    // of a refusal
		reason string // of a failure
	}{
		"metadata alone": {serve: func(c *call) error {
			m := headers(nil)
			m.DynamicMetadata = destinationMetadata("10.0.0.1:80")
			c.Send(m)
			return c.Send(bodyPart(body, true))
		}, want: "10.0.0.1:80"},
		"header before metadata": {serve: func(c *call) error {
			m := headers(set(HeaderDestination, "10.0.0.2:80"))
			m.DynamicMetadata = destinationMetadata("10.0.0.1:80")
			c.Send(m)
			return c.Send(bodyPart(body, true))
		}, want: "10.0.0.2:80"},
		"body rewritten": {serve: func(c *call) error {
			c.Send(headers(set(HeaderDestination, "10.0.0.1:80")))
			c.Send(bodyPart(`{"model":"b`, false))
			return c.Send(bodyPart(`2","prompt":"x"}`, true))
		}, want: "10.0.0.1:80", body: `{"model":"b2","prompt":"x"}`},
		"body shortened": {serve: func(c *call) error {
			c.Send(headers(set(HeaderDestination, "10.0.0.1:80")))
			return c.Send(bodyPart(body[:5], true))
		}, want: "10.0.0.1:80", body: body[:5]},
		"header alone, then the end": {serve: func(c *call) error {
			return c.Send(headers(set(HeaderDestination, "10.0.0.1:80")))
		}, want: "10.0.0.1:80"},
		"nothing chosen":        {serve: func(c *call) error { c.Send(headers(nil)); return c.Send(bodyPart(body, true)) }},
		"refused with 429":      {serve: func(c *call) error { return c.Send(immediate(429, "full")) }, status: 429},
		"refused with nonsense": {serve: func(c *call) error { return c.Send(immediate(0, "")) }, reason: BadAnswer},
		"the end":               {serve: func(c *call) error { return nil }, reason: StreamClosed},
		"an error":              {serve: func(c *call) error { return errors.New("x") }, reason: StreamClosed},
		"the end in the body": {serve: func(c *call) error {
			c.Send(headers(set(HeaderDestination, "10.0.0.1:80")))
			return c.Send(bodyPart(body[:5], false))
		}, reason: StreamClosed},
		"body first":       {serve: func(c *call) error { return c.Send(bodyPart(body, true)) }, reason: BadAnswer},
		"two heads":        {serve: func(c *call) error { c.Send(headers(nil)); return c.Send(headers(nil)) }, reason: BadAnswer},
		"too large a body": {serve: func(c *call) error { c.Send(headers(nil)); return c.Send(bodyPart(long, true)) }, reason: BadAnswer},
		"never":            {serve: func(c *call) error { <-c.Context().Done(); return nil }, reason: Timeout},
		"head, then never": {serve: func(c *call) error { c.Send(headers(nil)); <-c.Context().Done(); return nil }, reason: Timeout},
		"late":             {serve: func(c *call) error { time.Sleep(2 * time.Second); return c.Send(headers(nil)) }, reason: Timeout},
		"just in time":     {serve: func(c *call) error { time.Sleep(time.Second - 1); return c.Send(immediate(503, "")) }, status: 503},
		"dies":             {serve: func(c *call) error { go c.p.stop(); <-c.Context().Done(); return nil }, reason: Unavailable},
		"refused unread":   {serve: func(c *call) error { return c.Send(immediate(503, "")) }, status: 503},
		"replaced by header": {serve: func(c *call) error {
			m := headers(set(HeaderDestination, "10.0.0.1:80"))
			common := m.GetRequestHeaders().Response
			common.Status, common.BodyMutation = 1, bodyPart("", true).GetRequestBody().Response.BodyMutation
			return c.Send(m)
		}, want: "10.0.0.1:80", body: "empty"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				_, c := started(t, Options{MaxBody: 1000}, func(s *call) error {
					if !strings.Contains(name, "unread") {
						if _, _, err := s.request(); err != nil {
							return err
						}
					}
					return tt.serve(s)
				})
				s, d, err := c.Pick(t.Context(), request(body))
				var failed *Error
				if errors.As(err, &failed) != (tt.reason != "") || failed != nil && failed.Reason != tt.reason || err != nil && failed == nil {
					t.Fatalf("got %v, want %q", err, tt.reason)
				}
				if err != nil {
					return
				}
				if (s == nil) != (tt.status != 0) || d.Refusal != nil && d.Refusal.Status != tt.status {
					t.Fatalf("got %+v, want a refusal with %d", d, tt.status)
				}
				if s == nil {
					return
				}
				defer s.Abort()
				want := tt.body
				if want == "empty" {
					want = ""
				}
				if got := strings.Join(d.Destinations, " "); got != tt.want || d.Changed != (tt.body != "") || string(d.Body) != want {
					t.Errorf("got %q with the body %q, want %q with %q", got, d.Body, tt.want, want)
				}
			})
		})
	}
}

// TestClientLeaves: the picker's stream ends with the request, before the choice, during the
// answer and after Abort.
func TestClientLeaves(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ended := make(chan answered, 1)
		_, c := started(t, Options{}, func(s *call) error {
			head, body, err := s.request()
			if err != nil {
				ended <- answered{err: err}
				return err
			}
			if head["x-wait"] == "" {
				s.Send(headers(set(HeaderDestination, "10.0.0.1:80")))
				s.Send(bodyPart(body, true))
			}
			ended <- s.answer(nil)
			return nil
		})
		why := errors.New("the client has left")
		ctx, leave := context.WithCancelCause(t.Context())
		r := request("{}")
		r.Header = []upstream.Field{{Name: "X-Wait", Value: "1"}}
		go func() { time.Sleep(time.Millisecond); leave(why) }()
		if _, _, err := c.Pick(ctx, r); err != why {
			t.Errorf("a request that has left: %v", err)
		}
		if a := <-ended; a.err == nil || a.whole {
			t.Errorf("the picker saw %+v", a)
		}
		for _, end := range []func(*Stream, context.CancelCauseFunc){
			func(_ *Stream, leave context.CancelCauseFunc) { leave(why) },
			func(s *Stream, _ context.CancelCauseFunc) { s.Abort() },
			func(s *Stream, _ context.CancelCauseFunc) { s.Head(200, nil, ""); s.Body([]byte("x")); s.Abort() },
			func(s *Stream, leave context.CancelCauseFunc) {
				s.Head(200, nil, "")
				leave(why)
				s.Body([]byte("x"))
				s.Abort()
			},
			func(s *Stream, _ context.CancelCauseFunc) { s.End() }, // nothing has been shown
		} {
			ctx, leave := context.WithCancelCause(t.Context())
			s, _, err := c.Pick(ctx, request("{}"))
			if err != nil {
				t.Fatal(err)
			}
			end(s, leave)
			if a := <-ended; a.err == nil || a.whole {
				t.Errorf("the picker saw %+v", a)
			}
			s.Abort()
		}
	})
}

// TestCircuit: after some failures in a row, requests fail at once, but for one probe a second. A
// picker that answers again gets all requests.
func TestCircuit(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var hangs atomic.Bool
		p, c := started(t, Options{}, func(s *call) error {
			if hangs.Load() {
				<-s.Context().Done()
				return nil
			}
			return chooses("10.0.0.1:80")(s)
		})
		reason := func() string {
			s, _, err := c.Pick(t.Context(), request("{}"))
			var failed *Error
			if errors.As(err, &failed) {
				return failed.Reason
			}
			if err != nil {
				t.Fatal(err)
			}
			s.Abort()
			return ""
		}
		if got := reason(); got != "" {
			t.Fatal(got)
		}
		hangs.Store(true)
		began := time.Now()
		for i := range opensAfter {
			if got := reason(); got != Timeout {
				t.Fatalf("request %d: %q", i, got)
			}
		}
		if took := time.Since(began); took != opensAfter*time.Second {
			t.Errorf("%d time-outs took %v", opensAfter, took)
		}
		for range 100 {
			if got := reason(); got != CircuitOpen {
				t.Fatalf("%q with an open circuit", got)
			}
		}
		if took := time.Since(began); took != opensAfter*time.Second {
			t.Errorf("an open circuit costs time: %v", took)
		}
		time.Sleep(openFor)
		if got := reason(); got != Timeout {
			t.Fatalf("the probe: %q", got)
		}
		if got := reason(); got != CircuitOpen {
			t.Fatalf("after the probe: %q", got)
		}
		hangs.Store(false)
		time.Sleep(openFor)
		for range 3 {
			if got := reason(); got != "" {
				t.Fatalf("the picker answers again: %q", got)
			}
		}
		p.stop() // the picker is away, then comes back
		for range opensAfter {
			if got := reason(); got != Unavailable {
				t.Fatalf("without a picker: %q", got)
			}
		}
		if got := reason(); got != CircuitOpen {
			t.Fatalf("without a picker: %q", got)
		}
		p.start()
		time.Sleep(2 * maxBackoff)
		if got := reason(); got != "" {
			t.Fatalf("the picker is back: %q", got)
		}
	})
}

// TestPickAfterClose: a request that waits for its place while a reload closes its client still
// gets a choice, and leaves no connection behind.
func TestPickAfterClose(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, c := started(t, Options{}, chooses("10.0.0.1:80"))
		for n := range 3 {
			if n > 0 {
				c.Close()
			}
			s, d, err := c.Pick(t.Context(), request("{}"))
			if err != nil {
				t.Fatalf("request %d: %v", n, err)
			}
			if !slices.Equal(d.Destinations, []string{"10.0.0.1:80"}) {
				t.Errorf("request %d: got %q", n, d.Destinations)
			}
			s.Head(200, nil, "")
			s.End()
			<-s.done
		}
		synctest.Wait() // the last stream has left
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.conn != nil {
			t.Error("the connection of a closed client is open")
		}
	})
}
