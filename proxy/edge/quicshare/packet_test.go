package quicshare

import (
	"bytes"
	"testing"
)

// long returns a packet with a long header, version 1, and that destination id.
func long(id []byte) []byte {
	b := append([]byte{0xc3, 0, 0, 0, 1, byte(len(id))}, id...)
	return append(b, make([]byte, 1200-len(b))...)
}

// short returns a packet with a short header.
func short(id []byte) []byte { return append(append([]byte{0x41}, id...), make([]byte, 40)...) }

func TestDestination(t *testing.T) {
	ours := []byte{9, 1, 2, 3, 4, 5, 6}
	client := []byte{1, 2, 3, 4, 5, 6, 7, 8}
	for _, tt := range []struct {
		name   string
		packet []byte
		id     []byte
		by     idOrigin
	}{
		{"short header", short(ours), ours, byMember},
		{"short header, nothing behind", short(ours)[:8], ours, byMember},
		{"short header, cut", short(ours)[:7], nil, unknown},
		{"not QUIC", append([]byte{0x01}, short(ours)[1:]...), nil, unknown},
		{"handshake", long(ours), ours, byMember},
		{"initial", long(client), client, byClient},
		{"initial, longest id", long(make([]byte, 20)), make([]byte, 20), byClient},
		{"id too long", long(make([]byte, 21)), nil, unknown},
		{"id of 6", long(ours[:6]), nil, unknown},
		{"no id", long(nil), nil, unknown},
		{"long header, cut in the id", long(client)[:13], nil, unknown},
		{"long header, cut before the id", long(client)[:6], nil, unknown},
		{"nothing", nil, nil, unknown},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if id, by := destination(tt.packet); by != tt.by || !bytes.Equal(id, tt.id) {
				t.Errorf("id %x of %d, want %x of %d", id, by, tt.id, tt.by)
			}
		})
	}
}

func FuzzDestination(f *testing.F) {
	f.Add(short([]byte{9, 1, 2, 3, 4, 5, 6}))
	f.Add(long([]byte{9, 1, 2, 3, 4, 5, 6}))
	f.Add(long([]byte{1, 2, 3, 4, 5, 6, 7, 8}))
	f.Add([]byte{0xc0, 0, 0, 0, 1, 255})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		id, by := destination(b)
		switch {
		case by == unknown && id != nil, by == byMember && len(id) != idLen,
			by == byClient && (len(id) < clientIDMin || len(id) > clientIDMax || b[0]&0x80 == 0):
			t.Fatalf("id %x of %d", id, by)
		}
		if by != unknown && !bytes.Contains(b, id) {
			t.Fatalf("id %x is not of the packet", id)
		}
	})
}

// The last 4096 clients are known, however many came before.
func TestRecent(t *testing.T) {
	r := newRecent()
	id := func(i int) []byte { return []byte{byte(i), byte(i >> 8), byte(i >> 16), 0, 0, 0, 0, 0} }
	const n = 3*recentIDs + 17
	for i := range n {
		r.add(id(i))
		r.add(id(i))
	}
	for i := n - recentIDs; i < n; i++ {
		if !r.has(id(i)) {
			t.Fatalf("client %d of %d is forgotten", i, n)
		}
	}
	if r.has(id(0)) || r.has(id(n)) || r.has(id(n - 1)[:7]) {
		t.Error("the member has a client that it never served or should have removed")
	}
	if len(r.current)+len(r.previous) > 2*recentIDs {
		t.Errorf("%d ids", len(r.current)+len(r.previous))
	}
}
