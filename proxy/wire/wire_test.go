package wire

import (
	"bytes"
	"encoding/binary"
	"math"
	"testing"
)

// TestReadsWhatIsAppended: a Reader returns each appended value, and then the message
// ends.
func TestReadsWhatIsAppended(t *testing.T) {
	var b []byte
	unsigned := []uint64{0, 1, 0x7f, 0x80, 1 << 32, math.MaxUint64}
	signed := []int64{0, 1, -1, math.MinInt64, math.MaxInt64}
	texts := []string{"", "x", string(make([]byte, 300))}
	for _, v := range unsigned {
		b = AppendUint(b, v)
	}
	for _, v := range signed {
		b = AppendInt(b, v)
	}
	for _, v := range texts {
		b = AppendText(b, v)
	}
	b = append(b, 1)
	b = binary.LittleEndian.AppendUint16(b, 2)
	b = binary.LittleEndian.AppendUint32(b, 3)
	b = binary.LittleEndian.AppendUint64(b, 4)
	b = append(AppendUint(b, 2), "abcdef"...)

	r := Read(b)
	for _, want := range unsigned {
		if got := r.Uint(); got != want {
			t.Errorf("r.Uint() = %d, want %d", got, want)
		}
	}
	for _, want := range signed {
		if got := r.Int(); got != want {
			t.Errorf("r.Int() = %d, want %d", got, want)
		}
	}
	for _, want := range texts {
		if got := r.Text(); string(got) != want || cap(got) != len(want) {
			t.Errorf("%q with capacity %d, want %q", got, cap(got), want)
		}
	}
	if a, b, c, d := r.Uint8(), r.Uint16(), r.Uint32(), r.Uint64(); a != 1 || b != 2 || c != 3 || d != 4 {
		t.Errorf("got %d %d %d %d, want 1 2 3 4", a, b, c, d)
	}
	if n, left := r.List(3), r.Len(); n != 2 || left != 6 {
		t.Errorf("list of %d with %d bytes left, want 2 with 6", n, left)
	}
	if r.Done() {
		t.Error("done before the end")
	}
	if rest := r.Rest(); string(rest) != "abcdef" || !r.Done() {
		t.Errorf("rest %q, done %v", rest, r.Done())
	}
}

// TestMalformed: each method fails if its value is malformed, returns zero, and drops the
// rest of the message.
func TestMalformed(t *testing.T) {
	endless := bytes.Repeat([]byte{0x80}, 11)
	for name, test := range map[string]struct {
		message []byte
		read    func(*Reader) bool // reports whether the read value is zero
	}{
		"Uint empty":    {nil, func(r *Reader) bool { return r.Uint() == 0 }},
		"Uint cut":      {[]byte{0x80}, func(r *Reader) bool { return r.Uint() == 0 }},
		"Uint too long": {endless, func(r *Reader) bool { return r.Uint() == 0 }},
		"UintUpTo":      {[]byte{4, 1}, func(r *Reader) bool { return r.UintUpTo(3) == 0 }},
		"Int empty":     {nil, func(r *Reader) bool { return r.Int() == 0 }},
		"Int too long":  {endless, func(r *Reader) bool { return r.Int() == 0 }},
		"Bytes":         {[]byte{1, 2}, func(r *Reader) bool { return r.Bytes(3) == nil }},
		"Bytes 2^64-1":  {[]byte{1, 2}, func(r *Reader) bool { return r.Bytes(math.MaxUint64) == nil }},
		"Text":          {[]byte{3, 1, 2}, func(r *Reader) bool { return r.Text() == nil }},
		"List":          {[]byte{3, 1, 2, 3, 4, 5}, func(r *Reader) bool { return r.List(2) == 0 }},
		"Uint8":         {nil, func(r *Reader) bool { return r.Uint8() == 0 }},
		"Uint16":        {[]byte{1}, func(r *Reader) bool { return r.Uint16() == 0 }},
		"Uint32":        {[]byte{1, 2, 3}, func(r *Reader) bool { return r.Uint32() == 0 }},
		"Uint64":        {[]byte{1, 2, 3, 4, 5, 6, 7}, func(r *Reader) bool { return r.Uint64() == 0 }},
	} {
		t.Run(name, func(t *testing.T) {
			r := Read(test.message)
			if zero := test.read(&r); !zero || !r.Failed() || r.Done() || r.Len() != 0 {
				t.Errorf("zero %v, failed %v, done %v, %d bytes left", zero, r.Failed(), r.Done(), r.Len())
			}
		})
	}
	if r := (Reader{}); !r.Done() || r.Failed() {
		t.Error("the zero Reader is not an empty message")
	}
}

// FuzzReader: for any bytes and any order of calls, the reader reads no byte after the
// end.
func FuzzReader(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8}, []byte("\x01x\x02ab"))
	f.Fuzz(func(t *testing.T, calls, message []byte) {
		r := Read(message)
		for _, call := range calls {
			before, read := r.Len(), 0
			switch call % 9 {
			case 0:
				r.Uint()
			case 1:
				r.Int()
			case 2:
				read = len(r.Text())
			case 3:
				r.List(1 + int(call)/9)
			case 4:
				r.Uint8()
			case 5:
				r.Uint16()
			case 6:
				r.Uint32()
			case 7:
				r.Uint64()
			case 8:
				read = len(r.Bytes(uint64(call)))
			}
			if read+r.Len() > before || r.Failed() && r.Len() > 0 {
				t.Fatalf("call %d: %d of %d bytes remain after %d were read", call%9, r.Len(), before, read)
			}
		}
	})
}
