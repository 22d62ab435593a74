package quicshare

import (
	"bytes"
	"net"
	"slices"
	"testing"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// message returns a packet as a read of the socket returns it.
func message(from string, data, control []byte) ipv4.Message {
	addr, err := net.ResolveUDPAddr("udp", from)
	if err != nil {
		panic(err)
	}
	m := room()
	m.N, m.NN, m.Addr = copy(m.Buffers[0], data), copy(m.OOB, control), addr
	return m
}

// room returns an empty message to read into.
func room() ipv4.Message {
	return ipv4.Message{Buffers: [][]byte{make([]byte, maxPacket)}, OOB: make([]byte, maxControl)}
}

// datagram returns the datagram that a forwarder sends for ms.
func datagram(t testing.TB, hops uint8, ms ...ipv4.Message) []byte {
	t.Helper()
	var o forwarder
	o.begin(hops)
	for i := range ms {
		if !o.add(&ms[i]) {
			t.Fatalf("message %d cannot be forwarded", i)
		}
	}
	if o.packets() != len(ms) {
		t.Fatalf("%d packets of %d", o.packets(), len(ms))
	}
	return bytes.Join(o.parts, nil)
}

func sameMessage(a, b *ipv4.Message) bool {
	x, y := a.Addr.(*net.UDPAddr), b.Addr.(*net.UDPAddr)
	return a.N == b.N && a.NN == b.NN && bytes.Equal(a.Buffers[0][:a.N], b.Buffers[0][:b.N]) &&
		bytes.Equal(a.OOB[:a.NN], b.OOB[:b.NN]) && string(x.IP) == string(y.IP) && x.Port == y.Port && x.Zone == y.Zone
}

// controls returns control messages in the kernel's form.
func controls() [][]byte {
	v4 := ipv4.ControlMessage{Src: net.IPv4(192, 0, 2, 1), IfIndex: 3}
	v6 := ipv6.ControlMessage{Src: net.ParseIP("2001:db8::1"), IfIndex: 4}
	v6class := ipv6.ControlMessage{TrafficClass: 2}
	return [][]byte{nil, v4.Marshal(), v6.Marshal(), v6class.Marshal()}
}

// A member decodes the packets that another one encoded. Addresses keep their form.
func TestForwarded(t *testing.T) {
	c := controls()
	sent := []ipv4.Message{
		message("192.0.2.7:4433", short(make([]byte, 7)), c[1]),
		message("[2001:db8::7]:1", long(make([]byte, 8)), c[2]),
		message("[fe80::1%eth0]:65535", []byte{1}, c[3]),
		message("[::ffff:192.0.2.7]:4433", make([]byte, maxPacket), c[0]),
	}
	sent[0].Addr.(*net.UDPAddr).IP = sent[0].Addr.(*net.UDPAddr).IP.To4()
	d := datagram(t, 2, sent...)
	var box inbox
	if err := decode(d, func(p *packet) { box.put(p) }); err != nil {
		t.Fatal(err)
	}
	clear(d) // the inbox has copied the packets
	got := []ipv4.Message{room(), room(), room(), room(), room()}
	hops := make([]uint8, len(got))
	if n := box.take(got, hops); n != len(sent) {
		t.Fatalf("%d packets of %d", n, len(sent))
	}
	for i := range sent {
		if !sameMessage(&sent[i], &got[i]) || hops[i] != 2 {
			t.Errorf("packet %d: %+v, %d hops", i, got[i], hops[i])
		}
	}
	if len(sent[0].Addr.(*net.UDPAddr).IP) != 4 || len(sent[3].Addr.(*net.UDPAddr).IP) != 16 {
		t.Error("both forms of an address are to be tried")
	}
	if n := box.take(got, hops); n != 0 {
		t.Errorf("%d packets twice", n)
	}
}

func TestDecodeRefuses(t *testing.T) {
	good := datagram(t, 1, message("127.0.0.1:1", []byte("packet"), controls()[3]))
	change := func(at int, to byte) []byte {
		b := slices.Clone(good)
		b[at] = to
		return b
	}
	for _, tt := range []struct {
		name string
		d    []byte
	}{
		{"nothing", nil},
		{"another form", change(0, 2)},
		{"no hop", change(1, 0)},
		{"too many hops", change(1, maxHops+1)},
		{"address of 5 bytes", change(2, 5)},
		{"long zone", change(21, 16)},
		{"control messages longer than the rest", change(22, 128)},
		{"cut control message", change(22, 20)},
		{"cut packet", good[:len(good)-1]},
		{"something behind", append(slices.Clone(good), 0)},
		{"a good packet, then a bad one", append(slices.Clone(good), 4, 1, 2)},
		{"empty packet", append(slices.Clone(good), 4, 1, 2, 3, 4, 0, 1, 0, 0, 0, 0)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := decode(tt.d, func(*packet) { t.Error("gave a packet") }); err == nil {
				t.Error("accepted")
			}
		})
	}
}

// A control message that would stop quic-go's reading is rejected.
func TestControlFits(t *testing.T) {
	bad := controls()[3]
	bad[0]-- // the length: leaves three bytes of traffic class
	if controlFits(bad) || !controlFits(controls()[3]) || !controlFits(nil) || controlFits([]byte{1, 2, 3}) {
		t.Error("wrong")
	}
}

func TestNotForwardable(t *testing.T) {
	for name, m := range map[string]ipv4.Message{
		"no UDP address": {Addr: &net.UnixAddr{}, Buffers: [][]byte{{1}}, N: 1},
		"no address":     {Addr: &net.UDPAddr{}, Buffers: [][]byte{{1}}, N: 1},
		"long zone":      {Addr: &net.UDPAddr{IP: net.IPv6loopback, Zone: "sixteen letters."}, Buffers: [][]byte{{1}}, N: 1},
		"nothing in it":  {Addr: &net.UDPAddr{IP: net.IPv6loopback}, Buffers: [][]byte{{1}}},
	} {
		var o forwarder
		if o.begin(1); o.add(&m) || o.packets() != 0 {
			t.Errorf("%s: taken", name)
		}
	}
}

// A full inbox accepts no packet. The ring wraps around.
func TestInboxFull(t *testing.T) {
	var box inbox
	ms, hops := []ipv4.Message{room(), room(), room()}, make([]uint8, 3)
	put := func(i int) bool {
		return box.put(&packet{ip: []byte{127, 0, 0, 1}, data: []byte{byte(i), byte(i >> 8)}, hops: 1})
	}
	next := 0
	for round := range 3 {
		for put(next) {
			next++
		}
		if want := inboxPackets + round; next != want {
			t.Fatalf("took %d packets, want %d", next, want)
		}
		n := box.take(ms[:1], hops)
		if got := int(ms[0].Buffers[0][0]) | int(ms[0].Buffers[0][1])<<8; n != 1 || got != round {
			t.Fatalf("packet %d, want %d", got, round)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, c := range controls() {
		f.Add(datagram(f, 1, message("127.0.0.1:1", short(make([]byte, 7)), c), message("[fe80::1%lo]:2", long(make([]byte, 9)), nil)))
	}
	f.Add([]byte{formatVersion, 1})
	f.Add([]byte{formatVersion, 1, 4, 1, 2, 3, 4, 0, 1, 0, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1, 9})
	f.Fuzz(func(t *testing.T, d []byte) {
		var o forwarder
		again := []byte{}
		var box inbox
		err := decode(d, func(p *packet) {
			m := room()
			p.message(&m)
			o.begin(p.hops)
			if !o.add(&m) {
				t.Fatal("a forwarded packet cannot be forwarded again")
			}
			again = append(again, bytes.Join(o.parts[1:], nil)...)
			box.put(p)
		})
		if err == nil && !bytes.Equal(again, d[headLen:]) {
			t.Fatalf("%x became %x", d[headLen:], again)
		}
	})
}
