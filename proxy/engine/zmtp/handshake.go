package zmtp

import (
	"bytes"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

var (
	// ErrMechanism means that the peer does not use ZMTP 3, or uses another security
	// mechanism than this side.
	ErrMechanism = errors.New("greet peer: not ZMTP 3 with the required security mechanism")
	// ErrPassword means that the peer presented another password.
	ErrPassword = errors.New("greet peer: a wrong password")

	errHello    = errors.New("greet peer: HELLO of PLAIN is not in its form")
	errMetadata = errors.New("greet peer: metadata is not in its form")
)

// The security mechanisms. Source: RFC 23, section The NULL Security Mechanism;
// RFC 24.
const (
	mechanismNull  = "NULL"
	mechanismPlain = "PLAIN"
)

// greetingLen is the length of a greeting in bytes: a signature of 10, the version in 2,
// the mechanism in 20, 1 byte that is set if this side is the mechanism's server, and 31
// of filler. Source: RFC 23, section The Greeting.
const greetingLen = 64

// peers lists, for each socket type, the socket types that the peer may have. Source: RFC
// 23, section The Socket-Type Property.
var peers = map[Socket][]string{
	Sub:    {"PUB", "XPUB"},
	Dealer: {"ROUTER", "DEALER", "REP"},
	Router: {"DEALER", "ROUTER", "REQ"},
}

// handshake makes the handshake. With a password, this side is the server of the
// mechanism PLAIN. The caller has set a deadline.
func (c *Conn) handshake(password string) error {
	c.armed = true
	mechanism := mechanismNull
	if password != "" {
		mechanism = mechanismPlain
	}
	if err := c.greet(mechanism); err != nil {
		return err
	}
	if password != "" {
		return c.plain(password)
	}
	if err := c.sendCommand("READY", c.metadata()); err != nil {
		return err
	}
	theirs, err := c.expect("READY")
	if err != nil {
		return err
	}
	return c.checkMetadata(theirs)
}

// greet exchanges the greetings.
func (c *Conn) greet(mechanism string) error {
	ours := [greetingLen]byte{0: 0xff, 9: 0x7f, 10: 3}
	copy(ours[12:32], mechanism)
	if mechanism == mechanismPlain {
		ours[32] = 1
	}
	if _, err := c.conn.Write(ours[:]); err != nil {
		return err
	}
	var theirs [greetingLen]byte
	if _, err := io.ReadFull(c.r, theirs[:]); errors.Is(err, io.ErrUnexpectedEOF) {
		return ErrMechanism // libzmq closes within the greeting when the mechanisms differ
	} else if err != nil {
		return err
	}
	if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || !bytes.Equal(theirs[12:32], ours[12:32]) {
		return ErrMechanism
	}
	return nil
}

// plain is the server's half of PLAIN. Source: RFC 24.
func (c *Conn) plain(password string) error {
	hello, err := c.expect("HELLO")
	if err != nil {
		return err
	}
	_, rest, ok := cutText(hello)
	shown, rest, ok2 := cutText(rest)
	if !ok || !ok2 || len(rest) > 0 {
		return errHello
	}
	if subtle.ConstantTimeCompare(shown, []byte(password)) != 1 {
		_ = c.sendCommand("ERROR", []byte("\x0ewrong password")) // a peer that has left does not change the reason
		return ErrPassword
	}
	if err := c.sendCommand("WELCOME", nil); err != nil {
		return err
	}
	initiate, err := c.expect("INITIATE")
	if err != nil {
		return err
	}
	if err := c.checkMetadata(initiate); err != nil {
		return err
	}
	return c.sendCommand("READY", c.metadata())
}

// cutText cuts off a text that follows its length in one byte.
func cutText(b []byte) (text, rest []byte, ok bool) {
	if len(b) == 0 || len(b)-1 < int(b[0]) {
		return nil, nil, false
	}
	end := 1 + int(b[0])
	return b[1:end], b[end:], true
}

// expect reads a command with the given name and returns the bytes after the name.
func (c *Conn) expect(name string) ([]byte, error) {
	flags, size, err := c.header()
	if err != nil {
		return nil, err
	}
	if flags&flagCommand == 0 {
		return nil, fmt.Errorf("greet peer: a message instead of %s", name)
	}
	body, err := c.readCommand(size)
	if err != nil {
		return nil, err
	}
	got, data, ok := cutText(body)
	switch {
	case ok && string(got) == name:
		return data, nil
	case ok && string(got) == "ERROR":
		reason, _, _ := cutText(data)
		return nil, fmt.Errorf("greet peer: it refuses the connection: %q", reason)
	}
	return nil, fmt.Errorf("greet peer: another command than %s", name)
}

// metadata returns the properties of this side.
func (c *Conn) metadata() []byte {
	const name = "Socket-Type"
	b := append([]byte{byte(len(name))}, name...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(c.o.Socket)))
	return append(b, c.o.Socket...)
}

// checkMetadata checks the form of the peer's metadata, and that its socket type suits
// this side's. The letter case of property names does not matter. Source: RFC 23, section
// Metadata.
func (c *Conn) checkMetadata(b []byte) error {
	for len(b) > 0 {
		name, rest, ok := cutText(b)
		if !ok || len(name) == 0 || len(rest) < 4 {
			return errMetadata
		}
		size := binary.BigEndian.Uint32(rest)
		rest = rest[4:]
		if uint64(size) > uint64(len(rest)) {
			return errMetadata
		}
		value := rest[:size]
		b = rest[size:]
		if strings.EqualFold(string(name), "Socket-Type") && !slices.Contains(peers[c.o.Socket], string(value)) {
			return fmt.Errorf("greet peer: a socket of type %.16q does not suit %s", value, c.o.Socket)
		}
	}
	return nil
}
