package quicshare

import (
	"errors"
	"slices"
	"syscall"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// errGone says that no process has the lane.
var errGone = errors.New("no process has the lane")

// outlet sends packets to other lanes. It belongs to the reader of the packets.
type outlet struct {
	lane   *lane
	socket syscall.RawConn // the lane's own, which others' datagrams come to
	to     [lanes]*unix.SockaddrUnix
	parts  [][]byte // of the datagram: the head, then meta and bytes of each packet
	meta   []byte   // memory of what is not packets; never grows, as parts lie in it

	heirs   []byte // lanes that take new clients
	scanned time.Time
}

// begin starts a datagram whose packets were forwarded hops times with this one.
func (o *outlet) begin(hops uint8) {
	if o.meta == nil {
		o.meta = make([]byte, 0, headLen+batchMost*maxMeta)
		o.parts = make([][]byte, 0, 1+2*batchMost)
	}
	o.meta = append(o.meta[:0], form, hops)
	o.parts = append(o.parts[:0], o.meta)
}

// add puts m into the datagram; its memory must not change before send. false: it
// cannot be forwarded.
func (o *outlet) add(m *ipv4.Message) bool {
	start := len(o.meta)
	meta, ok := appendMeta(o.meta, m)
	if !ok {
		return false
	}
	o.meta = meta
	o.parts = append(o.parts, meta[start:], m.Buffers[0][:m.N])
	return true
}

// packets is how many the datagram has.
func (o *outlet) packets() int { return len(o.parts) / 2 }

// send sends the datagram to lane n. The error is errGone, or another one when the
// datagram is lost: the lane's process is behind with reading.
func (o *outlet) send(n byte) error {
	if o.to[n] == nil {
		o.to[n] = &unix.SockaddrUnix{Name: o.lane.dir.SocketPath(sockName(n))}
	}
	var err error
	if ctlErr := o.socket.Control(func(fd uintptr) {
		_, err = unix.SendmsgBuffers(int(fd), o.parts, nil, o.to[n], unix.MSG_DONTWAIT)
	}); ctlErr != nil {
		return ctlErr
	}
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT) {
		return errGone
	}
	return err
}

// heirsAge is how old the list of heirs may be.
const heirsAge = 100 * time.Millisecond

// heir is the lane that takes a new client whose first id is id, always the same
// of those there are. false: there is none.
func (o *outlet) heir(id []byte) (best byte, ok bool) {
	if time.Since(o.scanned) > heirsAge {
		o.heirs, o.scanned = findHeirs(o.lane, o.heirs[:0]), time.Now()
	}
	var most uint64
	for _, n := range o.heirs {
		if w := weight(id, n); w >= most {
			best, most = n, w
		}
	}
	return best, len(o.heirs) > 0
}

// disown strikes a lane that took nothing off the heirs until they are looked for
// again.
func (o *outlet) disown(n byte) {
	o.heirs = slices.DeleteFunc(o.heirs, func(h byte) bool { return h == n })
}

// weight is how much lane n is for the client of that id: the heaviest gets it, so
// that a lane that comes or goes moves no others' clients.
func weight(id []byte, n byte) uint64 {
	h := uint64(14695981039346656037) // FNV-1a, then SplitMix64's last steps
	for _, b := range id {
		h = (h ^ uint64(b)) * 1099511628211
	}
	h ^= (uint64(n) + 1) * 0x9e3779b97f4a7c15
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

// findHeirs appends to heirs the other lanes that take new clients of the lane's
// port.
func findHeirs(l *lane, heirs []byte) []byte {
	for n := range l.others() {
		if its, port := state(l.dir, n); its == serving && port == l.port {
			heirs = append(heirs, n)
		}
	}
	return heirs
}
