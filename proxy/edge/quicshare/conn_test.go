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

// member is a Conn of a port with its reader.
type member struct {
	*Conn
	got             chan ipv4.Message
	running, reader sync.WaitGroup
	once            sync.Once
}

// join opens a lane of dir on addr, reads it and makes it serve.
func join(t *testing.T, dir *privatedir.Dir, addr string) *member {
	t.Helper()
	m := start(t, dir, addr)
	if err := m.Serve(); err != nil {
		t.Fatal(err)
	}
	return m
}

// start is join of a lane that does not serve yet.
func start(t *testing.T, dir *privatedir.Dir, addr string) *member {
	t.Helper()
	c, err := Listen(dir, addr)
	if err != nil {
		t.Fatal(err)
	}
	m := &member{Conn: c, got: make(chan ipv4.Message, 100)}
	m.running.Go(c.Run)
	m.reader.Go(m.read)
	t.Cleanup(m.leave)
	return m
}

// read reads as quic-go does: batches of 8, until it set a deadline.
func (m *member) read() {
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

// leave ends the reader, then the lane, as a transport and its owner do.
func (m *member) leave() {
	m.once.Do(func() {
		m.SetReadDeadline(time.Now())
		m.reader.Wait()
		m.SetReadDeadline(time.Time{})
		m.Close()
		m.running.Wait()
	})
}

func (m *member) next(t *testing.T) ipv4.Message {
	t.Helper()
	select {
	case one := <-m.got:
		return one
	case <-time.After(10 * time.Second):
		t.Fatalf("lane %d got nothing", m.lane.number)
		panic("unreachable")
	}
}

// client sends from an address of its own.
func client(t *testing.T, to net.Addr) *net.UDPConn {
	t.Helper()
	c, err := net.DialUDP("udp", nil, to.(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// A packet reaches the lane of its id whichever socket the kernel chose, once and
// with its source; packets of new clients stay where they came.
func TestForwarding(t *testing.T) {
	dir := privatedirtest.Open(t)
	members := []*member{join(t, dir, "127.0.0.1:0")}
	addr := members[0].LocalAddr().String()
	members = append(members, join(t, dir, addr), join(t, dir, addr))
	const clients = 30
	for i := range clients {
		c := client(t, members[0].LocalAddr())
		for lane, m := range members {
			want := short([]byte{byte(lane), 2, 3, 4, 5, byte(i), 7})
			if lane == 1 {
				want = long([]byte{byte(lane), 2, 3, 4, 5, byte(i), 7})
			}
			if _, err := c.Write(want); err != nil {
				t.Fatal(err)
			}
			got := m.next(t)
			if !slices.Equal(got.Buffers[0][:got.N], want) || got.Addr.String() != c.LocalAddr().String() {
				t.Fatalf("lane %d got %d bytes from %v, want %d from %v", lane, got.N, got.Addr, len(want), c.LocalAddr())
			}
		}
	}
	var out, in uint64
	for _, m := range members {
		m.leave() // then it has counted
		forwarded, received, dropped := m.Counts()
		out, in = out+forwarded, in+received
		if dropped > 0 || len(m.got) > 0 {
			t.Errorf("lane %d: %d dropped, %d too many", m.lane.number, dropped, len(m.got))
		}
	}
	if out != in || out == 0 || out == clients*3 {
		t.Errorf("%d packets forwarded, %d received of %d", out, in, clients*3)
	}
}

// A packet of a lane that nobody has stays where it came: quic-go resets it.
func TestGoneLane(t *testing.T) {
	dir := privatedirtest.Open(t)
	a := join(t, dir, "127.0.0.1:0")
	b := join(t, dir, a.LocalAddr().String())
	c := client(t, a.LocalAddr())
	dead := short([]byte{1, 2, 3, 4, 5, 6, 7})
	b.inletDies(t)
	for _, want := range [][]byte{dead, short([]byte{99, 2, 3, 4, 5, 6, 7}), long([]byte{99, 2, 3, 4, 5, 6, 7})} {
		if _, err := c.Write(want); err != nil {
			t.Fatal(err)
		}
		if got := a.next(t); !slices.Equal(got.Buffers[0][:got.N], want) {
			t.Errorf("got %d bytes, want %d", got.N, len(want))
		}
	}
}

// inletDies ends m as a kill would: files stay, sockets close.
func (m *member) inletDies(t *testing.T) {
	t.Helper()
	m.once.Do(func() {
		m.lane.inlet.Close()
		m.UDPConn.Close()
		m.reader.Wait()
		m.running.Wait()
		m.lane.lock.Close()
	})
	if _, err := os.Stat(m.lane.dir.Path(sockName(m.lane.number))); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// A draining lane hands on clients that it has not met, each with all its packets
// to one heir; those that it knows stay. A second one that begins to drain hands
// on what it gets.
func TestDrain(t *testing.T) {
	dir := privatedirtest.Open(t)
	a := join(t, dir, "127.0.0.1:0")
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
	send(known, 2) // nobody else is there
	a.next(t)

	b := join(t, dir, addr)
	time.Sleep(heirsAge + 10*time.Millisecond) // the list that had none is used that long
	var lane0 []*net.UDPConn                   // clients whose packets the kernel gives to a
	for id := byte(10); len(lane0) < 4; id++ {
		c := client(t, a.LocalAddr())
		before, _, _ := a.Counts()
		send(c, id)
		if m := b.next(t); m.Addr.String() != c.LocalAddr().String() {
			t.Fatalf("from %v, want %v", m.Addr, c.LocalAddr())
		}
		if after, _, _ := a.Counts(); after > before {
			lane0 = append(lane0, c)
		}
	}
	if len(a.got) > 0 {
		t.Errorf("the draining lane kept %d", len(a.got))
	}

	if err := b.Drain(); err != nil {
		t.Fatal(err)
	}
	last := join(t, dir, addr) // a knows b as its heir still
	for i, c := range lane0 {
		send(c, byte(100+i))
		last.next(t)
	}
	if len(a.got)+len(b.got)+len(last.got) > 0 {
		t.Errorf("%d, %d and %d too many", len(a.got), len(b.got), len(last.got))
	}
}

// A lane that does not serve yet hands new clients to one that does, and keeps those
// that nobody takes.
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

// quic-go's deadline ends a reader however busy the inbox is.
func TestReaderEnds(t *testing.T) {
	for range 50 {
		dir := privatedirtest.Open(t)
		a := join(t, dir, "127.0.0.1:0")
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

// Garbage on the lane's socket is dropped and ends nothing.
func TestGarbage(t *testing.T) {
	dir := privatedirtest.Open(t)
	a := join(t, dir, "127.0.0.1:0")
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

// A batch keeps its own packets in order, moved to the front; one that is all own
// is not touched, and costs no memory.
func TestSort(t *testing.T) {
	dir := privatedirtest.Open(t)
	a, b := join(t, dir, "127.0.0.1:0"), join(t, dir, "127.0.0.1:0")
	c := &Conn{lane: a.lane, known: newRecent()}
	c.out = outlet{lane: a.lane, socket: a.out.socket}
	own := func(i byte) ipv4.Message { return message("127.0.0.1:1", short([]byte{0, 0, 0, 0, 0, 0, i}), nil) }
	theirs := func(lane, i byte) ipv4.Message {
		return message("127.0.0.1:2", short([]byte{lane, 0, 0, 0, 0, 0, i}), nil)
	}
	ms := []ipv4.Message{own(0), theirs(1, 1), own(2), theirs(1, 3), theirs(9, 4), own(5), theirs(9, 6), theirs(1, 7)}
	buffers := make([]*byte, len(ms))
	for i := range ms {
		buffers[i] = &ms[i].Buffers[0][0]
	}
	n := c.sort(ms, nil)
	var kept []byte
	for i := range n {
		kept = append(kept, ms[i].Buffers[0][7])
		if &ms[i].Buffers[0][0] != buffers[i] {
			t.Errorf("message %d changed its memory", i)
		}
	}
	if !slices.Equal(kept, []byte{0, 2, 4, 5, 6}) {
		t.Errorf("kept %v; 4 and 6 are of a lane that nobody has", kept)
	}
	for _, want := range []byte{1, 3, 7} {
		if got := b.next(t); got.Buffers[0][7] != want {
			t.Errorf("lane 1 got %d, want %d", got.Buffers[0][7], want)
		}
	}

	ms = []ipv4.Message{own(0), own(1), own(2), own(3), own(4), own(5), own(6), own(7)}
	if allocs := testing.AllocsPerRun(100, func() { c.sort(ms, nil) }); allocs > 0 {
		t.Errorf("%v allocations a batch", allocs)
	}
	for i := range ms {
		if ms[i].Buffers[0][7] != byte(i) {
			t.Errorf("message %d moved", i)
		}
	}
}

// What the kernel had put into a socket that closes goes to who is left.
func TestLeave(t *testing.T) {
	dir := privatedirtest.Open(t)
	a := join(t, dir, "127.0.0.1:0")
	b, err := Listen(dir, a.LocalAddr().String()) // read by nobody
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
	a := join(t, dir, "127.0.0.1:0")
	if a.lane.number != 0 {
		t.Errorf("lane %d: the failed one kept its own", a.lane.number)
	}
	addr := a.LocalAddr().String()
	if c, err := Listen(privatedirtest.Open(t), addr); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("a port of another directory's lanes: %v, %v", c, err)
	}
	b := join(t, dir, addr)
	a.leave()
	join(t, dir, addr) // next to b
	b.leave()
}

// A lane that was told to drain before it served does not serve.
func TestServeAfterDrain(t *testing.T) {
	a := start(t, privatedirtest.Open(t), "127.0.0.1:0")
	if err := errors.Join(a.Drain(), a.Serve()); err != nil {
		t.Fatal(err)
	}
	if its, port := state(a.lane.dir, 0); its != draining || port != a.LocalAddr().(*net.UDPAddr).Port || a.serving.Load() {
		t.Errorf("%s, port %d", its, port)
	}
}
