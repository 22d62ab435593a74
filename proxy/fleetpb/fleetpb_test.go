package fleetpb

import (
	"bytes"
	"errors"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// records returns a message whose field has that many empty records.
func records(field protowire.Number, n int) []byte {
	return bytes.Repeat(protowire.AppendBytes(protowire.AppendTag(nil, field, protowire.BytesType), nil), n)
}

// TestManyRecords: a message with more records than allowed is refused before memory is
// allocated for them, at every depth.
func TestManyRecords(t *testing.T) {
	nested := func(outer protowire.Number, b []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, outer, protowire.BytesType), b)
	}
	const many = 1 << 20
	for name, tt := range map[string]struct {
		m proto.Message
		b []byte
	}{
		"messages":        {new(Members), records(2, many)},
		"nested messages": {new(Loads), nested(2, records(6, many))},
		"texts":           {new(Members), nested(2, nested(12, records(1, many)))},
		"place":           {new(Place), records(34, many)},
		"notes":           {new(Placed), records(17, many)},
	} {
		allocated := testing.AllocsPerRun(1, func() {
			if err := Unmarshal(tt.b, tt.m, 1000); !errors.Is(err, errRecords) {
				t.Fatalf("%s: %v", name, err)
			}
		})
		if allocated > 10 {
			t.Errorf("%s: %v allocations", name, allocated)
		}
		proto.Reset(tt.m)
		if err := Unmarshal(tt.b, tt.m, many+10); err != nil {
			t.Errorf("%s: %v with a high limit", name, err)
		}
	}
	if err := UnmarshalView(records(34, many), new(Place), 1000); !errors.Is(err, errRecords) {
		t.Errorf("UnmarshalView = %v", err)
	}
}

// FuzzUnmarshal: both decoders read a message of a placement as the same message, if they accept
// it. The fast decoder also accepts texts that are not UTF-8.
func FuzzUnmarshal(f *testing.F) {
	b, _ := proto.Marshal(&Place{
		Lease: 7, Model: "m", Excluded: []uint64{1, 1 << 33}, Headers: []*Header{{Name: "x"}}, WithinWhole: &Instances{},
		Chains: []*Chain{{Block: 16, Hashes: []uint64{1, 2}}}, Turn: &Turn{Key: 1}, EndBlocks: []uint32{1}, EndHashes: []uint64{9},
	})
	f.Add(b)
	f.Add(append(b, 0xf8, 0x3f, 1)) // the field 1023
	f.Add(b[:len(b)-1])
	f.Fuzz(func(t *testing.T, b []byte) {
		var one, two Place
		if UnmarshalView(b, &one, 1000) != nil || proto.Unmarshal(b, &two) != nil {
			return
		}
		one.unknownFields, two.unknownFields = nil, nil
		if again := AppendFast(nil, &one); !bytes.Equal(again, AppendFast(nil, &two)) {
			t.Errorf("%x reads as %v and %v", b, &one, &two)
		}
	})
}
