package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// reading returns the current reader of a's connection.
func reading(a *side) reader {
	synctest.Wait()
	a.conn.mu.Lock()
	defer a.conn.mu.Unlock()
	return a.conn.reader
}

// led returns the two sides of a pipe. The first side has just made a call, so its next
// caller reads the connection itself. The second side does not answer kind 9.
func led(t *testing.T) (a, b *side) {
	x, y := net.Pipe()
	a = start(t, x, nil)
	b = start(t, y, func(s *side, number uint32, kind uint8, payload []byte) error {
		if kind == 9 {
			return nil
		}
		return s.conn.Answer(number, payload)
	})
	if _, err := a.conn.Call(t.Context(), 1, nil, nil, time.Hour); err != nil {
		t.Fatal(err)
	}
	if got := reading(a); got != ofNobody {
		t.Fatalf("%d reads after a call", got)
	}
	return a, b
}

// TestCallersRead: each answer is read at once, by a single caller or with others. No
// answer waits for a periodic check or a heartbeat. A frame that comes while there is
// no call is read soon.
func TestCallersRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := led(t)
		for callers := range 4 {
			began := time.Now()
			var calling sync.WaitGroup
			for g := range callers + 1 {
				calling.Go(func() {
					for n := range 500 {
						want := fmt.Sprint(g, n)
						if got, err := a.conn.Call(t.Context(), 1, []byte(want), nil, time.Hour); err != nil || string(got) != want {
							t.Errorf("a.conn.Call = %q, %v, want %q", got, err, want)
						}
					}
				})
			}
			calling.Wait()
			if took := time.Since(began); took != 0 {
				t.Errorf("%d callers waited %v", callers+1, took)
			}
		}
		b.conn.Send(5, []byte("news"), true)
		time.Sleep(2 * Linger)
		synctest.Wait()
		if got := a.heard(); !slices.Equal(got, []string{"5 news"}) {
			t.Errorf("messages %q, want one", got)
		}
		time.Sleep(time.Minute)
		if got := reading(a); got != ofRun {
			t.Errorf("reader %d a minute after the last call, want Run's goroutine", got)
		}
		if a.conn.Err() != nil || b.conn.Err() != nil {
			t.Error(a.conn.Err(), b.conn.Err())
		}
	})
}

// TestLeadersGiveUp: a caller that reads the connection waits no longer than its limit.
// Then another goroutine continues to read.
func TestLeadersGiveUp(t *testing.T) {
	left := errors.New("left")
	for name, give := range map[string]func(c *Conn) error{
		"late": func(c *Conn) error {
			_, err := c.Call(context.Background(), 9, nil, nil, 10*time.Millisecond)
			return err
		},
		"left": func(c *Conn) error {
			ctx, cancel := context.WithCancelCause(context.Background())
			time.AfterFunc(10*time.Millisecond, func() { cancel(left) })
			_, err := c.Call(ctx, 9, nil, nil, time.Hour)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, _ := led(t)
				began := time.Now()
				var second sync.WaitGroup
				second.Go(func() { // the first caller reads for this call, and ends earlier
					time.Sleep(5 * time.Millisecond)
					if _, err := a.conn.Call(context.Background(), 9, nil, nil, 50*time.Millisecond); !errors.Is(err, ErrLate) {
						t.Error(err)
					}
				})
				if err := give(a.conn); !errors.Is(err, ErrLate) && !errors.Is(err, left) {
					t.Error(err)
				}
				if took := time.Since(began); took > 10*time.Millisecond+2*Linger {
					t.Errorf("the call took %v", took)
				}
				if got := reading(a); got != ofRun {
					t.Errorf("got %d reads", got)
				}
				for range 3 {
					if got, err := a.conn.Call(t.Context(), 1, []byte("x"), nil, time.Hour); err != nil || string(got) != "x" {
						t.Errorf(`a.conn.Call(1, []byte("x"), nil, time.Hour) = %q, %v, want "x", nil`, got, err)
					}
				}
				second.Wait()
				if err := a.conn.Err(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestLeadersSeeTheEnd: a caller that reads gets the end of the connection, and so does
// Run.
func TestLeadersSeeTheEnd(t *testing.T) {
	closed := errors.New("closed")
	for name, end := range map[string]func(a, b *side){
		"closed here":  func(a, _ *side) { a.conn.Close(closed) },
		"closed there": func(_, b *side) { b.conn.Close(closed) },
		"lost":         func(_, b *side) { b.conn.nc.Close() },
		"garbage":      func(_, b *side) { b.conn.nc.Write(make([]byte, 100)) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, b := led(t)
				time.AfterFunc(time.Millisecond, func() { end(a, b) })
				_, err := a.conn.Call(context.Background(), 9, nil, nil, time.Hour)
				if err == nil || errors.Is(err, ErrLate) {
					t.Errorf("the call: %v", err)
				}
				if got := <-a.end; !errors.Is(got, err) {
					t.Errorf("the connection ended with %v, the call with %v", got, err)
				}
			})
		})
	}
}

// TestSilentLeaders: the peer dies without closing the connection. A caller that reads
// waits no longer than other callers.
func TestSilentLeaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, y := net.Pipe()
		defer y.Close()
		a := start(t, x, nil)
		go func() { // answers one call, then only reads
			b := make([]byte, headSize)
			io.ReadFull(y, b)
			y.Write(appendFrame(nil, answer, 0, 1, nil))
			io.Copy(io.Discard, y)
		}()
		if _, err := a.conn.Call(t.Context(), 1, nil, nil, time.Hour); err != nil {
			t.Fatal(err)
		}
		if got := reading(a); got != ofNobody {
			t.Errorf("got %d reads", got)
		}
		if _, err := a.conn.Call(t.Context(), 1, nil, nil, time.Hour); !errors.Is(err, ErrSilent) {
			t.Error(err)
		}
	})
}

// TestCallsWhileThePeerDoesNotRead: the peer has stopped reading, so a write blocks. No
// call takes longer than its limit, whichever goroutine reads. The connection ends at
// its own limit.
func TestCallsWhileThePeerDoesNotRead(t *testing.T) {
	left := errors.New("left")
	const limit = 50 * time.Millisecond
	for name, leads := range map[string]bool{"led": true, "beside": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				x, y := net.Pipe()
				a := start(t, x, nil)
				var peer sync.WaitGroup
				defer peer.Wait()
				defer y.Close()
				peer.Go(func() { // answers one call, continues to send, but does not read
					b := make([]byte, headSize)
					io.ReadFull(y, b)
					y.Write(appendFrame(nil, answer, 0, 1, nil))
					for {
						time.Sleep(Beat)
						if _, err := y.Write(appendFrame(nil, beat, 0, 0, nil)); err != nil {
							return
						}
					}
				})
				if _, err := a.conn.Call(t.Context(), 1, nil, nil, time.Hour); err != nil {
					t.Fatal(err)
				}
				if !leads {
					a.conn.Send(1, nil, true)
					time.Sleep(10 * Linger) // Run's goroutine reads again
				}
				if got := reading(a); leads != (got == ofNobody) {
					t.Fatalf("got %d reads", got)
				}
				ctx, cancel := context.WithCancelCause(t.Context())
				time.AfterFunc(30*time.Millisecond, func() { cancel(left) })
				var calling sync.WaitGroup
				for _, call := range []struct {
					after time.Duration
					ctx   context.Context
					takes time.Duration
					want  error
				}{
					{0, t.Context(), limit, ErrLate},
					{10 * time.Millisecond, ctx, 20 * time.Millisecond, left},
					{20 * time.Millisecond, t.Context(), limit, ErrLate},
					{time.Second + 20*time.Millisecond, t.Context(), limit, ErrLate},
				} {
					calling.Go(func() {
						time.Sleep(call.after)
						began := time.Now()
						if _, err := a.conn.Call(call.ctx, 1, nil, nil, limit); !errors.Is(err, call.want) {
							t.Errorf("begun after %v: %v, want %v", call.after, err, call.want)
						}
						if took := time.Since(began); took < call.takes || took > call.takes+2*Linger {
							t.Errorf("call begun after %v took %v", call.after, took)
						}
					})
				}
				calling.Wait()
				if err := <-a.end; !errors.Is(err, ErrBehind) {
					t.Error(err)
				}
			})
		})
	}
}

// TestTheEndWaitsForLeaders: when Run returns, no goroutine is in the handler. The
// handler gets no frame after the end.
func TestTheEndWaitsForLeaders(t *testing.T) {
	closed := errors.New("closed")
	for name, outcome := range map[string]class{"answered": answer, "not answered": message} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, b := led(t)
				handling, goOn := make(chan struct{}), make(chan struct{})
				a.message = func(kind uint8) error {
					if kind == 7 {
						close(handling)
						<-goOn
					}
					return nil
				}
				var calling sync.WaitGroup
				calling.Go(func() {
					if _, err := a.conn.Call(context.Background(), 9, nil, nil, time.Hour); err != nil && !errors.Is(err, closed) {
						t.Error(err)
					}
				})
				if got := reading(a); got != aCaller {
					t.Fatalf("got %d reads", got)
				}
				out := appendFrame(nil, message, 6, 0, nil)
				if outcome == answer {
					out = appendFrame(out, answer, 0, 2, nil)
				}
				out = appendFrame(appendFrame(out, message, 7, 0, nil), message, 8, 0, nil)
				b.conn.nc.Write(out)
				<-handling
				a.conn.Close(closed)
				time.Sleep(Beat)
				synctest.Wait()
				if a.conn.Err() == nil {
					t.Error("the connection has not ended")
				}
				select {
				case err := <-a.end:
					t.Errorf("Run returned %v while the handler still runs", err)
				default:
				}
				close(goOn)
				if err := <-a.end; !errors.Is(err, closed) {
					t.Error(err)
				}
				calling.Wait()
				if got := a.heard(); !slices.Equal(got, []string{"6 ", "7 "}) {
					t.Errorf("handled messages %q", got)
				}
			})
		})
	}
}

// TestLeadersNameTheEnd: the reason of the end is the frame that a caller read last. Run's
// goroutine, which reads after the caller, does not replace the reason.
func TestLeadersNameTheEnd(t *testing.T) {
	for range 2000 {
		synctest.Test(t, func(t *testing.T) {
			a, b := led(t)
			time.AfterFunc(time.Millisecond, func() { b.conn.Close(errors.New("closed")) })
			_, err := a.conn.Call(context.Background(), 9, nil, nil, time.Hour)
			if got := <-a.end; !errors.Is(err, ErrLeft) || !errors.Is(got, ErrLeft) {
				t.Fatalf("the call ended with %v, the connection with %v, want %v", err, got, ErrLeft)
			}
		})
	}
}
