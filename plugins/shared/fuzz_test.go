package shared

import (
	"encoding/binary"
	"testing"

	"github.com/pdproxy/pdproxy/abi/host"
)

// FuzzArguments passes any bytes of a guest to the foreign functions. A stored
// value can be read back, and a counter never decreases.
func FuzzArguments(f *testing.F) {
	for _, args := range []string{
		"\x02\x00\x00\x00abxyz", "\x00\x00\x00\x00v", "\xff\xff\xff\xffab", "\x01\x00\x00",
		"\x01\x00\x00\x00\x00\x00\x00\x00requests", "\xff\xff\xff\xff\xff\xff\xff\xffrequests", "",
	} {
		f.Add([]byte(args))
	}
	f.Fuzz(func(t *testing.T, args []byte) {
		k := kept{}
		if _, status := ConversationPut(k, args); status == host.OK {
			end := 4 + binary.LittleEndian.Uint32(args)
			if got, status := ConversationGet(k, args[4:end]); status != host.OK || string(got) != string(args[end:]) {
				t.Errorf("%q is %q, %v", args, got, status)
			}
		} else if len(k) != 0 {
			t.Errorf("%q is refused, but stored", args)
		}
		m := NewMetricTable(new(LocalMetrics))
		before := uint64(0)
		for range 2 {
			value, status := m.Count(args)
			if status != host.OK {
				break
			}
			if n := binary.LittleEndian.Uint64(value); n < before {
				t.Errorf("a counter changed from %d to %d", before, n)
			} else {
				before = n
			}
		}
	})
}
