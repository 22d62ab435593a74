package quicshare

import (
	"encoding/binary"
	"errors"
	"net"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// A forwarded datagram carries one or more packets:
//
//	1 byte   form, 1
//	1 byte   hops: how often these packets were forwarded
//	then for each packet
//	1 byte   length of the source's IP address, 4 or 16, and that address
//	2 bytes  its port
//	1 byte   length of its zone, and the zone's name
//	1 byte   length of the control messages, and those as the kernel gave them:
//	         ECN bits, the address that the client sent to
//	2 bytes  length of the packet, and the packet
//
// Numbers are big-endian; the control messages never leave the host.
const (
	form       = 1
	headLen    = 2
	maxZone    = 15  // IFNAMSIZ less its end
	maxControl = 128 // what quic-go has room for
	maxPacket  = 1452
	maxMeta    = 1 + 16 + 2 + 1 + maxZone + 1 + maxControl + 2

	// maxHops bounds how often a packet is forwarded: from a draining process to
	// one that began to drain since.
	maxHops = 3
)

// errForwarded says that what came in is not of this package's making.
var errForwarded = errors.New("not a forwarded datagram")

// appendMeta appends what precedes the bytes of packet m. ok is false for one that
// cannot be forwarded.
func appendMeta(b []byte, m *ipv4.Message) (_ []byte, ok bool) {
	from, isUDP := m.Addr.(*net.UDPAddr)
	if !isUDP || len(from.IP) != 4 && len(from.IP) != 16 || len(from.Zone) > maxZone ||
		m.NN > maxControl || m.N == 0 || m.N > maxPacket {
		return b, false
	}
	b = append(append(b, byte(len(from.IP))), from.IP...)
	b = binary.BigEndian.AppendUint16(b, uint16(from.Port))
	b = append(append(b, byte(len(from.Zone))), from.Zone...)
	b = append(append(b, byte(m.NN)), m.OOB[:m.NN]...)
	return binary.BigEndian.AppendUint16(b, uint16(m.N)), true
}

// packet is one forwarded packet; its slices are parts of the datagram.
type packet struct {
	ip, zone, control, data []byte
	port                    uint16
	hops                    uint8
}

// decode gives put every packet of datagram d, or none and an error if not all of
// it is as it must be.
func decode(d []byte, put func(*packet)) error {
	if len(d) < headLen || d[0] != form || d[1] == 0 || d[1] > maxHops {
		return errForwarded
	}
	hops := d[1]
	for check := true; ; check = false {
		for rest := d[headLen:]; len(rest) > 0; {
			p := packet{hops: hops}
			var ok bool
			if rest, ok = p.read(rest); !ok {
				return errForwarded
			}
			if !check {
				put(&p)
			}
		}
		if !check {
			return nil
		}
	}
}

// read takes one packet off b.
func (p *packet) read(b []byte) (rest []byte, ok bool) {
	if p.ip, b, ok = part(b, 16); !ok || len(p.ip) != 4 && len(p.ip) != 16 || len(b) < 2 {
		return nil, false
	}
	p.port, b = binary.BigEndian.Uint16(b), b[2:]
	if p.zone, b, ok = part(b, maxZone); !ok {
		return nil, false
	}
	if p.control, b, ok = part(b, maxControl); !ok || !controlFits(p.control) || len(b) < 2 {
		return nil, false
	}
	n := int(binary.BigEndian.Uint16(b))
	if b = b[2:]; n == 0 || n > maxPacket || n > len(b) {
		return nil, false
	}
	p.data = b[:n]
	return b[n:], true
}

// part takes off b a part behind its length of one byte.
func part(b []byte, most int) (p, rest []byte, ok bool) {
	if len(b) == 0 || int(b[0]) > most || len(b) < 1+int(b[0]) {
		return nil, nil, false
	}
	n := 1 + int(b[0])
	return b[1:n], b[n:], true
}

// controlFits reports whether quic-go can read these control messages; those that
// it cannot would end its reading, and the header of a cut one it would read from
// what lies behind.
func controlFits(b []byte) bool {
	const word = unix.SizeofCmsghdr - 8 // the length is one; level and type have 4 bytes
	for len(b) > 0 {
		if len(b) < unix.CmsgLen(0) {
			return false
		}
		n := uint64(binary.NativeEndian.Uint32(b))
		if word == 8 {
			n = binary.NativeEndian.Uint64(b)
		}
		if n < uint64(unix.CmsgLen(0)) || n > uint64(len(b)) {
			return false
		}
		level, kind := binary.NativeEndian.Uint32(b[word:]), binary.NativeEndian.Uint32(b[word+4:])
		body := int(n) - unix.CmsgLen(0)
		switch {
		case level == unix.IPPROTO_IP && kind != localAddress && body != 1,
			level == unix.IPPROTO_IPV6 && kind == unix.IPV6_TCLASS && body != 4:
			return false
		}
		b = b[min(unix.CmsgSpace(body), len(b)):]
	}
	return true
}

// message puts p into m, which has room, as the socket itself would.
func (p *packet) message(m *ipv4.Message) {
	m.N = copy(m.Buffers[0], p.data)
	m.NN = copy(m.OOB, p.control)
	m.Flags = 0
	m.Addr = &net.UDPAddr{IP: append(net.IP(nil), p.ip...), Port: int(p.port), Zone: string(p.zone)}
}
