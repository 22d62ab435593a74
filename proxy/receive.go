package proxy

import (
	"io"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
)

// readBody reads the client's body whole, within the limits, and takes off the
// coding that the client has put on it.
func (x *exchange) readBody(client string) error {
	limit := int64(x.cfg.Server.MaxBody)
	if x.r.ContentLength > limit {
		return errBodyTooLarge(limit)
	}
	coding, err := bodyCoding(x.r.Header)
	if err != nil {
		return err
	}
	if b := incomingOf(x.ctx); b != nil {
		b.of(client)
	}
	if err := x.receive(int(limit)); err != nil {
		return err
	}
	x.rc.SetReadDeadline(time.Time{}) // what follows only listens for the hang-up
	if coding == nil {
		return nil
	}
	return x.decode(coding, int(limit))
}

// receive reads the body as it comes into x.body. Memory follows the bytes that
// have come, not the length that the client announces.
func (x *exchange) receive(limit int) (err error) {
	first, announced := 4<<10, 0
	if x.r.ContentLength >= 0 {
		announced = int(x.r.ContentLength) + 1 // room for the read that finds the end
		first = buffer.FirstRoom(announced)
	}
	if announced > buffer.WholeRead && int64(announced) > x.share.Most() {
		return errBodyNeverFits
	}
	if x.body, err = x.hold(first); err != nil {
		return err
	}
	return x.fill(x.r.Body, announced, limit, func(err error) error { return bodyReadError(x.ctx, err) })
}

// fill reads r to its end into x.body. Announced is the likely number of bytes, 0 if it
// is not known. More than limit bytes are an error. Failed turns the error of a read into
// the error that the client gets.
func (x *exchange) fill(r io.Reader, announced, limit int, failed func(error) error) error {
	for {
		if len(x.body.B) == cap(x.body.B) {
			if err := x.grow(x.body, announced, limit); err != nil {
				return err
			}
		}
		n, err := r.Read(x.body.B[len(x.body.B):cap(x.body.B)])
		x.body.B = x.body.B[:len(x.body.B)+n]
		if len(x.body.B) > limit {
			return errBodyTooLarge(int64(limit))
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return failed(err)
		}
	}
}

// grow gives b, which is full, more room for a body of at most limit bytes.
func (x *exchange) grow(b *buffer.Buffer, announced, limit int) error {
	if err := b.Grow(announced, limit+1); err != nil {
		return x.noMemory(max(announced, min(2*cap(b.B), limit)), err)
	}
	return nil
}
