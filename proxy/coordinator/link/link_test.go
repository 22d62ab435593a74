package link

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// side is one end of a connection, and the Handler of its frames.
type side struct {
	conn *Conn
	call func(s *side, number uint32, kind uint8, payload []byte) error
	mu   sync.Mutex
	got  []string // guarded by mu
	end  chan error

	message func(kind uint8) error // nil: the side accepts all messages
}

func (s *side) Message(kind uint8, payload []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.got = append(s.got, fmt.Sprintf("%d %s", kind, payload[:min(len(payload), 1<<10)]))
	if s.message != nil {
		return s.message(kind)
	}
	return nil
}

func (s *side) Call(number uint32, kind uint8, payload []byte) error {
	s.Message(kind, payload)
	if s.call != nil {
		return s.call(s, number, kind, payload)
	}
	return s.conn.Answer(number, append([]byte("re "), payload...))
}

func (s *side) heard() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.got)
}

// start runs a side over nc. The end of the test stops the side and waits for it.
func start(t testing.TB, nc net.Conn, call func(*side, uint32, uint8, []byte) error) *side {
	t.Helper()
	s := &side{call: call, end: make(chan error, 1)}
	s.conn = New(nc, s)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); s.end <- s.conn.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return s
}

// sockets returns the two ends of a Unix connection.
func sockets(t testing.TB) (a, b net.Conn) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err = net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err = l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

// TestCallsAndMessages: the frames of one side arrive in order, whichever goroutine
// wrote them to the socket. Each call gets its own answer.
func TestCallsAndMessages(t *testing.T) {
	pipe := func(testing.TB) (a, b net.Conn) { return net.Pipe() }
	for kind, ends := range map[string]func(testing.TB) (a, b net.Conn){"unix": sockets, "pipe": pipe, "tls": secured} {
		t.Run(kind, func(t *testing.T) {
			x, y := ends(t)
			a, b := start(t, x, nil), start(t, y, nil)
			var callers sync.WaitGroup
			for g := range 8 {
				callers.Go(func() {
					for n := range 200 {
						text := fmt.Sprintf("%d.%d", g, n)
						if err := a.conn.Send(7, []byte(text), n%3 == 0); err != nil {
							t.Error(err)
						}
						got, err := a.conn.Call(t.Context(), 8, []byte(text), []byte("->"), time.Hour)
						if err != nil || string(got) != "->re "+text {
							t.Errorf("call %s: %q, %v", text, got, err)
						}
					}
				})
				callers.Go(func() {
					if got, err := b.conn.Call(t.Context(), 1, []byte{byte(g)}, nil, 0); err != nil || got[3] != byte(g) {
						t.Errorf("call in the reverse direction: %q, %v", got, err)
					}
				})
			}
			callers.Wait()
			next := make(map[string]int)
			for _, line := range b.heard() {
				var kind, g, n int
				fmt.Sscanf(line, "%d %d.%d", &kind, &g, &n)
				key := fmt.Sprint(kind, g)
				if next[key] != n {
					t.Fatalf("message %q follows message %d", line, next[key]-1)
				}
				next[key]++
				if kind == 8 && next[fmt.Sprint(7, g)] != n+1 {
					t.Fatalf("call %q arrived before an earlier message", line)
				}
			}
			if len(next) != 16 {
				t.Errorf("messages of %d senders", len(next))
			}
		})
	}
}

// TestLargeFrames: frames of any size up to the limit arrive, although the socket
// accepts only a part at a time.
func TestLargeFrames(t *testing.T) { overBoth(t, testLargeFrames) }

func testLargeFrames(t *testing.T, sockets func(testing.TB) (a, b net.Conn)) {
	x, y := sockets(t)
	a, _ := start(t, x, nil), start(t, y, nil)
	largest := MaxFrame - 3
	if raceEnabled { // with the race detector 16 MiB of TLS take seconds on a busy machine
		largest = 4 << 20
	}
	for _, n := range []int{0, 1, 64 << 10, 64<<10 - headSize, 1 << 20, largest} {
		payload := bytes.Repeat([]byte{'x', 'y', 'z'}, n/3+1)[:n]
		got, err := a.conn.Call(t.Context(), 1, payload, nil, 0)
		if err != nil || len(got) != n+3 || !bytes.Equal(got[3:], payload) {
			t.Fatalf("%d bytes: answer of %d bytes, %v", n, len(got), err)
		}
	}
	if _, err := a.conn.Call(t.Context(), 1, make([]byte, MaxFrame+1), nil, 0); !errors.Is(err, ErrSize) {
		t.Error(err)
	}
	if err := a.conn.Send(1, make([]byte, MaxFrame+1), true); !errors.Is(err, ErrSize) {
		t.Error(err)
	}
}

// TestLate: a call ends at its limit if no answer has come. A late answer is dropped.
func TestLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, y := net.Pipe()
		var kept []uint32
		a := start(t, x, nil)
		b := start(t, y, func(s *side, number uint32, kind uint8, payload []byte) error {
			if kind == 2 {
				return s.conn.Answer(number, []byte("at once"))
			}
			kept = append(kept, number)
			return nil
		})
		began := time.Now()
		if _, err := a.conn.Call(t.Context(), 1, nil, nil, 50*time.Millisecond); !errors.Is(err, ErrLate) {
			t.Fatal(err)
		}
		if took := time.Since(began); took < 50*time.Millisecond || took > 50*time.Millisecond+2*Linger {
			t.Errorf("waited %v", took)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		left := errors.New("left")
		time.AfterFunc(time.Second, func() { cancel(left) })
		if _, err := a.conn.Call(ctx, 1, nil, nil, 0); !errors.Is(err, left) {
			t.Error(err)
		}
		for _, number := range kept {
			b.conn.Answer(number, []byte("too late"))
		}
		b.conn.Flush()
		if got, err := a.conn.Call(t.Context(), 2, nil, nil, time.Second); err != nil || string(got) != "at once" {
			t.Errorf(`a.conn.Call(2, nil, nil, time.Second) = %q, %v, want "at once", nil`, got, err)
		}
	})
}

// TestMessagesWait: messages wait for each other for a short time only.
func TestMessagesWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, y := net.Pipe()
		a, b := start(t, x, nil), start(t, y, nil)
		a.conn.Send(1, []byte("one"), false)
		a.conn.Send(1, []byte("two"), false)
		synctest.Wait()
		if got := b.heard(); len(got) != 0 {
			t.Errorf("messages %q arrived without a delay", got)
		}
		time.Sleep(Linger)
		synctest.Wait()
		if got := b.heard(); !slices.Equal(got, []string{"1 one", "1 two"}) {
			t.Errorf("b.heard() = %q", got)
		}
		a.conn.Send(1, []byte("three"), true)
		synctest.Wait()
		if got := b.heard(); len(got) != 3 {
			t.Errorf("an urgent message waits: %q", got)
		}
		// Long after the last message no timer runs.
		time.Sleep(time.Second)
		looks := func() uint64 {
			a.conn.mu.Lock()
			defer a.conn.mu.Unlock()
			return a.conn.looks
		}
		before := looks()
		time.Sleep(time.Hour)
		if looks() != before {
			t.Error("an idle connection is looked after")
		}
		a.conn.Send(1, []byte("four"), false)
		time.Sleep(2 * Linger)
		synctest.Wait()
		if got := b.heard(); len(got) != 4 {
			t.Errorf("a message after a rest: %q", got)
		}
	})
}

// TestBeats: heartbeats keep an idle connection open. A side whose peer sends nothing,
// or does not read, ends the connection after a limit.
func TestBeats(t *testing.T) {
	t.Run("idle", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			x, y := net.Pipe()
			a, b := start(t, x, nil), start(t, y, nil)
			time.Sleep(time.Hour)
			if a.conn.Err() != nil || b.conn.Err() != nil {
				t.Error(a.conn.Err(), b.conn.Err())
			}
		})
	})
	t.Run("silent", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			x, y := net.Pipe()
			defer y.Close()
			go io.Copy(io.Discard, y)
			a := start(t, x, nil)
			began := time.Now()
			if _, err := a.conn.Call(t.Context(), 1, nil, nil, 0); !errors.Is(err, ErrSilent) {
				t.Error(err)
			}
			if err := <-a.end; !errors.Is(err, ErrSilent) || time.Since(began) != Silence*Beat {
				t.Errorf("%v after %v", err, time.Since(began))
			}
		})
	})
	t.Run("does not read", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			x, y := net.Pipe()
			var speaks sync.WaitGroup
			defer speaks.Wait()
			defer y.Close()
			speaks.Go(func() { // the peer sends heartbeats, but does not read
				for b := appendFrame(nil, beat, 0, 0, nil); ; time.Sleep(Beat) {
					if _, err := y.Write(b); err != nil {
						return
					}
				}
			})
			a := start(t, x, nil)
			a.conn.Send(1, []byte("unheard"), true)
			if err := <-a.end; !errors.Is(err, ErrBehind) {
				t.Error(err)
			}
			if err := a.conn.Send(1, nil, true); !errors.Is(err, ErrBehind) {
				t.Error(err)
			}
		})
	})
}

// TestNobodyWaitsForAReader: senders do not wait for a peer that has stopped reading.
// The buffer for the peer is bounded.
func TestNobodyWaitsForAReader(t *testing.T) { overBoth(t, testNobodyWaitsForAReader) }

func testNobodyWaitsForAReader(t *testing.T, sockets func(testing.TB) (a, b net.Conn)) {
	x, y := sockets(t)
	a := start(t, x, nil)
	go func() { // the peer sends heartbeats, because the frames take longer than Silence on a busy machine
		for b := appendFrame(nil, beat, 0, 0, nil); ; time.Sleep(Beat / 4) {
			if _, err := y.Write(b); err != nil {
				return
			}
		}
	}()
	payload := make([]byte, 1<<20)
	var err error
	for n := 0; err == nil; n++ {
		if n > 2*maxWaiting>>20 {
			t.Fatal("the waiting frames are not bounded")
		}
		err = a.conn.Send(1, payload, true)
	}
	if !errors.Is(err, ErrBehind) {
		t.Error(err)
	}
	if err := <-a.end; !errors.Is(err, ErrBehind) {
		t.Error(err)
	}
}

// TestAPausedReader: a peer that pauses gets all frames when it reads again.
func TestAPausedReader(t *testing.T) { overBoth(t, testAPausedReader) }

func testAPausedReader(t *testing.T, sockets func(testing.TB) (a, b net.Conn)) {
	x, y := sockets(t)
	a := start(t, x, nil)
	const frames = 200
	payload := bytes.Repeat([]byte("p"), 10<<10)
	for range frames {
		if err := a.conn.Send(1, payload, true); err != nil {
			t.Fatal(err)
		}
	}
	b := start(t, y, nil)
	for len(b.heard()) < frames {
		if b.conn.Err() != nil || a.conn.Err() != nil {
			t.Fatal(a.conn.Err(), b.conn.Err())
		}
		time.Sleep(time.Millisecond)
	}
	if got, err := a.conn.Call(t.Context(), 1, []byte("still there"), nil, 0); err != nil || string(got) != "re still there" {
		t.Errorf(`a.conn.Call = %q, %v, want "re still there", nil`, got, err)
	}
}

func TestEnd(t *testing.T) { overBoth(t, testEnd) }

func testEnd(t *testing.T, sockets func(testing.TB) (a, b net.Conn)) {
	cause := errors.New("enough")
	never := func(*side, uint32, uint8, []byte) error { return nil }
	for _, tt := range []struct {
		name        string
		end         func(a, b *side)
		mine, yours error // nil: any
	}{
		{"closed here", func(a, _ *side) { a.conn.Close(cause) }, cause, ErrLeft},
		{"closed there", func(_, b *side) { b.conn.Close(cause) }, ErrLeft, cause},
		{"lost", func(_, b *side) { b.conn.nc.Close() }, io.EOF, nil},
		{"closed twice", func(a, _ *side) { a.conn.Close(cause); a.conn.Close(errors.New("again")) }, cause, ErrLeft},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x, y := sockets(t)
			a, b := start(t, x, never), start(t, y, never)
			waits := make(chan error, 1)
			asked := make(chan struct{})
			go func() {
				close(asked)
				_, err := a.conn.Call(context.Background(), 1, nil, nil, 0)
				waits <- err
			}()
			<-asked
			for len(b.heard()) == 0 {
				time.Sleep(time.Millisecond)
			}
			tt.end(a, b)
			if err := <-a.end; !errors.Is(err, tt.mine) {
				t.Errorf("this side ended with %v, want %v", err, tt.mine)
			}
			if err := <-b.end; tt.yours != nil && !errors.Is(err, tt.yours) {
				t.Errorf("the peer ended with %v, want %v", err, tt.yours)
			}
			if err := <-waits; !errors.Is(err, tt.mine) {
				t.Errorf("the call ended with %v", err)
			}
			if err := a.conn.Send(1, nil, true); !errors.Is(err, tt.mine) {
				t.Errorf("a message after the end: %v", err)
			}
			if _, err := a.conn.Call(t.Context(), 1, nil, nil, 0); !errors.Is(err, tt.mine) {
				t.Errorf("a call after the end: %v", err)
			}
		})
	}
}

// TestGivingUp: a side that ends the connection for any reason informs its peer. A peer that gets
// no such frame assumes a death, unless the cause is uncertain.
func TestGivingUp(t *testing.T) {
	refused := errors.New("refused")
	nothing := func(*side) {}
	for _, tt := range []struct {
		name        string
		before      func(a *side)
		end         func(a, b *side)
		mine, yours error // nil: not ErrGone
	}{
		{"the handler's word", nothing, func(a, _ *side) { a.conn.Send(9, nil, true) }, ErrLeft, refused},
		{"the handler's word, to one who leads", func(a *side) {
			a.conn.Call(context.Background(), 1, nil, nil, time.Hour)
		}, func(a, _ *side) { a.conn.Call(context.Background(), 9, nil, nil, time.Hour) }, ErrLeft, refused},
		{"died", nothing, func(_, b *side) { b.conn.nc.Close() }, ErrGone, nil},
		{"died, to one who leads", func(a *side) {
			a.conn.Call(context.Background(), 1, nil, nil, time.Hour)
		}, func(a, b *side) {
			time.AfterFunc(time.Millisecond, func() { b.conn.nc.Close() })
			a.conn.Call(context.Background(), 8, nil, nil, time.Hour)
		}, ErrGone, nil},
		{"within a frame", nothing, func(_, b *side) {
			b.conn.nc.Write(appendFrame(nil, message, 1, 0, []byte("half"))[:headSize+1])
			b.conn.nc.Close()
		}, nil, nil},
		{"while this side was stopped", func(a *side) {
			a.conn.ticked.Add(-int64(time.Hour)) // the last heartbeat was this long ago
		}, func(_, b *side) { b.conn.nc.Close() }, nil, nil},
		{"just after", func(a *side) {
			a.conn.ticked.Add(-int64(time.Hour))
			time.Sleep(Beat)
		}, func(_, b *side) { b.conn.nc.Close() }, nil, nil},
		{"long after", func(a *side) {
			a.conn.ticked.Add(-int64(time.Hour))
			time.Sleep((Silence + 2) * Beat)
		}, func(_, b *side) { b.conn.nc.Close() }, ErrGone, nil},
		{"nothing can be written", nothing, func(a, b *side) { // but the peer's frames are read
			a.conn.lose(errors.New("broken pipe"))
			if err := a.conn.Send(1, nil, true); err == nil {
				t.Error("Send succeeds on a connection that cannot write")
			}
			b.conn.Close(refused)
		}, ErrLeft, refused},
		{"nothing can be written, and this side leaves", nothing, func(a, _ *side) {
			a.conn.lose(errors.New("broken pipe"))
			a.conn.Close(refused)
		}, refused, ErrGone},
		{"nothing can be written, for long", nothing, func(a, _ *side) {
			a.conn.lose(errors.New("broken pipe"))
			time.Sleep((Silence + 1) * Beat)
		}, nil, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				x, y := net.Pipe()
				a := start(t, x, nil)
				b := start(t, y, func(s *side, number uint32, kind uint8, _ []byte) error {
					switch kind {
					case 8:
						return nil
					case 9:
						return refused
					}
					return s.conn.Answer(number, nil)
				})
				b.message = func(kind uint8) error {
					if kind == 9 {
						return refused
					}
					return nil
				}
				synctest.Wait()
				tt.before(a)
				synctest.Wait()
				tt.end(a, b)
				for _, s := range []struct {
					what string
					side *side
					want error
				}{{"here", a, tt.mine}, {"there", b, tt.yours}} {
					if err := <-s.side.end; s.want != nil && !errors.Is(err, s.want) || s.want == nil && s.side == a && errors.Is(err, ErrGone) {
						t.Errorf("side %s ended with %v, want %v", s.what, err, s.want)
					}
				}
			})
		})
	}
}

// TestARefusalIsTheLast: after a refused frame the handler gets no other frame,
// whichever goroutine reads.
func TestARefusalIsTheLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, y := net.Pipe()
		defer y.Close()
		refused := errors.New("refused")
		a := start(t, x, nil)
		a.message = func(kind uint8) error {
			if kind == 9 {
				return refused
			}
			return nil
		}
		go func() { // answers the first call, and sends extra frames after the next one
			b := make([]byte, headSize)
			io.ReadFull(y, b)
			y.Write(appendFrame(nil, answer, 0, 1, nil))
			io.ReadFull(y, b)
			var out []byte
			for _, kind := range []uint8{1, 9, 2} {
				out = appendFrame(out, message, kind, 0, nil)
			}
			y.Write(appendFrame(out, answer, 0, 2, nil))
			y.Write(appendFrame(nil, message, 3, 0, nil))
		}()
		for _, want := range []error{nil, refused} {
			if _, err := a.conn.Call(t.Context(), 1, nil, nil, time.Hour); !errors.Is(err, want) {
				t.Errorf("a.conn.Call(1, nil, nil, time.Hour) = %v, want %v", err, want)
			}
		}
		if err := <-a.end; !errors.Is(err, refused) {
			t.Error(err)
		}
		if got := a.heard(); !slices.Equal(got, []string{"1 ", "9 "}) {
			t.Errorf("a.heard() = %q", got)
		}
	})
}

// TestGarbage: malformed bytes end the connection with a reason.
func TestGarbage(t *testing.T) { overBoth(t, testGarbage) }

func testGarbage(t *testing.T, sockets func(testing.TB) (a, b net.Conn)) {
	head := func(length uint32, what class) []byte {
		b := appendFrame(nil, what, 1, 1, nil)
		binary.LittleEndian.PutUint32(b, length)
		return b
	}
	for name, b := range map[string][]byte{
		"text":           []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
		"length 0":       head(0, message),
		"length too big": head(MaxFrame+headRest+1, message),
		"class":          head(headRest, bye+1),
		"talking beat":   appendFrame(nil, beat, 0, 0, []byte("x")),
	} {
		t.Run(name, func(t *testing.T) {
			x, y := sockets(t)
			a := start(t, x, nil)
			y.Write(appendFrame(nil, message, 9, 0, []byte("well")))
			y.Write(b)
			if err := <-a.end; !errors.Is(err, ErrGarbage) {
				t.Errorf("a.end = %v, want %v", err, ErrGarbage)
			}
			if got := a.heard(); !slices.Equal(got, []string{"9 well"}) {
				t.Errorf("a.heard() = %q", got)
			}
		})
	}
	t.Run("the handler's word", func(t *testing.T) {
		x, y := sockets(t)
		wrong := Garbage("this")
		a, b := start(t, x, nil), start(t, y, func(*side, uint32, uint8, []byte) error { return wrong })
		a.conn.Call(t.Context(), 1, nil, nil, 0)
		if err := <-b.end; err != wrong {
			t.Error(err)
		}
	})
}

// TestAnswersFromElsewhere: another goroutine may answer a call, and answers may come
// in another order.
func TestAnswersFromElsewhere(t *testing.T) { overBoth(t, testAnswersFromElsewhere) }

func testAnswersFromElsewhere(t *testing.T, sockets func(testing.TB) (a, b net.Conn)) {
	x, y := sockets(t)
	var later sync.WaitGroup
	a := start(t, x, nil)
	b := start(t, y, nil)
	b.call = func(s *side, number uint32, _ uint8, payload []byte) error {
		text := bytes.Clone(payload)
		later.Go(func() {
			s.conn.Answer(number, text)
			s.conn.Flush()
		})
		return nil
	}
	var callers sync.WaitGroup
	for n := range 100 {
		callers.Go(func() {
			want := fmt.Sprint(n)
			if got, err := a.conn.Call(t.Context(), 1, []byte(want), nil, 0); err != nil || string(got) != want {
				t.Errorf("a.conn.Call(1, []byte(want), nil, 0) = %q, %v, want %s", got, err, want)
			}
		})
	}
	callers.Wait()
	later.Wait()
}

func TestNothingAllocates(t *testing.T) {
	x, y := sockets(t)
	a := start(t, x, nil)
	reply := []byte("reply")
	start(t, y, func(s *side, number uint32, _ uint8, _ []byte) error { return s.conn.Answer(number, reply) }).got = make([]string, 0, 1)
	ctx, payload, dst := t.Context(), make([]byte, 100), make([]byte, 0, 100)
	one := func() {
		if _, err := a.conn.Call(ctx, 1, payload, dst, time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	for range 100 {
		one()
	}
	// The test's own handler records each frame as a line, with two allocations.
	if n := testing.AllocsPerRun(200, one); n > 3 && !raceEnabled {
		t.Errorf("%v allocations a call", n)
	}
}

// FuzzParse: the reader accepts any bytes without a panic. A frame is read as it was
// written.
func FuzzParse(f *testing.F) {
	f.Add([]byte{})
	f.Add(appendFrame(nil, call, 1, 2, []byte("three")))
	f.Add(appendFrame(appendFrame(nil, beat, 0, 0, nil), bye, 0, 0, nil))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		for {
			got, size, err := parse(b)
			if err != nil || size == 0 {
				if err != nil && !errors.Is(err, ErrGarbage) {
					t.Fatal(err)
				}
				return
			}
			if again := appendFrame(nil, got.class, got.kind, got.number, got.payload); !bytes.Equal(again, b[:size]) {
				t.Fatalf("%x reads as %x", b[:size], again)
			}
			b = b[size:]
		}
	})
}

// FuzzConn: for any received bytes a connection ends or waits for more. It reads the
// same frames in whatever pieces the bytes come.
func FuzzConn(f *testing.F) {
	f.Add(appendFrame(nil, message, 1, 0, []byte("x")), 3)
	f.Add(appendFrame(appendFrame(nil, call, 1, 2, []byte("three")), bye, 0, 0, nil), 1)
	f.Add(appendFrame(nil, answer, 1, 77, nil), 100)
	f.Fuzz(func(t *testing.T, b []byte, cut int) {
		x, y := net.Pipe()
		a := start(t, x, nil)
		go io.Copy(io.Discard, y)
		cut = max(1, cut)
		for rest := b; len(rest) > 0; {
			n := min(cut, len(rest))
			if _, err := y.Write(rest[:n]); err != nil {
				break
			}
			rest = rest[n:]
		}
		y.Close()
		<-a.end
		var want []string
		for {
			got, size, err := parse(b)
			if err != nil || size == 0 || got.class == bye {
				break
			}
			if got.class == message || got.class == call {
				want = append(want, fmt.Sprintf("%d %s", got.kind, got.payload[:min(len(got.payload), 1<<10)]))
			}
			b = b[size:]
		}
		if heard := a.heard(); !slices.Equal(heard, want) {
			t.Errorf("handled frames %q, want %q", heard, want)
		}
	})
}
