package edge

import "encoding/binary"

// Types and flags of HTTP/2 frames (RFC 9113 6).
const (
	frameData         = 0x0
	frameHeaders      = 0x1
	frameContinuation = 0x9
	flagEndHeaders    = 0x4
)

// headWatch follows the frames that a client sends over HTTP/2, to limit the time of a
// request head. net/http waits without a limit in the middle of a frame and of a header
// block. DATA frames are exempt, because the limits of bodies apply to them. The zero
// value stands before a frame.
type headWatch struct {
	head  [frameHead]byte
	n     int    // bytes of head
	left  uint32 // bytes of the payload still to come
	data  bool   // the payload is data
	block bool   // a header block has begun and not ended
	parts uint64 // how many frames and header blocks have ended
}

// inside reports whether a frame or a header block has begun and not ended.
func (w *headWatch) inside() bool { return w.block || w.n > 0 || w.left > 0 && !w.data }

// follow reads the next bytes of the connection.
func (w *headWatch) follow(p []byte) {
	for len(p) > 0 {
		if w.left > 0 {
			step := min(uint64(w.left), uint64(len(p)))
			p = p[step:]
			if w.left -= uint32(step); w.left == 0 {
				w.ended()
			}
			continue
		}
		step := copy(w.head[w.n:], p)
		p = p[step:]
		if w.n += step; w.n < frameHead {
			return
		}
		w.n = 0
		w.left = binary.BigEndian.Uint32(w.head[:]) >> 8
		w.data = w.head[3] == frameData
		if w.left == 0 {
			w.ended()
		}
	}
}

// ended handles the end of a frame.
func (w *headWatch) ended() {
	switch w.head[3] {
	case frameHeaders, frameContinuation:
		w.block = w.head[4]&flagEndHeaders == 0
	}
	if !w.block {
		w.parts++
	}
}
