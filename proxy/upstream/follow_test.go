package upstream

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"
)

const chunkedHead = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

// lentSpace is the memory of a Sink, 64 bytes. There is none while it is free.
type lentSpace []byte

func (s *lentSpace) Take() []byte {
	if *s == nil {
		*s = make([]byte, 64)
	}
	return *s
}

func (s *lentSpace) Free() { *s = nil }

// space is the part of a Sink with the memory.
type space interface {
	Take() []byte
	Free()
}

// sink is a Sink with the function use.
type sink struct {
	space
	use func(n int, err error) bool
}

func (s sink) Use(n int, _ time.Time, err error) bool { return s.use(n, err) }

// each reads a body by Each. It returns the body and the error that ended it.
func each(resp *Response) (string, error) {
	var got strings.Builder
	var end error
	var p lentSpace
	resp.Each(sink{&p, func(n int, err error) bool {
		got.Write(p[:n])
		end = err
		return true
	}})
	return got.String(), end
}

// Each returns the pieces as they arrive, wherever the engine's writes divide the
// framing. The connection can be used again.
func TestEach(t *testing.T) {
	wire := "1\r\na\r\n2;x=y\r\nbc\r\n100\r\n" + strings.Repeat("d", 256) + "\r\n1\r\ne\r\n0\r\nTrailer: x\r\n\r\n"
	want := "abc" + strings.Repeat("d", 256) + "e"
	for _, step := range []int{1, 3, 50, 200, len(wire)} {
		o := listen(t, func(c *net.TCPConn, br *bufio.Reader, _ int) {
			for readRequest(br) {
				io.WriteString(c, chunkedHead)
				for rest := wire; rest != ""; {
					n := min(step, len(rest))
					io.WriteString(c, rest[:n])
					rest = rest[n:]
				}
			}
		})
		cl := New(o)
		defer cl.CloseIdle()
		for range 3 {
			resp, err := cl.Do(t.Context(), get())
			if err != nil {
				t.Fatal(err)
			}
			if got, err := each(resp); got != want || err != io.EOF {
				t.Errorf("steps of %d: %d bytes, %v", step, len(got), err)
			}
			resp.Close()
		}
		if s := cl.Stats(); s.Dials != 1 {
			t.Errorf("steps of %d: %+v, want one connection", step, s)
		}
	}
}

// Each stops when use returns false, and also reads a body without chunks.
func TestEachStops(t *testing.T) {
	o := listen(t, func(c *net.TCPConn, br *bufio.Reader, _ int) {
		for readRequest(br) {
			io.WriteString(c, chunkedHead+"1\r\na\r\n")
			time.Sleep(time.Millisecond) // makes it likely that the next chunk is followed
			io.WriteString(c, "1\r\nb\r\n")
		}
	})
	cl := New(o)
	defer cl.CloseIdle()
	resp, err := cl.Do(t.Context(), get())
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Close()
	p, got := lentSpace(nil), ""
	resp.Each(sink{&p, func(n int, err error) bool {
		got += string(p[:n])
		return len(got) < 2
	}})
	if got != "ab" {
		t.Errorf("read %q", got)
	}
}

// A followed body that ends too early is an error, also if the connection's end came
// together with data while a piece was in use.
func TestEachBreaks(t *testing.T) {
	for name, end := range map[string]string{"between chunks": "1\r\nb\r\n", "inside a chunk": "5\r\nb", "bad framing": "x\r\n"} {
		busy, gone := make(chan struct{}), make(chan struct{})
		o := listen(t, func(c *net.TCPConn, br *bufio.Reader, _ int) {
			readRequest(br)
			io.WriteString(c, chunkedHead+"1\r\na\r\n")
			<-busy
			io.WriteString(c, "1\r\n-\r\n")
			<-busy
			io.WriteString(c, end)
			c.Close()
			close(gone)
		})
		cl := New(o)
		defer cl.CloseIdle()
		resp, err := cl.Do(t.Context(), get())
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Close()
		p, got, last := lentSpace(nil), "", error(nil)
		resp.Each(sink{&p, func(n int, err error) bool {
			got, last = got+string(p[:n]), err
			switch {
			case n == 0:
			case got == "a":
				busy <- struct{}{}
			case got == "a-":
				busy <- struct{}{}
				<-gone
			}
			return true
		}})
		if want := map[string]string{"bad framing": "a-"}[name]; got != "a-b" && got != want {
			t.Errorf("%s: read %q", name, got)
		}
		if fault(t, last, OpBody); name != "bad framing" && !errors.Is(last, io.ErrUnexpectedEOF) {
			t.Errorf("%s: %v", name, last)
		}
	}
}

// A followed body times out if no bytes come.
func TestEachIdle(t *testing.T) {
	o := listen(t, func(c *net.TCPConn, br *bufio.Reader, _ int) {
		readRequest(br)
		io.WriteString(c, chunkedHead+"1\r\na\r\n")
		io.Copy(io.Discard, br)
	})
	cl := New(o)
	defer cl.CloseIdle()
	req := get()
	req.IdleTimeout = 1200 * time.Millisecond // more than secondLook
	resp, err := cl.Do(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Close()
	if got, err := each(resp); got != "a" || !fault(t, err, OpBody).Timeout {
		t.Errorf("read %q, %v", got, err)
	}
}

// The end of the context reaches the engine while a piece is still in use.
func TestEachHangUp(t *testing.T) {
	noticed := make(chan struct{})
	busy := make(chan struct{})
	o := listen(t, func(c *net.TCPConn, br *bufio.Reader, _ int) {
		readRequest(br)
		io.WriteString(c, chunkedHead+"1\r\na\r\n")
		<-busy
		io.WriteString(c, "1\r\nb\r\n")
		io.Copy(io.Discard, br)
		close(noticed)
	})
	cl := New(o)
	defer cl.CloseIdle()
	ctx, cancel := context.WithCancelCause(t.Context())
	resp, err := cl.Do(ctx, get())
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Close()
	cause := errors.New("the client left")
	p, got, last := lentSpace(nil), "", error(nil)
	resp.Each(sink{&p, func(n int, err error) bool {
		got, last = got+string(p[:n]), err
		switch got {
		case "a":
			close(busy)
		case "ab":
			cancel(cause)
			<-noticed
			got += "!"
		}
		return true
	}})
	if got != "ab!" || !errors.Is(last, cause) {
		t.Errorf("read %q, %v", got, last)
	}
}

// countedSpace informs the test when its memory is free.
type countedSpace struct {
	lentSpace
	freed chan struct{} // room for one
}

func (s *countedSpace) Free() {
	s.lentSpace.Free()
	select {
	case s.freed <- struct{}{}:
	default:
	}
}

// A stream that waits for its engine holds no memory for the next piece, and no read
// buffer of its connection. The engine sends each piece only after the memory is free.
func TestEachWaitsWithoutMemory(t *testing.T) {
	if runtime.GOOS == "windows" {
		return // each piece is read by Read, which needs memory while it waits
	}
	s := &countedSpace{freed: make(chan struct{}, 1)}
	o := listen(t, func(c *net.TCPConn, br *bufio.Reader, _ int) {
		readRequest(br)
		io.WriteString(c, chunkedHead)
		for range 3 {
			<-s.freed
			io.WriteString(c, "1\r\na\r\n")
		}
		<-s.freed
		io.WriteString(c, "0\r\n\r\n")
	})
	cl := New(o)
	defer cl.CloseIdle()
	resp, err := cl.Do(t.Context(), get())
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Close()
	cn, got, last := resp.body.conn, "", error(nil)
	resp.Each(sink{s, func(n int, err error) bool {
		if n > 0 && cn.buf != nil {
			t.Error("the connection has a read buffer")
		}
		got, last = got+string(s.Take()[:n]), err
		return true
	}})
	if got != "aaa" || last != io.EOF {
		t.Errorf("read %q, %v", got, last)
	}
}
