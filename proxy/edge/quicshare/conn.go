package quicshare

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/quic-go/quic-go"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// Conn is a UDP socket of a shared port. Its process is one member of the port. quic-go
// reads it in batches, as a *net.UDPConn, and writes to it as to one. Reads return only
// the member's own packets and packets of new clients. ReadBatch must be called by one
// goroutine; the other methods are safe for concurrent use.
type Conn struct {
	*net.UDPConn
	batch  *ipv4.PacketConn
	member *member

	inbox   inbox
	waiting atomic.Bool // the reader is in a read of the UDP socket, or about to start one
	mu      sync.Mutex  // held while the read deadline or the state changes
	ended   bool        // quic-go set a deadline, to stop reading; guarded by mu
	drained bool        // guarded by mu
	serving atomic.Bool // this member accepts new clients; changes with mu held

	known     recent    // used only by the reader
	forwarder forwarder // used only by the reader
	hops      [batchMost]uint8

	forwarded, received, dropped atomic.Uint64
}

// batchMost bounds the messages of one ReadBatch; quic-go requests 8.
const batchMost = 16

var (
	_ quic.OOBCapablePacketConn  = (*Conn)(nil)
	_ quic.ConnectionIDGenerator = (*member)(nil)
)

// Listen joins dir as the lowest free member number and opens the UDP address,
// host:port. Other members may have the address open; Listen fails if any other socket
// has it. The kernel then also delivers packets of the other members' connections here,
// so the caller must start Run and the transport's reading at once. Until Serve, new
// clients go to members that serve, if there are any.
func Listen(dir *privatedir.Dir, addr string) (*Conn, error) {
	l, err := join(dir)
	if err != nil {
		return nil, err
	}
	udp, err := l.openPort(addr)
	if err != nil {
		return nil, errors.Join(err, l.close())
	}
	c := &Conn{UDPConn: udp, member: l, known: newRecent(), batch: ipv4.NewPacketConn(udp)}
	if c.forwarder.socket, err = l.forwardSocket.SyscallConn(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	c.forwarder.member = l
	return c, nil
}

// Transport returns a transport over c. Its connection ids name the member. Its keys
// are shared by all members of the directory, so that any member can send a stateless
// reset for a connection whose process died.
func (c *Conn) Transport() (*quic.Transport, error) {
	reset, err := c.member.key("stateless reset")
	if err != nil {
		return nil, fmt.Errorf("derive the reset key: %w", err)
	}
	token, err := c.member.key("address token")
	if err != nil {
		return nil, fmt.Errorf("derive the token key: %w", err)
	}
	return &quic.Transport{
		Conn: c, ConnectionIDGenerator: c.member,
		StatelessResetKey: (*quic.StatelessResetKey)(&reset), TokenGeneratorKey: (*quic.TokenGeneratorKey)(&token),
	}, nil
}

// Run receives the packets that other members forward, until Close.
func (c *Conn) Run() {
	buf := make([]byte, 64<<10)
	put := func(p *packet) {
		if c.inbox.put(p) {
			c.received.Add(1)
		} else {
			c.dropped.Add(1)
		}
	}
	for {
		n, err := c.member.forwardSocket.Read(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || decode(buf[:n], put) != nil {
			c.dropped.Add(1)
			continue
		}
		if c.waiting.CompareAndSwap(true, false) {
			c.wake()
		}
	}
}

// past is a read deadline that has expired.
var past = time.Unix(1, 0)

// wake interrupts a read of the UDP socket.
func (c *Conn) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.UDPConn.SetReadDeadline(past) // fails only on a closed socket, which has no reader
}

// woken reports whether err comes from wake. It then clears the deadline, so that the
// next read waits again.
func (c *Conn) woken(err error) bool {
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.ended && c.UDPConn.SetReadDeadline(time.Time{}) == nil
}

// SetReadDeadline stops quic-go's reading: while a deadline is set, reads fail. The
// zero time lets reads go on.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = !t.IsZero()
	return c.UDPConn.SetReadDeadline(t)
}

// ReadBatch fills ms with packets of this member and returns their number. It forwards
// packets of other members. It returns packets from other members before those of its
// own socket.
func (c *Conn) ReadBatch(ms []ipv4.Message, flags int) (int, error) {
	ms = ms[:min(len(ms), batchMost)]
	for {
		if n := c.inbox.take(ms, c.hops[:]); n > 0 {
			if n = c.keepOwn(ms[:n], c.hops[:n]); n > 0 {
				return n, nil
			}
			continue
		}
		c.waiting.Store(true)
		if c.inbox.filled.Load() > 0 {
			c.waiting.Store(false)
			continue
		}
		n, err := c.batch.ReadBatch(ms, flags)
		c.waiting.Store(false)
		if err != nil {
			if c.woken(err) {
				continue
			}
			return n, err
		}
		if n = c.keepOwn(ms[:n], nil); n > 0 {
			return n, nil
		}
	}
}

// keepOwn forwards the messages of other members, moves this member's messages to the
// front and returns their number. quic-go binds the memory of a message to its index,
// so keepOwn copies bytes. It copies only behind a forwarded message. hops is nil for
// messages of the UDP socket.
func (c *Conn) keepOwn(ms []ipv4.Message, hops []uint8) int {
	for i := range ms {
		if !c.isOwn(&ms[i], hops, i) {
			return c.forwardFrom(ms, hops, i)
		}
	}
	return len(ms)
}

// isOwn reports whether message i is for this process. It records new clients.
func (c *Conn) isOwn(m *ipv4.Message, hops []uint8, i int) bool {
	id, by := destination(m.Buffers[0][:m.N])
	switch {
	case by == byMember:
		return id[0] == c.member.number || hops != nil // a packet with a member's id is forwarded at most once
	case by == unknown:
		return true
	case c.serving.Load():
		c.known.add(id)
		return true
	}
	return c.known.has(id) || hops != nil && hops[i] == maxHops
}

// route is the destination of a packet.
type route struct {
	member byte
	hops   uint8 // 0: the packet stays here
}

// routeOf returns the destination of message i.
func (c *Conn) routeOf(m *ipv4.Message, hops []uint8, i int) route {
	if c.isOwn(m, hops, i) {
		return route{}
	}
	id, by := destination(m.Buffers[0][:m.N])
	if by == byMember {
		return route{member: id[0], hops: 1}
	}
	successor, ok := c.forwarder.successorOf(id)
	switch {
	case !ok:
		return route{}
	case hops == nil:
		return route{member: successor, hops: 1}
	}
	return route{member: successor, hops: hops[i] + 1}
}

// forwardFrom is keepOwn from message first on, which belongs to another member.
func (c *Conn) forwardFrom(ms []ipv4.Message, hops []uint8, first int) int {
	var to [batchMost]route
	var gone [batchMost]bool
	for i := first; i < len(ms); i++ {
		to[i] = c.routeOf(&ms[i], hops, i)
	}
	for i := first; i < len(ms); i++ {
		for !gone[i] && to[i].hops > 0 { // repeated if the process of the chosen successor has ended
			c.send(ms, hops, to[:len(ms)], gone[:], i)
		}
	}
	kept := first
	for i := first; i < len(ms); i++ {
		if gone[i] {
			continue
		}
		if kept != i {
			move(&ms[kept], &ms[i])
		}
		kept++
	}
	return kept
}

// send sends message i, and the later messages with the same route, as one datagram.
func (c *Conn) send(ms []ipv4.Message, hops []uint8, to []route, gone []bool, i int) {
	way := to[i]
	c.forwarder.begin(way.hops)
	var in [batchMost]bool
	for j := i; j < len(ms); j++ {
		if to[j] != way {
			continue
		}
		if in[j] = c.forwarder.add(&ms[j]); !in[j] {
			to[j] = route{}
		}
	}
	if c.forwarder.packets() == 0 {
		return
	}
	err := c.forwarder.send(way.member)
	left := errors.Is(err, errNoMember)
	switch {
	case err == nil:
		c.forwarded.Add(uint64(c.forwarder.packets()))
	case left:
		c.forwarder.dropSuccessor(way.member)
	}
	for j := i; j < len(ms); j++ {
		if !in[j] {
			continue
		}
		_, by := destination(ms[j].Buffers[0][:ms[j].N])
		switch {
		case err == nil:
			gone[j] = true
		case left && by == byClient:
			to[j] = c.routeOf(&ms[j], hops, j)
		case left:
			to[j] = route{} // quic-go answers it with a stateless reset
		default: // the member is busy; the sender of the packet retransmits it
			gone[j] = true
			c.dropped.Add(1)
		}
	}
}

// move copies a packet into the memory of another message.
func move(to, from *ipv4.Message) {
	to.N = copy(to.Buffers[0], from.Buffers[0][:from.N])
	to.NN = copy(to.OOB, from.OOB[:from.NN])
	to.Flags, to.Addr = from.Flags, from.Addr
}

// Serve makes this member accept new clients, unless Drain was called before.
func (c *Conn) Serve() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.drained {
		return nil
	}
	c.serving.Store(true)
	return c.member.setState(serving)
}

// Drain makes new clients go to other members that serve. Clients whose handshake began
// here stay. If no other member serves, this one keeps accepting new clients.
func (c *Conn) Drain() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drained = true
	err := c.member.setState(draining)
	c.serving.Store(false)
	return err
}

// Counts returns the numbers of packets that were forwarded to other members, that arrived from
// other members, and that were dropped in either direction.
func (c *Conn) Counts() (forwarded, received, dropped uint64) {
	return c.forwarded.Load(), c.received.Load(), c.dropped.Load()
}

// detachTime bounds how long Close keeps reading.
const detachTime = 100 * time.Millisecond

// Close closes the socket and frees the member number; no read may be in progress. It
// first forwards the packets that the kernel still holds for other members. Run
// returns.
func (c *Conn) Close() error {
	c.detach()
	return errors.Join(c.member.close(), c.UDPConn.Close())
}

// detach makes the kernel deliver to other sockets, and forwards the packets that it
// had already put into this one. It connects the socket to an unused address: a
// connected socket receives only packets from that address.
func (c *Conn) detach() {
	c.mu.Lock()
	c.serving.Store(false)
	c.mu.Unlock()
	raw, err := c.UDPConn.SyscallConn()
	if err != nil {
		return
	}
	var discard unix.Sockaddr = &unix.SockaddrInet6{Addr: [16]byte(net.IPv6loopback), Port: 9}
	if c.LocalAddr().(*net.UDPAddr).IP.To4() != nil {
		discard = &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: 9}
	}
	if ctlErr := raw.Control(func(fd uintptr) { err = unix.Connect(int(fd), discard) }); ctlErr != nil || err != nil {
		return // clients retransmit lost packets
	}
	ms := make([]ipv4.Message, batchMost)
	for i := range ms {
		ms[i].Buffers, ms[i].OOB = [][]byte{make([]byte, maxPacket)}, make([]byte, maxControl)
	}
	if c.UDPConn.SetReadDeadline(time.Now().Add(detachTime)) != nil {
		return
	}
	for readable(raw) {
		n, err := c.batch.ReadBatch(ms, 0)
		if err != nil {
			return
		}
		c.keepOwn(ms[:n], nil)
	}
}

// readable reports whether the socket holds a packet.
func readable(raw syscall.RawConn) (yes bool) {
	_ = raw.Control(func(fd uintptr) { // on a closed socket no packet waits
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		yes = n > 0 && err == nil
	})
	return yes
}
