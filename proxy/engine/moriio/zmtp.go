package moriio

import (
	"bufio"
	"bytes"
	"crypto/subtle"
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
	errGreeting = errors.New("greet peer: not ZMTP 3 with the security mechanism that is asked for")
	errReady    = errors.New("greet peer: no READY")
	errHello    = errors.New("greet peer: no HELLO of PLAIN security")
	errPassword = errors.New("greet peer: a wrong password")
	errBounds   = errors.New("read message: longer than the limit")
)

// The security mechanisms of ZMTP 3: none, and a user's name with a password.
const (
	mechanismNull  = "NULL"
	mechanismPlain = "PLAIN"
)

// metadata is what a ROUTER says of itself.
const metadata = "\x0bSocket-Type\x00\x00\x00\x06ROUTER"

// peer is the receiving side of one ZMTP 3 connection, on which nothing is sent
// but the handshake and answers to pings. Source: ZMTP 3.1
// (https://rfc.zeromq.org/spec/37/); libzmq 4 speaks 3.1 and accepts 3.0.
type peer struct {
	conn net.Conn
	r    *bufio.Reader
}

// greet makes the handshake as a ROUTER. With a password the peer must show it,
// with any name; without, it must ask for no security.
func greet(conn net.Conn, password string) (*peer, error) {
	p := &peer{conn: conn, r: bufio.NewReaderSize(conn, 1<<10)}
	if err := conn.SetDeadline(time.Now().Add(greetTimeout)); err != nil {
		return nil, err
	}
	hello := make([]byte, 64) // signature, version 3.0, mechanism, whether a server of it
	hello[0], hello[9], hello[10] = 0xff, 0x7f, 3
	mechanism := mechanismNull
	if password != "" {
		mechanism, hello[32] = mechanismPlain, 1
	}
	copy(hello[12:32], mechanism)
	if _, err := conn.Write(hello); err != nil {
		return nil, err
	}
	theirs := make([]byte, 64)
	if _, err := io.ReadFull(p.r, theirs); errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, errGreeting // libzmq leaves so when it sees another mechanism than its own
	} else if err != nil {
		return nil, err
	}
	if theirs[0] != 0xff || theirs[9]&1 == 0 || theirs[10] < 3 || string(bytes.TrimRight(theirs[12:32], "\x00")) != mechanism {
		return nil, errGreeting
	}
	if password != "" {
		return p, p.plain(password)
	}
	if err := p.say("READY", metadata); err != nil {
		return nil, err
	}
	_, err := p.expect("READY", errReady)
	return p, err
}

// plain is the server's half of PLAIN. Source: https://rfc.zeromq.org/spec/24/.
func (p *peer) plain(password string) error {
	body, err := p.expect("HELLO", errHello)
	if err != nil {
		return err
	}
	_, rest, ok := counted(body)
	shown, rest, ok2 := counted(rest)
	if !ok || !ok2 || len(rest) > 0 {
		return errHello
	}
	if subtle.ConstantTimeCompare(shown, []byte(password)) != 1 {
		return errors.Join(errPassword, p.say("ERROR", "\x0dwrong password"))
	}
	if err := p.say("WELCOME", ""); err != nil {
		return err
	}
	if _, err := p.expect("INITIATE", errReady); err != nil {
		return err
	}
	return p.say("READY", metadata)
}

// counted cuts off a text whose first byte is its length.
func counted(body []byte) (text, rest []byte, ok bool) {
	if len(body) == 0 || len(body) <= int(body[0]) {
		return nil, nil, false
	}
	end := 1 + int(body[0])
	return body[1:end], body[end:], true
}

// say sends a command.
func (p *peer) say(name, body string) error {
	command := append([]byte{flagCommand, byte(1 + len(name) + len(body)), byte(len(name))}, name+body...)
	_, err := p.conn.Write(command)
	return err
}

// expect reads a command and returns what follows its name, or the error if it
// is another one.
func (p *peer) expect(name string, or error) ([]byte, error) {
	flags, body, err := p.frame()
	if err != nil {
		return nil, err
	}
	rest, is := bytes.CutPrefix(body, append([]byte{byte(len(name))}, name...))
	if flags&flagCommand == 0 || !is {
		return nil, or
	}
	return rest, nil
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
	return p.say("PONG", string(rest[2:]))
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
