package fleet

import (
	"context"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"math"
	mathrand "math/rand/v2"
	"net"
	"os"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/access"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// A connection begins with a greeting in which each side proves that it has the token, the worker
// first:
//
//	worker:      magic, version, nonce
//	coordinator: magic, version, nonce
//	worker:      length and encoded peer, proof
//	coordinator: epoch, process, proof
//
// A proof is an HMAC-SHA256 of both nonces, of all earlier bytes, and of the channel.
// Over TLS the channel is keying material that only the two ends of this connection have
// (as in RFC 9266), so a host between them cannot forward a proof. The key is derived
// from the token and the role. Before a peer has proven that it knows the token, the
// coordinator sends nothing that depends on the token. A greeting without TLS is allowed
// on Unix sockets only.
const (
	magic   = "\x00pdlink"
	version = 8 // the major version: a peer of another one is refused

	nonceSize = 16
	proofSize = sha256.Size
	helloSize = len(magic) + 1 + nonceSize
	saysSize  = 8 + 8 // epoch and process of the coordinator
	maxSays   = 1 << 10

	roleWorker      = "worker"
	roleCoordinator = "coordinator"
	// channelLabel and channelSize select the keying material of TLS that proofs cover.
	channelLabel = "EXPORTER-pdproxy-link"
	channelSize  = 32
)

var (
	errMagic   = errors.New("the peer does not use the protocol of pdproxy's fleet")
	errVersion = errors.New("the major versions of the fleet's protocol differ")
	errToken   = errors.New("the peer does not have the token")
	errClear   = errors.New("the peer does not encrypt the connection")
)

// peer is the description that a worker, or a standby, sends of itself.
type peer struct {
	process uint64 // a random number for each process
	slot    int
	pid     int
	node    string
	standby bool   // it is a coordinator
	least   uint64 // it refuses a coordinator of a lower epoch
}

func (p *peer) append(dst []byte) []byte {
	return fleetpb.Append(dst, &fleetpb.Peer{
		Process: p.process, Least: p.least, Slot: uint32(p.slot), Pid: uint32(p.pid), Node: p.node, Standby: p.standby,
	})
}

func (p *peer) read(b []byte) error {
	var m fleetpb.Peer
	if fleetpb.Unmarshal(b, &m, maxRecords) != nil || m.Process == 0 || m.Slot > math.MaxInt32 || m.Pid > math.MaxInt32 {
		return errMagic
	}
	*p = peer{process: m.Process, least: m.Least, slot: int(m.Slot), pid: int(m.Pid), node: m.Node, standby: m.Standby}
	return nil
}

func newPeer(slot int, node string) peer {
	return peer{process: newProcess(), slot: slot, pid: os.Getpid(), node: node}
}

// newProcess returns a random process number, never 0.
func newProcess() uint64 { return mathrand.Uint64() | 1 }

// prover makes and checks the proofs of one connection.
type prover struct {
	token []byte
	said  hash.Hash // hash of the channel and of all that was sent
}

// newProver returns a prover for the connection nc.
func newProver(nc net.Conn, token []byte) (*prover, error) {
	p := &prover{token: token, said: sha256.New()}
	switch t, secured := nc.(*link.TLS); {
	case secured:
		s := t.ConnectionState()
		channel, err := s.ExportKeyingMaterial(channelLabel, nil, channelSize)
		if err != nil {
			return nil, err
		}
		p.said.Write(channel)
	case overNetwork(nc):
		return nil, errClear
	}
	return p, nil
}

// proof returns the proof of a role for all that was sent so far.
func (p *prover) proof(role string) ([]byte, error) {
	key, err := hkdf.Key(sha256.New, p.token, []byte("pdproxy fleet"), role, sha256.Size)
	if err != nil {
		return nil, err
	}
	h := hmac.New(sha256.New, key)
	h.Write(p.said.Sum(nil))
	return h.Sum(nil), nil
}

// check verifies a peer's proof in constant time.
func (p *prover) check(role string, theirs []byte) error {
	want, err := p.proof(role)
	if err == nil && !hmac.Equal(theirs, want) {
		err = errToken
	}
	return err
}

// hello returns magic, version and a nonce.
func hello() []byte {
	b := make([]byte, helloSize)
	copy(b, magic)
	b[len(magic)] = version
	rand.Read(b[len(magic)+1:]) // never fails (crypto/rand)
	return b
}

// readHello reads a hello; begun is its part that was read before.
func readHello(r io.Reader, begun []byte) ([]byte, error) {
	b := make([]byte, helloSize)
	n := copy(b, begun)
	if _, err := io.ReadFull(r, b[n:]); err != nil {
		return nil, err
	}
	if string(b[:len(magic)]) != magic {
		return nil, errMagic
	}
	if v := b[len(magic)]; v != version {
		return nil, fmt.Errorf("%w: the peer has %d, this process has %d", errVersion, v, version)
	}
	return b, nil
}

// greetCoordinator does the worker's part of the greeting and returns the coordinator's
// epoch and process.
func greetCoordinator(nc net.Conn, token []byte, self *peer) (epoch, process uint64, err error) {
	p, err := newProver(nc, token)
	if err != nil {
		return 0, 0, err
	}
	mine := hello()
	if _, err := nc.Write(mine); err != nil {
		return 0, 0, err
	}
	theirs, err := readHello(nc, nil)
	if err != nil {
		return 0, 0, err
	}
	own := self.append(nil)
	out := append(binary.LittleEndian.AppendUint16(nil, uint16(len(own))), own...)
	p.said.Write(slices.Concat(mine, theirs, out))
	proof, err := p.proof(roleWorker)
	if err != nil {
		return 0, 0, err
	}
	if _, err := nc.Write(append(out, proof...)); err != nil {
		return 0, 0, err
	}
	b := make([]byte, saysSize+proofSize)
	if _, err := io.ReadFull(nc, b); errors.Is(err, io.EOF) {
		return 0, 0, errEnded
	} else if err != nil {
		return 0, 0, err
	}
	p.said.Write(b[:saysSize])
	if err := p.check(roleCoordinator, b[saysSize:]); err != nil {
		return 0, 0, err
	}
	return binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:]), nil
}

// greetWorker does the coordinator's part; begun is the part of the worker's greeting that
// was read before.
func greetWorker(nc net.Conn, begun, token []byte, epoch, process uint64) (who peer, err error) {
	theirs, err := readHello(nc, begun)
	if errors.Is(err, errVersion) {
		_, _ = nc.Write(hello()) // the peer can then log the version; the peer is refused in any case
	}
	if err != nil {
		return who, err
	}
	p, err := newProver(nc, token)
	if err != nil {
		return who, err
	}
	mine := hello()
	if _, err := nc.Write(mine); err != nil {
		return who, err
	}
	b := make([]byte, 2, 2+maxSays+proofSize)
	if _, err := io.ReadFull(nc, b); err != nil {
		return who, err
	}
	length := 2 + int(binary.LittleEndian.Uint16(b))
	if length > 2+maxSays {
		return who, errMagic
	}
	b = b[:length+proofSize]
	if _, err := io.ReadFull(nc, b[2:]); err != nil {
		return who, err
	}
	p.said.Write(slices.Concat(theirs, mine, b[:length]))
	if err := p.check(roleWorker, b[length:]); err != nil {
		return who, err
	}
	if err := who.read(b[2:length]); err != nil {
		return who, err
	}
	says := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, epoch), process)
	p.said.Write(says)
	proof, err := p.proof(roleCoordinator)
	if err != nil {
		return who, err
	}
	if _, err := nc.Write(append(says, proof...)); err != nil {
		return who, err
	}
	if who.least > epoch {
		return who, errFenced
	}
	return who, nil
}

// refusal returns the reason by which a Gate counts a failed greeting.
func refusal(err error) string {
	switch {
	case errors.Is(err, errVersion):
		return access.ReasonVersion
	case errors.Is(err, errToken):
		return access.ReasonToken
	case errors.Is(err, errFenced):
		return access.ReasonEpoch
	}
	return access.ReasonProtocol
}

// dialError reports that no connection to a coordinator was made.
type dialError struct{ err error }

// Error returns the text with the cause.
func (e *dialError) Error() string { return "connect to coordinator: " + e.err.Error() }

// Unwrap returns the cause.
func (e *dialError) Unwrap() error { return e.err }

var (
	errFenced = errors.New("its term has ended: a later coordinator leads")
	errEnded  = errors.New("the coordinator ended the greeting: it has another token, or no longer leads")
)

// dialCoordinator connects to a coordinator whose epoch is at least self.least. Every
// error is a dialError.
func dialCoordinator(ctx context.Context, dial func(context.Context) (net.Conn, error), token []byte, self *peer) (_ net.Conn, epoch, process uint64, err error) {
	nc, err := dial(ctx) // the function below keeps this variable
	if err != nil {
		return nil, 0, 0, &dialError{err}
	}
	greeted := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	nc.SetDeadline(time.Now().Add(access.GreetingLimit))
	epoch, process, err = greetCoordinator(nc, token, self)
	if err == nil && epoch < self.least {
		err = errFenced
	}
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
