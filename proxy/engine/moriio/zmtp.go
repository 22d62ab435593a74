package moriio

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"time"
)

const (
	// greetTimeout bounds the handshake, idleTimeout the silence after it.
	greetTimeout = 5 * time.Second
	idleTimeout  = time.Minute
	// maxFrame bounds a frame in bytes: a registration has some 200.
	maxFrame = 16 << 10
	// maxFrames bounds the frames of a message: a REQ puts an empty one first.
	maxFrames = 4
)

// The flags of a frame. Source: ZMTP 3.1, section Framing.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

var (
	errGreeting = errors.New("greet peer: not ZMTP 3 with NULL security")
	errReady    = errors.New("greet peer: no READY")
	errBounds   = errors.New("read message: longer than the limit")
)

// peer is the receiving side of one ZMTP 3 connection with NULL security, on
// which nothing is sent but the greeting and answers to pings. Source: ZMTP 3.1
// (https://rfc.zeromq.org/spec/37/); libzmq 4 speaks 3.1 and accepts 3.0.
type peer struct {
	conn net.Conn
	r    *bufio.Reader
}

// greet makes the handshake as a ROUTER.
func greet(conn net.Conn) (*peer, error) {
	p := &peer{conn: conn, r: bufio.NewReaderSize(conn, 1<<10)}
	if err := conn.SetDeadline(time.Now().Add(greetTimeout)); err != nil {
		return nil, err
	}
	hello := make([]byte, 64) // signature, version 3.0, mechanism, not a server
	hello[0], hello[9], hello[10] = 0xff, 0x7f, 3
	copy(hello[12:], "NULL")
	if _, err := conn.Write(hello); err != nil {
		return nil, err
	}
	if _, err := conn.Write(append([]byte{flagCommand, 28}, "\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"...)); err != nil {
		return nil, err
	}
	theirs := make([]byte, 64)
	if _, err := io.ReadFull(p.r, theirs); err != nil {
		return nil, err
	}
	if theirs[0] != 0xff || theirs[9]&1 == 0 || theirs[10] < 3 || string(theirs[12:17]) != "NULL\x00" {
		return nil, errGreeting
	}
	flags, body, err := p.frame()
	if err != nil {
		return nil, err
	}
	if flags&flagCommand == 0 || !bytes.HasPrefix(body, []byte("\x05READY")) {
		return nil, errReady
	}
	return p, nil
}

// message returns the last frame of the next message, which is the caller's.
func (p *peer) message() ([]byte, error) {
	if err := p.conn.SetDeadline(time.Now().Add(idleTimeout)); err != nil {
		return nil, err
	}
	for frames := 1; ; {
		flags, body, err := p.frame()
		switch {
		case err != nil:
			return nil, err
		case flags&flagCommand != 0:
			if err := p.command(body); err != nil {
				return nil, err
			}
		case flags&flagMore == 0:
			return body, nil
		default:
			if frames++; frames > maxFrames {
				return nil, errBounds
			}
		}
	}
}

// command answers a ping: its name, two bytes of time to live, and a context of
// at most 16 bytes that goes back.
func (p *peer) command(body []byte) error {
	rest, isPing := bytes.CutPrefix(body, []byte("\x04PING"))
	if !isPing || len(rest) < 2 || len(rest) > 18 {
		return nil
	}
	pong := append([]byte{flagCommand, byte(5 + len(rest) - 2)}, "\x04PONG"...)
	_, err := p.conn.Write(append(pong, rest[2:]...))
	return err
}

// frame reads one frame.
func (p *peer) frame() (flags byte, body []byte, err error) {
	if flags, err = p.r.ReadByte(); err != nil {
		return 0, nil, err
	}
	size := make([]byte, 8)
	short := size[7:]
	if flags&flagLong != 0 {
		short = size
	}
	if _, err := io.ReadFull(p.r, short); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint64(size)
	if n > maxFrame {
		return 0, nil, errBounds
	}
	body = make([]byte, n)
	_, err = io.ReadFull(p.r, body)
	return flags, body, err
}
