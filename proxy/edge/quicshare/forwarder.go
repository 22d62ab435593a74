package quicshare

import (
	"errors"
	"slices"
	"syscall"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// errNoMember reports that no process has the member number.
var errNoMember = errors.New("no process has the member number")

// forwarder sends packets to other members. Only the reader of the packets uses it.
type forwarder struct {
	member *member
	socket syscall.RawConn // the member's own forwardSocket, used here to send
	to     [maxMembers]*unix.SockaddrUnix
	parts  [][]byte // of the datagram: the head, then metadata and bytes of each packet
	meta   []byte   // holds the head and all metadata; never reallocated, because parts point into it

	successors []byte // members that accept new clients
	scanned    time.Time
}

// begin starts a datagram. hops counts this forwarding too.
func (o *forwarder) begin(hops uint8) {
	if o.meta == nil {
		o.meta = make([]byte, 0, headLen+batchMost*maxMeta)
		o.parts = make([][]byte, 0, 1+2*batchMost)
	}
	o.meta = append(o.meta[:0], formatVersion, hops)
	o.parts = append(o.parts[:0], o.meta)
}

// add appends m to the datagram. m's memory must not change before send. false: m
// cannot be forwarded.
func (o *forwarder) add(m *ipv4.Message) bool {
	start := len(o.meta)
	meta, ok := appendMeta(o.meta, m)
	if !ok {
		return false
	}
	o.meta = meta
	o.parts = append(o.parts, meta[start:], m.Buffers[0][:m.N])
	return true
}

// packets returns the number of packets in the datagram.
func (o *forwarder) packets() int { return len(o.parts) / 2 }

// send sends the datagram to member n. The error is errNoMember if there is no such
// member. With another error the datagram is lost: the member's process does not read
// fast enough.
func (o *forwarder) send(n byte) error {
	if o.to[n] == nil {
		o.to[n] = &unix.SockaddrUnix{Name: o.member.dir.SocketPath(sockName(n))}
	}
	var err error
	if ctlErr := o.socket.Control(func(fd uintptr) {
		_, err = unix.SendmsgBuffers(int(fd), o.parts, nil, o.to[n], unix.MSG_DONTWAIT)
	}); ctlErr != nil {
		return ctlErr
	}
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT) {
		return errNoMember
	}
	return err
}

// successorsAge is the maximum age of the list of successors.
const successorsAge = 100 * time.Millisecond

// successorOf returns the member that takes a new client whose first connection id is
// id. The choice depends only on id and the list of successors. ok is false if the list
// is empty.
func (o *forwarder) successorOf(id []byte) (best byte, ok bool) {
	if time.Since(o.scanned) > successorsAge {
		o.successors, o.scanned = findSuccessors(o.member, o.successors[:0]), time.Now()
	}
	var most uint64
	for _, n := range o.successors {
		if w := weight(id, n); w >= most {
			best, most = n, w
		}
	}
	return best, len(o.successors) > 0
}

// dropSuccessor removes a member whose process has ended from the list of successors,
// until the list is read again.
func (o *forwarder) dropSuccessor(n byte) {
	o.successors = slices.DeleteFunc(o.successors, func(h byte) bool { return h == n })
}

// weight is the weight of member n for the client with that id. The member with the
// highest weight gets the client, so a member that joins or leaves moves only its own
// clients (rendezvous hashing).
func weight(id []byte, n byte) uint64 {
	h := uint64(14695981039346656037) // FNV-1a, then the final steps of SplitMix64
	for _, b := range id {
		h = (h ^ uint64(b)) * 1099511628211
	}
	h ^= (uint64(n) + 1) * 0x9e3779b97f4a7c15
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

// findSuccessors appends the other members that accept new clients on l's UDP port.
func findSuccessors(l *member, successors []byte) []byte {
	for n := range l.others() {
		if its, port := state(l.dir, n); its == serving && port == l.port {
			successors = append(successors, n)
		}
	}
	return successors
}
