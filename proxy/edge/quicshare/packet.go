package quicshare

// maker is who made the destination connection id of a packet.
type maker uint8

const (
	// unknown is no id of ours nor a first one of a client: garbage, which
	// quic-go knows how to refuse.
	unknown maker = iota
	// byLane is a process of this port; the id names its lane.
	byLane
	// byClient is a client that has not heard of us yet: the id is of an Initial
	// or comes with early data.
	byClient
)

// clientIDMin and clientIDMax bound the length of a client's first id (RFC 9000,
// 7.2 and 17.2).
const (
	clientIDMin = 8
	clientIDMax = 20
)

// destination reads the destination connection id of packet b and who made it. id
// is a part of b.
func destination(b []byte) (id []byte, by maker) {
	if len(b) <= idLen {
		return nil, unknown
	}
	if b[0]&0x80 == 0 { // short header (RFC 9000, 17.3): the id has our length
		if b[0]&0x40 == 0 {
			return nil, unknown
		}
		return b[1 : 1+idLen], byLane
	}
	// Long header (RFC 8999, 5.1): flags, version, then the id behind its length.
	n := int(b[5])
	if len(b) < 6+n {
		return nil, unknown
	}
	switch id = b[6 : 6+n]; {
	case n == idLen:
		return id, byLane
	case n >= clientIDMin && n <= clientIDMax:
		return id, byClient
	}
	return nil, unknown
}

// recent remembers the first ids of clients whose handshakes may still run: the
// last 4096 to 8192 of them. Only the reader of the packets uses it.
type recent struct {
	now, before map[clientID]struct{}
}

type clientID struct {
	b [clientIDMax]byte
	n uint8
}

const recentIDs = 4096

func newRecent() recent {
	return recent{now: make(map[clientID]struct{}), before: make(map[clientID]struct{})}
}

func (r *recent) key(id []byte) (k clientID) {
	k.n = uint8(copy(k.b[:], id))
	return k
}

func (r *recent) add(id []byte) {
	if len(r.now) == recentIDs {
		r.now, r.before = r.before, r.now
		clear(r.now)
	}
	r.now[r.key(id)] = struct{}{}
}

func (r *recent) has(id []byte) bool {
	k := r.key(id)
	_, now := r.now[k]
	_, before := r.before[k]
	return now || before
}
