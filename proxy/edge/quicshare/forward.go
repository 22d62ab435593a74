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
//	1 byte   format version, 1
//	1 byte   hops: how often these packets were forwarded
//	then for each packet
//	1 byte   length of the source's IP address, 4 or 16, and that address
//	2 bytes  source port
//	1 byte   length of the source's zone, and the zone's name
//	1 byte   length of the control messages, and the messages as the kernel gave them:
//	         ECN bits, the address that the client sent to
//	2 bytes  length of the packet, and the packet
//
// Numbers are big-endian. The control messages keep the kernel's native form, because
// they never leave the host.
const (
	formatVersion = 1
	headLen       = 2
	maxZone       = 15  // IFNAMSIZ without the final zero byte
	maxControl    = 128 // the space that quic-go provides
	maxPacket     = 1452
	maxMeta       = 1 + 16 + 2 + 1 + maxZone + 1 + maxControl + 2

	// maxHops bounds how often a packet is forwarded. A packet takes more than one hop
	// when its receiver has begun to drain in the meantime.
	maxHops = 3
)

// errForwarded reports that a received datagram does not have this package's format.
var errForwarded = errors.New("not a forwarded datagram")

// appendMeta appends the fields that precede the bytes of packet m. ok is false if m
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

// packet is one forwarded packet. Its slices point into the datagram.
type packet struct {
	ip, zone, control, data []byte
	port                    uint16
	hops                    uint8
}

// decode passes every packet of datagram d to put. If any part of d is malformed,
// decode passes none and returns an error.
func decode(d []byte, put func(*packet)) error {
	if len(d) < headLen || d[0] != formatVersion || d[1] == 0 || d[1] > maxHops {
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

// read decodes one packet from the start of b.
func (p *packet) read(b []byte) (rest []byte, ok bool) {
	if p.ip, b, ok = splitPrefixed(b, 16); !ok || len(p.ip) != 4 && len(p.ip) != 16 || len(b) < 2 {
		return nil, false
	}
	p.port, b = binary.BigEndian.Uint16(b), b[2:]
	if p.zone, b, ok = splitPrefixed(b, maxZone); !ok {
		return nil, false
	}
	if p.control, b, ok = splitPrefixed(b, maxControl); !ok || !controlFits(p.control) || len(b) < 2 {
		return nil, false
	}
	n := int(binary.BigEndian.Uint16(b))
	if b = b[2:]; n == 0 || n > maxPacket || n > len(b) {
		return nil, false
	}
	p.data = b[:n]
	return b[n:], true
}

// splitPrefixed splits off a field that follows its length of one byte.
func splitPrefixed(b []byte, most int) (p, rest []byte, ok bool) {
	if len(b) == 0 || int(b[0]) > most || len(b) < 1+int(b[0]) {
		return nil, nil, false
	}
	n := 1 + int(b[0])
	return b[1:n], b[n:], true
}

// controlFits reports whether quic-go can parse these control messages. quic-go stops
// reading at a message that it cannot parse, and reads past the end of a message that
// was cut short.
func controlFits(b []byte) bool {
	const word = unix.SizeofCmsghdr - 8 // cmsghdr has a length of one word, and 4 bytes each of level and type
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

// message copies p into m as a read of the socket would fill it. m must have room.
func (p *packet) message(m *ipv4.Message) {
	m.N = copy(m.Buffers[0], p.data)
	m.NN = copy(m.OOB, p.control)
	m.Flags = 0
	m.Addr = &net.UDPAddr{IP: append(net.IP(nil), p.ip...), Port: int(p.port), Zone: string(p.zone)}
}
