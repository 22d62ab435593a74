package quicshare

import (
	"errors"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// peer is a Conn of a shared port together with its reader.
type peer struct {
	*Conn
	got             chan ipv4.Message
	running, reader sync.WaitGroup
	once            sync.Once
}

// joinPeer joins dir on addr, starts reading and serves.
func joinPeer(t *testing.T, dir *privatedir.Dir, addr string) *peer {
	t.Helper()
	m := start(t, dir, addr)
	if err := m.Serve(); err != nil {
		t.Fatal(err)
	}
	return m
}

// start is joinPeer for a member that does not serve yet.
func start(t *testing.T, dir *privatedir.Dir, addr string) *peer {
	t.Helper()
	c, err := Listen(dir, addr)
	if err != nil {
		t.Fatal(err)
	}
	m := &peer{Conn: c, got: make(chan ipv4.Message, 100)}
	m.running.Go(c.Run)
	m.reader.Go(m.read)
	t.Cleanup(m.leave)
	return m
}

// read reads as quic-go does: in batches of 8, until quic-go sets a deadline.
func (m *peer) read() {
	for {
		ms := make([]ipv4.Message, 8)
		for i := range ms {
			ms[i] = room()
		}
		n, err := m.ReadBatch(ms, 0)
		if err != nil {
			return
		}
		for _, one := range ms[:n] {
			m.got <- one
		}
	}
}

// leave stops the reader and then closes the Conn, as quic-go's transport and its owner
// do.
func (m *peer) leave() {
	m.once.Do(func() {
		m.SetReadDeadline(time.Now())
		m.reader.Wait()
		m.SetReadDeadline(time.Time{})
		m.Close()
		m.running.Wait()
	})
}

func (m *peer) next(t *testing.T) ipv4.Message {
	t.Helper()
	select {
	case one := <-m.got:
		return one
	case <-time.After(10 * time.Second):
		t.Fatalf("member %d got nothing", m.member.number)
		panic("unreachable")
	}
}

// client returns a socket with its own address, connected to to.
func client(t *testing.T, to net.Addr) *net.UDPConn {
	t.Helper()
	c, err := net.DialUDP("udp", nil, to.(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// A packet reaches the member that its connection id names, whichever socket the kernel
// chose. It arrives once and with its source address. Packets of new clients stay at
// the socket that got them.
func TestForwarding(t *testing.T) {
	dir := privatedirtest.Open(t)
	members := []*peer{joinPeer(t, dir, "127.0.0.1:0")}
	addr := members[0].LocalAddr().String()
	members = append(members, joinPeer(t, dir, addr), joinPeer(t, dir, addr))
	const clients = 30
	for i := range clients {
		c := client(t, members[0].LocalAddr())
		for number, m := range members {
			want := short([]byte{byte(number), 2, 3, 4, 5, byte(i), 7})
			if number == 1 {
				want = long([]byte{byte(number), 2, 3, 4, 5, byte(i), 7})
			}
			if _, err := c.Write(want); err != nil {
				t.Fatal(err)
			}
			got := m.next(t)
			if !slices.Equal(got.Buffers[0][:got.N], want) || got.Addr.String() != c.LocalAddr().String() {
				t.Fatalf("member %d got %d bytes from %v, want %d from %v", number, got.N, got.Addr, len(want), c.LocalAddr())
			}
		}
	}
	var out, in uint64
	for _, m := range members {
		m.leave() // the counters are final after this
		forwarded, received, dropped := m.Counts()
		out, in = out+forwarded, in+received
		if dropped > 0 || len(m.got) > 0 {
			t.Errorf("member %d: %d dropped, %d too many", m.member.number, dropped, len(m.got))
		}
	}
	if out != in || out == 0 || out == clients*3 {
		t.Errorf("%d packets forwarded, %d received of %d", out, in, clients*3)
	}
}

// A packet for an unused member number stays at the socket that got it: quic-go answers
// with a reset.
func TestGoneMember(t *testing.T) {
	dir := privatedirtest.Open(t)
	a := joinPeer(t, dir, "127.0.0.1:0")
	b := joinPeer(t, dir, a.LocalAddr().String())
	c := client(t, a.LocalAddr())
	dead := short([]byte{1, 2, 3, 4, 5, 6, 7})
	b.kill(t)
	for _, want := range [][]byte{dead, short([]byte{99, 2, 3, 4, 5, 6, 7}), long([]byte{99, 2, 3, 4, 5, 6, 7})} {
		if _, err := c.Write(want); err != nil {
			t.Fatal(err)
		}
		if got := a.next(t); !slices.Equal(got.Buffers[0][:got.N], want) {
			t.Errorf("got %d bytes, want %d", got.N, len(want))
		}
	}
}

// kill ends m as a kill would: the files stay, the sockets close.
func (m *peer) kill(t *testing.T) {
	t.Helper()
	m.once.Do(func() {
		m.member.forwardSocket.Close()
		m.UDPConn.Close()
		m.reader.Wait()
		m.running.Wait()
		m.member.lock.Close()
	})
	if _, err := os.Stat(m.member.dir.Path(sockName(m.member.number))); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// A draining member forwards clients that are new to it. All packets of such a client go to one
// successor. The clients that it already serves stay. A successor that begins to drain forwards the
// packets that it receives.
func TestDrain(t *testing.T) {
	dir := privatedirtest.Open(t)
	a := joinPeer(t, dir, "127.0.0.1:0")
	addr := a.LocalAddr().String()
	known := client(t, a.LocalAddr())
	send := func(c *net.UDPConn, id byte) {
		t.Helper()
		if _, err := c.Write(long([]byte{id, 2, 3, 4, 5, 6, 7, 8})); err != nil {
			t.Fatal(err)
		}
	}
	send(known, 1)
	a.next(t)
	if err := a.Drain(); err != nil {
		t.Fatal(err)
	}
	send(known, 2) // a is the only member
	a.next(t)

	b := joinPeer(t, dir, addr)
	time.Sleep(successorsAge + 10*time.Millisecond) // for this time a uses its old list, which has no successor
	var atA []*net.UDPConn                          // clients whose packets the kernel delivers to a
	for id := byte(10); len(atA) < 4; id++ {
		c := client(t, a.LocalAddr())
		before, _, _ := a.Counts()
		send(c, id)
		if m := b.next(t); m.Addr.String() != c.LocalAddr().String() {
			t.Fatalf("from %v, want %v", m.Addr, c.LocalAddr())
		}
		if after, _, _ := a.Counts(); after > before {
			atA = append(atA, c)
		}
	}
	if len(a.got) > 0 {
		t.Errorf("the draining member kept %d", len(a.got))
	}

	if err := b.Drain(); err != nil {
		t.Fatal(err)
	}
	last := joinPeer(t, dir, addr) // a still has b in its list of successors
	for i, c := range atA {
		send(c, byte(100+i))
		last.next(t)
	}
	if len(a.got)+len(b.got)+len(last.got) > 0 {
		t.Errorf("%d, %d and %d too many", len(a.got), len(b.got), len(last.got))
	}
}

// A member that does not serve yet forwards new clients to one that serves. It keeps a
// new client if no member serves.
func TestStart(t *testing.T) {
	dir := privatedirtest.Open(t)
	a := start(t, dir, "127.0.0.1:0")
	send := func(id byte) {
		t.Helper()
		if _, err := client(t, a.LocalAddr()).Write(long([]byte{id, 2, 3, 4, 5, 6, 7, 8})); err != nil {
			t.Fatal(err)
		}
	}
	send(0)
	a.next(t)
	if err := a.Serve(); err != nil {
		t.Fatal(err)
	}
	b := start(t, dir, a.LocalAddr().String())
	for id := byte(1); ; id++ {
		send(id)
		a.next(t)
		if forwarded, _, _ := b.Counts(); forwarded > 2 {
			break
		}
	}
	if err := b.Serve(); err != nil {
		t.Fatal(err)
	}
	for id := byte(100); len(b.got) == 0; id++ {
		send(id)
		select {
		case <-a.got:
		case m := <-b.got:
			b.got <- m
		}
	}
}

// A member that does not serve drops the packets of new clients while the serving member
// is too busy to receive them. The clients retransmit the packets. If the member kept
// them, it would complete handshakes of connections that end with the member.
func TestBusySuccessor(t *testing.T) {
	dir := privatedirtest.Open(t)
	busy, err := Listen(dir, "127.0.0.1:0") // does not read
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	if err := busy.Serve(); err != nil {
		t.Fatal(err)
	}
	starting, err := Listen(dir, busy.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer starting.Close()
	const most = 10_000 // more than net.unix.max_dgram_qlen
	sent, dropped := uint64(0), uint64(0)
	for dropped < 3 && sent < most {
		id := []byte{byte(sent), byte(sent >> 8), 3, 4, 5, 6, 7, 8}
		if kept := starting.keepOwn([]ipv4.Message{message("127.0.0.1:1", long(id), nil)}, nil); kept > 0 {
			t.Fatalf("the starting member kept packet %d", sent)
		}
		sent++
		_, _, dropped = starting.Counts()
	}
	if forwarded, _, _ := starting.Counts(); forwarded == 0 || dropped == 0 || forwarded+dropped != sent {
		t.Errorf("of %d packets %d were forwarded and %d dropped, want some of each", sent, forwarded, dropped)
	}
}

// quic-go's deadline ends a reader even if the inbox is never empty.
func TestReaderEnds(t *testing.T) {
	for range 50 {
		dir := privatedirtest.Open(t)
		a := joinPeer(t, dir, "127.0.0.1:0")
		to, err := dir.Dial(t.Context(), "unixgram", sockName(0))
		if err != nil {
			t.Fatal(err)
		}
		d := datagram(t, 1, message("127.0.0.1:1", short(make([]byte, 7)), nil))
		for range 5 {
			if _, err := to.Write(d); err != nil {
				t.Fatal(err)
			}
		}
		to.Close()
		a.leave()
	}
}

// Garbage on the Unix socket is dropped, and Run goes on.
func TestGarbage(t *testing.T) {
	dir := privatedirtest.Open(t)
	a := joinPeer(t, dir, "127.0.0.1:0")
	to, err := dir.Dial(t.Context(), "unixgram", sockName(0))
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	for _, d := range [][]byte{{}, {1}, {2, 1, 4}, make([]byte, 60000)} {
		if _, err := to.Write(d); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := to.Write(datagram(t, 1, message("127.0.0.1:1", short(make([]byte, 7)), nil))); err != nil {
		t.Fatal(err)
	}
	a.next(t)
	if _, received, dropped := a.Counts(); received != 1 || dropped != 4 {
		t.Errorf("%d received, %d dropped", received, dropped)
	}
}

// keepOwn moves a batch's own packets to the front, in order. If all packets are its
// own, it moves nothing and allocates nothing.
func TestKeepOwn(t *testing.T) {
	dir := privatedirtest.Open(t)
	a, b := joinPeer(t, dir, "127.0.0.1:0"), joinPeer(t, dir, "127.0.0.1:0")
	c := &Conn{member: a.member, known: newRecent()}
	c.forwarder = forwarder{member: a.member, socket: a.forwarder.socket}
	own := func(i byte) ipv4.Message { return message("127.0.0.1:1", short([]byte{0, 0, 0, 0, 0, 0, i}), nil) }
	others := func(number, i byte) ipv4.Message {
		return message("127.0.0.1:2", short([]byte{number, 0, 0, 0, 0, 0, i}), nil)
	}
	ms := []ipv4.Message{own(0), others(1, 1), own(2), others(1, 3), others(9, 4), own(5), others(9, 6), others(1, 7)}
	buffers := make([]*byte, len(ms))
	for i := range ms {
		buffers[i] = &ms[i].Buffers[0][0]
	}
	n := c.keepOwn(ms, nil)
	var kept []byte
	for i := range n {
		kept = append(kept, ms[i].Buffers[0][7])
		if &ms[i].Buffers[0][0] != buffers[i] {
			t.Errorf("message %d changed its memory", i)
		}
	}
	if !slices.Equal(kept, []byte{0, 2, 4, 5, 6}) {
		t.Errorf("kept %v; 4 and 6 are of an unused member number", kept)
	}
	for _, want := range []byte{1, 3, 7} {
		if got := b.next(t); got.Buffers[0][7] != want {
			t.Errorf("lane 1 got %d, want %d", got.Buffers[0][7], want)
		}
	}

	ms = []ipv4.Message{own(0), own(1), own(2), own(3), own(4), own(5), own(6), own(7)}
	if allocs := testing.AllocsPerRun(100, func() { c.keepOwn(ms, nil) }); allocs > 0 {
		t.Errorf("%v allocations a batch", allocs)
	}
	for i := range ms {
		if ms[i].Buffers[0][7] != byte(i) {
			t.Errorf("message %d moved", i)
		}
	}
}

// Packets that the kernel had put into a closing socket reach the other member.
func TestDetach(t *testing.T) {
	dir := privatedirtest.Open(t)
	a := joinPeer(t, dir, "127.0.0.1:0")
	b, err := Listen(dir, a.LocalAddr().String()) // has no reader
	if err != nil {
		t.Fatal(err)
	}
	const clients = 40
	for i := range clients {
		c := client(t, a.LocalAddr())
		if _, err := c.Write(long([]byte{byte(i), 2, 3, 4, 5, 6, 7, 8})); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	seen := map[byte]bool{}
	for range clients {
		m := a.next(t)
		seen[m.Buffers[0][6]] = true
	}
	if len(seen) != clients {
		t.Errorf("%d of %d", len(seen), clients)
	}
	if forwarded, _, _ := b.Counts(); forwarded == 0 || forwarded == clients {
		t.Errorf("%d of %d were forwarded", forwarded, clients)
	}
}

func TestListenFails(t *testing.T) {
	dir := privatedirtest.Open(t)
	if c, err := Listen(dir, "nowhere:port"); err == nil {
		c.Close()
		t.Error("opened")
	}
	removed := privatedirtest.Open(t)
	if err := os.RemoveAll(removed.Name()); err != nil {
		t.Fatal(err)
	}
	if c, err := Listen(removed, "127.0.0.1:0"); err == nil {
		c.Close()
		t.Error("opened")
	}
	a := joinPeer(t, dir, "127.0.0.1:0")
	if a.member.number != 0 {
		t.Errorf("member %d: the failed one kept its own", a.member.number)
	}
	addr := a.LocalAddr().String()
	if c, err := Listen(privatedirtest.Open(t), addr); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("a port of the members of another directory: %v, %v", c, err)
	}
	b := joinPeer(t, dir, addr)
	a.leave()
	joinPeer(t, dir, addr) // beside b
	b.leave()
}

// A member that gets the call to drain before it serves does not serve.
func TestServeAfterDrain(t *testing.T) {
	a := start(t, privatedirtest.Open(t), "127.0.0.1:0")
	if err := errors.Join(a.Drain(), a.Serve()); err != nil {
		t.Fatal(err)
	}
	if its, port := state(a.member.dir, 0); its != draining || port != a.LocalAddr().(*net.UDPAddr).Port || a.serving.Load() {
		t.Errorf("%s, port %d", its, port)
	}
}
