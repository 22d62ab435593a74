package quicshare

// idOrigin is the side that created the destination connection id of a packet.
type idOrigin uint8

const (
	// unknown is neither an id of a member nor a client's first id: garbage, which
	// quic-go rejects.
	unknown idOrigin = iota
	// byMember: a process of this port created the id, which contains its member
	// number.
	byMember
	// byClient: a client created the id and has no answer from this host yet. The
	// packet is an Initial or carries early data.
	byClient
)

// clientIDMin and clientIDMax bound the length of a client's first id (RFC 9000,
// 7.2 and 17.2).
const (
	clientIDMin = 8
	clientIDMax = 20
)

// destination returns the destination connection id of packet b, and which side created
// it. id points into b.
func destination(b []byte) (id []byte, by idOrigin) {
	if len(b) <= idLen {
		return nil, unknown
	}
	if b[0]&0x80 == 0 { // short header (RFC 9000, 17.3): the id has idLen bytes
		if b[0]&0x40 == 0 {
			return nil, unknown
		}
		return b[1 : 1+idLen], byMember
	}
	// Long header (RFC 8999, 5.1): flags, version, length of the id, id.
	n := int(b[5])
	if len(b) < 6+n {
		return nil, unknown
	}
	switch id = b[6 : 6+n]; {
	case n == idLen:
		return id, byMember
	case n >= clientIDMin && n <= clientIDMax:
		return id, byClient
	}
	return nil, unknown
}

// recent holds the first ids of clients whose handshakes may still be in progress: the last 4096 to
// 8192 ids. Only the reader of the packets uses it.
type recent struct {
	current, previous map[clientID]struct{}
}

type clientID struct {
	b [clientIDMax]byte
	n uint8
}

const recentIDs = 4096

func newRecent() recent {
	return recent{current: make(map[clientID]struct{}), previous: make(map[clientID]struct{})}
}

func (r *recent) key(id []byte) (k clientID) {
	k.n = uint8(copy(k.b[:], id))
	return k
}

func (r *recent) add(id []byte) {
	if len(r.current) == recentIDs {
		r.current, r.previous = r.previous, r.current
		clear(r.current)
	}
	r.current[r.key(id)] = struct{}{}
}

func (r *recent) has(id []byte) bool {
	k := r.key(id)
	_, now := r.current[k]
	_, before := r.previous[k]
	return now || before
}
