package upstream

import "math"

const (
	maxChunkLine = 2 << 10  // bytes of one chunk's size and extensions
	maxTrailer   = 16 << 10 // bytes of all trailer lines
)

// chunkState is the part of a chunked body to which the next byte belongs.
type chunkState uint8

const (
	inSize      chunkState = iota // hex digits
	inSizeSpace                   // white space after the digits, with which some servers pad
	inExtension
	inSizeLF
	inData
	inDataCR
	inDataLF
	inTrailer // start of a trailer line, or of the final empty line
	inTrailerLine
	inTrailerLF
	inLastLF
	inEnd
)

// chunks decodes a chunked body (RFC 9112, 7.1) that may be cut anywhere. Extensions
// and trailers are dropped. The zero value is ready for use.
type chunks struct {
	left   int64 // bytes of the chunk's data still to come
	line   int   // number of size digits, or bytes of the extension or of the trailer
	state  chunkState
	failed error
}

// done reports whether the body has ended.
func (d *chunks) done() bool { return d.state == inEnd }

// decode removes the framing from b in place. Afterwards b[:n] is data, and used is how
// many bytes of b belonged to the body. used < len(b) only at the end of the body or
// with an error. An error is permanent.
func (d *chunks) decode(b []byte) (n, used int, err error) {
	for used < len(b) && d.state != inEnd && d.failed == nil {
		if d.state == inData {
			k := int(min(d.left, int64(len(b)-used)))
			copy(b[n:], b[used:used+k])
			n, used, d.left = n+k, used+k, d.left-int64(k)
			if d.left == 0 {
				d.state = inDataCR
			}
			continue
		}
		d.failed = d.step(b[used])
		used++
	}
	return n, used, d.failed
}

// step reads one byte of framing.
func (d *chunks) step(c byte) error {
	switch d.state {
	case inSize, inSizeSpace, inExtension:
		return d.sizeLine(c)
	case inSizeLF:
		if c != '\n' {
			return errChunkSize
		}
		d.line, d.state = 0, inData
		if d.left == 0 {
			d.state = inTrailer
		}
	case inDataCR:
		if c != '\r' {
			return errChunkEnd
		}
		d.state = inDataLF
	case inDataLF:
		if c != '\n' {
			return errChunkEnd
		}
		d.state = inSize
	default:
		return d.trailer(c)
	}
	return nil
}

func (d *chunks) sizeLine(c byte) error {
	if d.line > 0 && c == '\r' {
		d.state = inSizeLF
		return nil
	}
	d.line++
	switch d.state {
	case inSize:
		if digit, ok := hexDigit(c); ok {
			if d.line > 16 || d.left > math.MaxInt64>>4 {
				return errChunkSize
			}
			d.left = d.left<<4 | int64(digit)
			return nil
		}
		switch {
		case d.line == 1:
			return errChunkSize
		case c == ';':
			d.state = inExtension
		case c == ' ' || c == '\t':
			d.state = inSizeSpace
		default:
			return errChunkSize
		}
	case inSizeSpace:
		if c != ' ' && c != '\t' {
			return errChunkSize
		}
	case inExtension:
		if c < ' ' && c != '\t' {
			return errChunkSize
		}
	}
	if d.line > maxChunkLine {
		return errChunkLine
	}
	return nil
}

func (d *chunks) trailer(c byte) error {
	if d.line++; d.line > maxTrailer {
		return errTrailerBytes
	}
	switch {
	case d.state == inTrailer && c == '\r':
		d.state = inLastLF
	case d.state == inTrailerLine && c == '\r':
		d.state = inTrailerLF
	case d.state == inTrailerLF && c == '\n':
		d.state = inTrailer
	case d.state == inLastLF && c == '\n':
		d.state = inEnd
	case (d.state == inTrailer || d.state == inTrailerLine) && (c >= ' ' || c == '\t'):
		d.state = inTrailerLine
	default:
		return errTrailer
	}
	return nil
}

func hexDigit(c byte) (byte, bool) {
	switch {
	case '0' <= c && c <= '9':
		return c - '0', true
	case 'a' <= c|0x20 && c|0x20 <= 'f':
		return c | 0x20 - 'a' + 10, true
	}
	return 0, false
}
