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

// Conn is a UDP socket of a shared port together with a lane. It is read as
// quic-go reads a *net.UDPConn, in batches, and written as one, and shows only
// packets of its own lane and of new clients. ReadBatch belongs to one goroutine;
// the other methods are safe for concurrent use.
type Conn struct {
	*net.UDPConn
	batch *ipv4.PacketConn
	lane  *lane

	inbox   inbox
	waiting atomic.Bool // the reader is, or will soon be, in the UDP socket
	mu      sync.Mutex  // held while the read deadline or the state changes
	ended   bool        // quic-go set a deadline, to stop reading; guarded by mu
	drained bool        // guarded by mu
	serving atomic.Bool // new clients are this lane's; changes with mu held

	known recent // of the reader
	out   outlet // of the reader
	hops  [batchMost]uint8

	forwarded, received, dropped atomic.Uint64
}

// batchMost bounds the messages of one ReadBatch; quic-go asks for 8.
const batchMost = 16

var (
	_ quic.OOBCapablePacketConn  = (*Conn)(nil)
	_ quic.ConnectionIDGenerator = (*lane)(nil)
)

// Listen takes the lowest free lane of dir and opens the UDP address, host:port,
// next to the sockets that other lanes have open there; one that somebody else has
// is refused. From then on the kernel deals packets of running connections of
// theirs here too, so that the transport's reading and Run must begin at once. New
// clients go to lanes that serve, if there are any, until Serve.
func Listen(dir *privatedir.Dir, addr string) (*Conn, error) {
	l, err := takeLane(dir)
	if err != nil {
		return nil, err
	}
	udp, err := l.open(addr)
	if err != nil {
		return nil, errors.Join(err, l.close())
	}
	c := &Conn{UDPConn: udp, lane: l, known: newRecent(), batch: ipv4.NewPacketConn(udp)}
	if c.out.socket, err = l.inlet.SyscallConn(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	c.out.lane = l
	return c, nil
}

// Transport returns a transport over c, with connection ids of the lane and with
// the keys that all lanes of the directory share: whoever gets a packet of a
// connection whose process died tells its client so by a stateless reset.
func (c *Conn) Transport() (*quic.Transport, error) {
	reset, err := c.lane.key("stateless reset")
	if err != nil {
		return nil, fmt.Errorf("derive the reset key: %w", err)
	}
	token, err := c.lane.key("address token")
	if err != nil {
		return nil, fmt.Errorf("derive the token key: %w", err)
	}
	return &quic.Transport{
		Conn: c, ConnectionIDGenerator: c.lane,
		StatelessResetKey: (*quic.StatelessResetKey)(&reset), TokenGeneratorKey: (*quic.TokenGeneratorKey)(&token),
	}, nil
}

// Run takes in what other lanes forward, until Close.
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
		n, err := c.lane.inlet.Read(buf)
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

// past is a read deadline that is over.
var past = time.Unix(1, 0)

// wake makes a read of the UDP socket return.
func (c *Conn) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.UDPConn.SetReadDeadline(past) // of a closed socket: nobody reads it
}

// woken reports whether a read that failed by err was only woken, and lets the next
// one wait again.
func (c *Conn) woken(err error) bool {
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.ended && c.UDPConn.SetReadDeadline(time.Time{}) == nil
}

// SetReadDeadline is how quic-go ends its reading: with a deadline set, reads fail
// from then on; without one they go on.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = !t.IsZero()
	return c.UDPConn.SetReadDeadline(t)
}

// ReadBatch fills ms with packets that are this lane's, and returns how many; those
// of other lanes it forwards. Forwarded packets come before the socket's.
func (c *Conn) ReadBatch(ms []ipv4.Message, flags int) (int, error) {
	ms = ms[:min(len(ms), batchMost)]
	for {
		if n := c.inbox.take(ms, c.hops[:]); n > 0 {
			if n = c.sort(ms[:n], c.hops[:n]); n > 0 {
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
		if n = c.sort(ms[:n], nil); n > 0 {
			return n, nil
		}
	}
}

// sort forwards the messages that are not this lane's and moves the others to the
// front, whose number it returns. quic-go ties the memory of a message to its
// place, so that only bytes can move; that happens only behind a forwarded one.
// hops is nil for messages of the UDP socket.
func (c *Conn) sort(ms []ipv4.Message, hops []uint8) int {
	for i := range ms {
		if !c.mine(&ms[i], hops, i) {
			return c.forward(ms, hops, i)
		}
	}
	return len(ms)
}

// mine reports whether message i is for this process, and remembers new clients.
func (c *Conn) mine(m *ipv4.Message, hops []uint8, i int) bool {
	id, by := destination(m.Buffers[0][:m.N])
	switch {
	case by == byLane:
		return id[0] == c.lane.number || hops != nil // nobody forwards what is a lane's twice
	case by == unknown:
		return true
	case c.serving.Load():
		c.known.add(id)
		return true
	}
	return c.known.has(id) || hops != nil && hops[i] == maxHops
}

// route is where a packet goes.
type route struct {
	lane byte
	hops uint8 // 0: it stays
}

// routeOf is where message i goes.
func (c *Conn) routeOf(m *ipv4.Message, hops []uint8, i int) route {
	if c.mine(m, hops, i) {
		return route{}
	}
	id, by := destination(m.Buffers[0][:m.N])
	if by == byLane {
		return route{lane: id[0], hops: 1}
	}
	heir, ok := c.out.heir(id)
	switch {
	case !ok:
		return route{}
	case hops == nil:
		return route{lane: heir, hops: 1}
	}
	return route{lane: heir, hops: hops[i] + 1}
}

// forward is sort from message first on, which is another's.
func (c *Conn) forward(ms []ipv4.Message, hops []uint8, first int) int {
	var to [batchMost]route
	var gone [batchMost]bool
	for i := first; i < len(ms); i++ {
		to[i] = c.routeOf(&ms[i], hops, i)
	}
	for i := first; i < len(ms); i++ {
		for !gone[i] && to[i].hops > 0 { // once more when an heir took nothing
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

// send sends message i, and those behind it that go the same way, as one datagram.
func (c *Conn) send(ms []ipv4.Message, hops []uint8, to []route, gone []bool, i int) {
	way := to[i]
	c.out.begin(way.hops)
	var in [batchMost]bool
	for j := i; j < len(ms); j++ {
		if to[j] != way {
			continue
		}
		if in[j] = c.out.add(&ms[j]); !in[j] {
			to[j] = route{}
		}
	}
	if c.out.packets() == 0 {
		return
	}
	err := c.out.send(way.lane)
	if err == nil {
		c.forwarded.Add(uint64(c.out.packets()))
	} else {
		c.out.disown(way.lane)
	}
	for j := i; j < len(ms); j++ {
		if !in[j] {
			continue
		}
		_, by := destination(ms[j].Buffers[0][:ms[j].N])
		switch {
		case err == nil:
			gone[j] = true
		case by == byClient:
			to[j] = c.routeOf(&ms[j], hops, j)
		case errors.Is(err, errGone):
			to[j] = route{} // quic-go answers with a reset
		default:
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

// Serve makes new clients this lane's, unless it drains already.
func (c *Conn) Serve() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.drained {
		return nil
	}
	c.serving.Store(true)
	return c.lane.say(serving)
}

// Drain hands new clients to lanes that serve from now on; those that this one has
// met stay. Without another lane all goes on as it was.
func (c *Conn) Drain() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drained = true
	err := c.lane.say(draining)
	c.serving.Store(false)
	return err
}

// Counts is how many packets were forwarded to other lanes, came from others, and
// were dropped on either way.
func (c *Conn) Counts() (forwarded, received, dropped uint64) {
	return c.forwarded.Load(), c.received.Load(), c.dropped.Load()
}

// leaveTime bounds how long Close reads on.
const leaveTime = 100 * time.Millisecond

// Close gives the socket and the lane back; nobody may read any more. What the
// kernel still holds for others is forwarded. Run returns.
func (c *Conn) Close() error {
	c.leave()
	return errors.Join(c.lane.close(), c.UDPConn.Close())
}

// leave makes the kernel choose other sockets and forwards what it had put into
// this one: a socket that is connected to some address gets only what comes from
// there.
func (c *Conn) leave() {
	c.mu.Lock()
	c.serving.Store(false)
	c.mu.Unlock()
	raw, err := c.UDPConn.SyscallConn()
	if err != nil {
		return
	}
	var nobody unix.Sockaddr = &unix.SockaddrInet6{Addr: [16]byte(net.IPv6loopback), Port: 9}
	if c.LocalAddr().(*net.UDPAddr).IP.To4() != nil {
		nobody = &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: 9}
	}
	if ctlErr := raw.Control(func(fd uintptr) { err = unix.Connect(int(fd), nobody) }); ctlErr != nil || err != nil {
		return // clients send again what is lost
	}
	ms := make([]ipv4.Message, batchMost)
	for i := range ms {
		ms[i].Buffers, ms[i].OOB = [][]byte{make([]byte, maxPacket)}, make([]byte, maxControl)
	}
	if c.UDPConn.SetReadDeadline(time.Now().Add(leaveTime)) != nil {
		return
	}
	for readable(raw) {
		n, err := c.batch.ReadBatch(ms, 0)
		if err != nil {
			return
		}
		c.sort(ms[:n], nil)
	}
}

// readable reports whether a packet waits in the socket.
func readable(raw syscall.RawConn) (yes bool) {
	_ = raw.Control(func(fd uintptr) { // of a closed one: nothing waits
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		yes = n > 0 && err == nil
	})
	return yes
}
