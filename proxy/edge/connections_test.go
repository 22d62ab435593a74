package edge

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

// host returns a client's TCP address.
func host(ip string) net.Addr { return &net.TCPAddr{IP: net.ParseIP(ip), Port: 1} }

// places opens named connections. The tests use it to see which connection the proxy
// closes.
type places struct {
	*connections
	open  map[string]*connection
	ended chan string
}

func newPlaces(all, perAddress int) *places {
	return &places{
		newConnections(func() (int, int) { return all, perAddress }),
		make(map[string]*connection), make(chan string, 100),
	}
}

func (p *places) connect(name, ip string, over transport) bool {
	k := p.take(host(ip), over)
	if k == nil {
		return false
	}
	p.open[name] = k
	k.ready(func() { p.ended <- name })
	return true
}

// gone returns the sorted names of the connections that the proxy closed to make room.
func (p *places) gone() (names []string) {
	synctest.Wait()
	for len(p.ended) > 0 {
		names = append(names, <-p.ended)
	}
	slices.Sort(names)
	return names
}

func TestConnectionsMakeRoom(t *testing.T) {
	const a, b = "192.0.2.1", "192.0.2.2"
	tcp := func(p *places, name, ip string) bool { return p.connect(name, ip, carriedByTCP) }
	tests := []struct {
		name            string
		all, perAddress int
		before          func(*places)
		from            string
		served          bool
		gone            []string
	}{
		{"room", 3, 0, func(p *places) { tcp(p, "1", a); tcp(p, "2", a) }, a, true, nil},
		{"the longest idle connection closes", 2, 0, func(p *places) { tcp(p, "1", a); tcp(p, "2", b) }, b, true, []string{"1"}},
		{"idle again, so idle for a short time", 2, 0, func(p *places) {
			tcp(p, "1", a)
			tcp(p, "2", b)
			p.open["1"].busy()
			p.open["1"].rest()
		}, b, true, []string{"2"}},
		{"the address with the most idle connections loses one", 3, 0, func(p *places) { tcp(p, "1", a); tcp(p, "2", b); tcp(p, "3", b) }, "192.0.2.3", true, []string{"2"}},
		{"busy connections do not count for an address", 5, 0, func(p *places) {
			tcp(p, "1", a)
			tcp(p, "2", a)
			for _, name := range []string{"3", "4", "5"} {
				tcp(p, name, b)
			}
			p.open["4"].busy()
			p.open["5"].busy()
		}, b, true, []string{"1"}},
		{"of equal addresses, the one that is idle for the longest time", 3, 0, func(p *places) {
			tcp(p, "1", a)
			tcp(p, "2", b)
			tcp(p, "3", "192.0.2.3")
			p.open["1"].busy()
			p.open["1"].rest()
		}, a, true, []string{"2"}},
		{"another address, while QUIC of the first one was just used", 3, 0, func(p *places) {
			tcp(p, "1", a)
			p.connect("2", b, carriedByQUIC)
			p.connect("3", b, carriedByQUIC)
		}, b, true, []string{"1"}},
		{"the busy stay", 2, 0, func(p *places) { tcp(p, "1", a); tcp(p, "2", b); p.open["1"].busy() }, b, true, []string{"2"}},
		{"all are busy", 1, 0, func(p *places) { tcp(p, "1", a); p.open["1"].busy() }, b, false, nil},
		{"a state reported twice", 1, 0, func(p *places) {
			tcp(p, "1", a)
			p.open["1"].rest()
			p.open["1"].busy()
			p.open["1"].busy()
		}, b, false, nil},
		{"a closed connection", 1, 0, func(p *places) { tcp(p, "1", a); p.open["1"].leave(); p.open["1"].leave() }, b, true, nil},
		{"an address at its limit loses a connection of its own", 9, 2, func(p *places) { tcp(p, "1", b); tcp(p, "2", a); tcp(p, "3", a) }, a, true, []string{"2"}},
		{"an address with busy connections", 9, 1, func(p *places) { tcp(p, "1", b); tcp(p, "2", a); p.open["2"].busy() }, a, false, nil},
		{"another address", 9, 1, func(p *places) { tcp(p, "1", a); p.open["1"].busy() }, b, true, nil},
		{"IPv6: one /64", 9, 1, func(p *places) { tcp(p, "1", "2001:db8::1"); p.open["1"].busy() }, "2001:db8::2:0:0:1", false, nil},
		{"IPv6: another /64", 9, 1, func(p *places) { tcp(p, "1", "2001:db8::1"); p.open["1"].busy() }, "2001:db8:0:1::1", true, nil},
		{"IPv4 in IPv6", 9, 1, func(p *places) { tcp(p, "1", a); p.open["1"].busy() }, "::ffff:" + a, false, nil},
		{"QUIC that has just been used stays", 1, 0, func(p *places) { p.connect("1", a, carriedByQUIC) }, b, false, nil},
		{"QUIC that has settled", 1, 0, func(p *places) {
			p.connect("1", a, carriedByQUIC)
			p.open["1"].begin()
			p.open["1"].begin()
			p.open["1"].done()
			p.open["1"].done()
			time.Sleep(settleTime)
		}, b, true, []string{"1"}},
		{"QUIC with one open request of two", 1, 0, func(p *places) {
			p.connect("1", a, carriedByQUIC)
			p.open["1"].begin()
			p.open["1"].begin()
			p.open["1"].done()
			time.Sleep(settleTime)
		}, b, false, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPlaces(tt.all, tt.perAddress)
				tt.before(p)
				if served := tcp(p, "new", tt.from); served != tt.served {
					t.Errorf("served %t", served)
				}
				if gone := p.gone(); !slices.Equal(gone, tt.gone) {
					t.Errorf("got closed connections %q, want %q", gone, tt.gone)
				}
				for _, k := range p.open {
					k.leave()
				}
				if p.count() != 0 || len(p.from) != 0 || p.idle.most != 0 {
					t.Errorf("remaining: %d open, %d addresses, %d idle", p.count(), len(p.from), p.idle.most)
				}
			})
		})
	}
}

// A new TCP connection waits until the descriptor of the connection that it replaces is
// free. A connection that closes keeps its place until then.
func TestRoomIsFreeDescriptors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlaces(1, 0)
		slow := &slowClose{free: make(chan struct{})}
		first := p.adopt(slow)
		var second *tcpConn
		taken := make(chan struct{})
		go func() {
			defer close(taken)
			second = p.adopt(&slowClose{free: slow.free})
		}()
		synctest.Wait()
		select {
		case <-taken:
			t.Error("the new connection was served before the old one was closed")
		default:
		}
		slow.free <- struct{}{}
		<-taken
		go second.Close()
		synctest.Wait()
		if n := p.count(); n != 1 {
			t.Errorf("%d connections are counted while one closes, want 1", n)
		}
		if c := p.adopt(&slowClose{}); c != nil {
			t.Error("a connection was served in the place of one that still closes")
		}
		slow.free <- struct{}{}
		synctest.Wait()
		if n := p.count(); n != 0 {
			t.Errorf("%d connections are counted at the end", n)
		}
		if first == nil || !slow.closed {
			t.Error("the replaced connection is open")
		}
	})
}

// slowClose is a connection whose descriptor becomes free when free sends.
type slowClose struct {
	net.Conn
	free   chan struct{}
	closed bool
}

func (c *slowClose) RemoteAddr() net.Addr { return host("192.0.2.1") }

func (c *slowClose) Close() error {
	<-c.free
	c.closed = true
	return nil
}

func TestDescriptorShares(t *testing.T) {
	for _, tt := range []struct {
		limit uint64
		want  shares
	}{
		{0, shares{clients: 1, both: 2, operators: 8}},
		{64, shares{clients: 4, both: 8, operators: 8}},
		{256, shares{clients: 96, both: 192, operators: 16}},
		{1024, shares{clients: 456, both: 912, operators: 64}},
		{65536, shares{clients: 32616, both: 65232, operators: 256}},
		{1 << 62, shares{clients: 65536, both: 1<<30 - 304, operators: 256}},
		{1<<64 - 1, shares{clients: 65536, both: 1<<30 - 304, operators: 256}}, // RLIM_INFINITY
	} {
		if got := divide(tt.limit); got != tt.want {
			t.Errorf("%d: %+v, want %+v", tt.limit, got, tt.want)
		}
	}
	for _, tt := range []struct{ all, per, wantAll, wantPer int }{
		{0, 0, 100, 75}, {8, 0, 8, 6}, {1, 0, 1, 1}, {8, 3, 8, 3}, {8, -1, 8, 0}, {0, -1, 100, 0},
	} {
		all, per := connectionLimits(&config.Limits{MaxConnections: tt.all, MaxConnectionsPerAddress: tt.per}, shares{clients: 100})
		if all != tt.wantAll || per != tt.wantPer {
			t.Errorf("got %d, %d: %d, %d, want %d, %d", tt.all, tt.per, all, per, tt.wantAll, tt.wantPer)
		}
	}
}

// The proxy logs a limit that leaves no descriptors for engines.
func TestTooManyConnections(t *testing.T) {
	for _, tt := range []struct {
		limit int
		said  bool
	}{{0, false}, {192, false}, {193, true}} {
		var logged bytes.Buffer
		divide(256).warnTooMany(&config.Limits{MaxConnections: tt.limit}, slog.New(slog.NewTextHandler(&logged, nil)))
		if said := strings.Contains(logged.String(), "limits.max_connections"); said != tt.said {
			t.Errorf("%d: %q", tt.limit, &logged)
		}
	}
}

// acceptErrors is a listener whose Accept fails before it returns each connection.
type acceptErrors struct {
	*proxytest.PipeListener
	errs []error
}

func (l *acceptErrors) Accept() (net.Conn, error) {
	if len(l.errs) > 0 {
		err := l.errs[0]
		l.errs = l.errs[1:]
		return nil, err
	}
	return l.PipeListener.Accept()
}

// If the process has no free descriptors, the proxy closes an idle connection for the new
// one. Without an idle connection the proxy waits and logs the problem.
func TestAcceptWithoutDescriptors(t *testing.T) {
	for _, code := range []syscall.Errno{syscall.EMFILE, syscall.ENFILE} {
		t.Run(code.Error(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPlaces(9, 0)
				p.connect("idle", "192.0.2.1", carriedByTCP)
				full := &net.OpError{Op: "accept", Err: code}
				inner := &acceptErrors{proxytest.NewPipeListener(), []error{full, full}}
				l := tcpListener{inner, p.connections, true}
				if _, err := l.Accept(); !errors.Is(err, code) {
					t.Errorf("no connection is idle: got %v", err)
				}
				if gone := p.gone(); !slices.Equal(gone, []string{"idle"}) {
					t.Errorf("closed %q", gone)
				}
				go inner.Dial()
				c, err := l.Accept()
				if err != nil {
					t.Fatal(err)
				}
				c.Close()
				if n := p.count(); n != 0 {
					t.Errorf("%d are counted", n)
				}
			})
		})
	}
}
