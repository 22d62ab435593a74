package link

import "encoding/binary"

// class is the class of a frame.
type class uint8

const (
	beat    class = iota // a heartbeat
	message              // a frame without an answer
	call                 // a frame with an answer of the same number
	answer
	bye // the last frame of a side that leaves
)

// frame is one frame. On the wire: the number of bytes that follow (4 bytes,
// little-endian), class (1), kind (1), number (4, little-endian), payload.
type frame struct {
	class   class
	kind    uint8 // chosen by the handlers
	number  uint32
	payload []byte
}

// headSize is the number of bytes before the payload. headRest is the part of headSize
// that the length field counts.
const (
	headSize = 4 + headRest
	headRest = 1 + 1 + 4
)

func appendFrame(dst []byte, what class, kind uint8, number uint32, payload []byte) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(headRest+len(payload)))
	dst = append(dst, byte(what), kind)
	dst = binary.LittleEndian.AppendUint32(dst, number)
	return append(dst, payload...)
}

// parse reads the first frame of b. The payload aliases b. Size 0: b does not contain a
// complete frame.
func parse(b []byte) (f frame, size int, err error) {
	if len(b) < headSize {
		return frame{}, 0, nil
	}
	length := binary.LittleEndian.Uint32(b)
	f = frame{class: class(b[4]), kind: b[5], number: binary.LittleEndian.Uint32(b[6:])}
	switch {
	case length < headRest || length > headRest+MaxFrame:
		return frame{}, 0, Garbage("length of a frame")
	case f.class > bye:
		return frame{}, 0, Garbage("class of a frame")
	case (f.class == beat || f.class == bye) && length != headRest:
		return frame{}, 0, Garbage("frame that says more than it may")
	}
	size = 4 + int(length)
	if len(b) < size {
		return frame{}, 0, nil
	}
	f.payload = b[headSize:size:size]
	return f, size, nil
}

// keepRest returns the bytes of in after the first used bytes, with capacity for the next
// read. The memory for a large frame grows as the bytes arrive, because a peer could
// announce a length that it never sends.
func keepRest(in []byte, used int) []byte {
	rest := in[used:]
	switch {
	case len(rest) == 0 && cap(in) <= keptBuffer:
		return in[:0]
	case len(rest) == 0:
		return make([]byte, 0, usualBuffer)
	case len(rest) == cap(in):
		grown := make([]byte, len(rest), 2*cap(in))
		copy(grown, rest)
		return grown
	case used == 0: // a record of TLS is a small part of a large frame
		return in
	}
	return in[:copy(in[:cap(in)], rest)]
}
