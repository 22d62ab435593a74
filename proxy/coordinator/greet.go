package coordinator

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net"
	"os"
	"time"
)

// A connection begins with who the two are, each proving that it knows the token
// before it believes the other:
//
//	worker:      magic, version, its nonce
//	coordinator: magic, version, its nonce, epoch, process, proof
//	worker:      length and rest of what it says of itself, proof
//
// A proof is the HMAC-SHA256, with the token, of who speaks, both nonces and what
// it says. No request of HTTP and no record of TLS begins as the magic does.
const (
	magic   = "\x00pdlink"
	version = 2

	nonceSize = 16
	proofSize = sha256.Size
	saysSize  = 8 + 8 // what the coordinator says: epoch and process
	mostSays  = 1 << 10

	// greetingLimit is how long the greeting may take in all.
	greetingLimit = 3 * time.Second
)

var (
	errMagic   = errors.New("the peer does not speak the protocol of pdproxy's fleet")
	errVersion = errors.New("the peer speaks another version of the fleet's protocol")
	errToken   = errors.New("the peer does not know the token")
)

// peer is what a worker, or a coordinator that stands by, says of itself.
type peer struct {
	process uint64 // random, another for each process
	slot    int
	pid     int
	node    string
	standby bool // it is a coordinator
}

func (p *peer) append(dst []byte) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, p.process)
	dst = appendText(appendUint(appendUint(dst, p.slot), p.pid), p.node)
	if p.standby {
		return append(dst, 1)
	}
	return append(dst, 0)
}

func (p *peer) read(b []byte) error {
	r := reader{b: b}
	if process := r.take(8); process != nil {
		p.process = binary.LittleEndian.Uint64(process)
	}
	p.slot, p.pid = int(r.most(1<<31-1)), int(r.most(1<<31-1))
	p.node, p.standby = string(r.text()), r.most(1) != 0
	if r.bad || len(r.b) > 0 {
		return errMagic
	}
	return nil
}

func newPeer(slot int, node string) peer {
	return peer{process: newProcess(), slot: slot, pid: os.Getpid(), node: node}
}

// newProcess names a process, never 0.
func newProcess() uint64 { return mathrand.Uint64() | 1 }

func proof(token []byte, who string, nonces, says []byte) []byte {
	h := hmac.New(sha256.New, token)
	_, _ = io.WriteString(h, who) // a hash takes all
	h.Write(nonces)
	h.Write(says)
	return h.Sum(nil)
}

// hello is magic, version and nonce.
func hello() []byte {
	b := make([]byte, len(magic)+1+nonceSize)
	copy(b, magic)
	b[len(magic)] = version
	rand.Read(b[len(magic)+1:]) // never fails (crypto/rand)
	return b
}

// readHello reads what hello made, of which the first bytes may have been read, and
// returns the nonce.
func readHello(r io.Reader, begun []byte) ([]byte, error) {
	b := make([]byte, len(magic)+1+nonceSize)
	n := copy(b, begun)
	if _, err := io.ReadFull(r, b[n:]); err != nil {
		return nil, err
	}
	if string(b[:len(magic)]) != magic {
		return nil, errMagic
	}
	if v := b[len(magic)]; v != version {
		return nil, fmt.Errorf("%w: %d, this is %d", errVersion, v, version)
	}
	return b[len(magic)+1:], nil
}

// greetCoordinator is the worker's part. It returns what the coordinator says. One
// of a lower epoch than least is told nothing.
func greetCoordinator(nc net.Conn, token []byte, self *peer, least uint64) (epoch, process uint64, err error) {
	mine := hello()
	if _, err := nc.Write(mine); err != nil {
		return 0, 0, err
	}
	theirs, err := readHello(nc, nil)
	if err != nil {
		return 0, 0, err
	}
	b := make([]byte, saysSize+proofSize)
	if _, err := io.ReadFull(nc, b); err != nil {
		return 0, 0, err
	}
	says, nonces := b[:saysSize], append(mine[len(magic)+1:], theirs...)
	if !hmac.Equal(b[saysSize:], proof(token, "coordinator", nonces, says)) {
		return 0, 0, errToken
	}
	if epoch = binary.LittleEndian.Uint64(says); epoch < least {
		return 0, 0, errFenced
	}
	own := self.append(nil)
	out := binary.LittleEndian.AppendUint16(nil, uint16(len(own)))
	out = append(append(out, own...), proof(token, "worker", nonces, own)...)
	if _, err := nc.Write(out); err != nil {
		return 0, 0, err
	}
	return epoch, binary.LittleEndian.Uint64(says[8:]), nil
}

// greetWorker is the coordinator's part; begun is what has been read of the
// worker's.
func greetWorker(nc net.Conn, begun, token []byte, epoch, process uint64) (p peer, err error) {
	theirs, err := readHello(nc, begun)
	if err != nil {
		return p, err
	}
	out := hello()
	nonces := append(theirs, out[len(magic)+1:]...)
	says := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, epoch), process)
	out = append(append(out, says...), proof(token, "coordinator", nonces, says)...)
	if _, err := nc.Write(out); err != nil {
		return p, err
	}
	var size [2]byte
	if _, err := io.ReadFull(nc, size[:]); err != nil {
		return p, err
	}
	length := int(binary.LittleEndian.Uint16(size[:]))
	if length > mostSays {
		return p, errMagic
	}
	b := make([]byte, length+proofSize)
	if _, err := io.ReadFull(nc, b); err != nil {
		return p, err
	}
	if !hmac.Equal(b[length:], proof(token, "worker", nonces, b[:length])) {
		return p, errToken
	}
	return p, p.read(b[:length])
}

// dialError says that no connection to a coordinator came about.
type dialError struct{ err error }

// Error says so, and why.
func (e *dialError) Error() string { return "connect to coordinator: " + e.err.Error() }

// Unwrap returns why.
func (e *dialError) Unwrap() error { return e.err }

var errFenced = errors.New("its term is over: there is a later one")

// dialCoordinator connects to a coordinator of at least an epoch. Every error is a
// dialError.
func dialCoordinator(ctx context.Context, dial func(context.Context) (net.Conn, error), token []byte, self *peer, least uint64) (_ net.Conn, epoch, process uint64, err error) {
	nc, err := dial(ctx) // stays what it is: what ends with ctx may come late
	if err != nil {
		return nil, 0, 0, &dialError{err}
	}
	greeted := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	nc.SetDeadline(time.Now().Add(greetingLimit))
	epoch, process, err = greetCoordinator(nc, token, self, least)
	if !greeted() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		nc.Close()
		return nil, 0, 0, &dialError{err}
	}
	nc.SetDeadline(time.Time{})
	return nc, epoch, process, nil
}
