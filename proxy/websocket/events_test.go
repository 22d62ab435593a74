package websocket

import (
	"bytes"
	"slices"
	"strings"
	"testing"
)

// split returns the events of a stream that arrives in pieces, each as name, NUL and data. at has
// the lengths of the first pieces.
func split(stream []byte, at []byte) (list []string) {
	var e events
	send := func(name, data []byte) error {
		list = append(list, string(name)+"\x00"+string(data))
		return nil
	}
	for _, n := range at {
		piece := bytes.Clone(stream[:min(int(n), len(stream))])
		stream = stream[len(piece):]
		if e.feed(piece, send) != nil {
			return nil
		}
		for i := range piece { // the memory belongs to the caller
			piece[i] = '?'
		}
	}
	if e.feed(stream, send) != nil || e.finish(send) != nil {
		return nil
	}
	return list
}

// reference reads a stream line by line, without pieces.
func reference(stream string) (list []string) {
	name, data, has := "", []string(nil), false
	for _, line := range append(strings.Split(stream, "\n"), "") {
		line = strings.TrimSuffix(line, "\r")
		field, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case line == "":
			if has {
				list = append(list, name+"\x00"+strings.Join(data, "\n"))
			}
			name, data, has = "", nil, false
		case field == "event":
			name = value
		case field == "data":
			data, has = append(data, value), true
		}
	}
	return list
}

func TestEvents(t *testing.T) {
	for _, tt := range []struct {
		stream string
		want   []string
	}{
		{"data: {}\n\n", []string{"\x00{}"}},
		{"event: a\r\ndata:{}\r\n\r\nevent: b\n\ndata: 1\ndata: 2\ndata\n\n", []string{"a\x00{}", "\x001\n2\n"}},
		{": keep-alive\n\nid: 3\ndata: x", []string{"\x00x"}},
		{"\n\n", nil},
	} {
		if got := split([]byte(tt.stream), nil); !slices.Equal(got, tt.want) {
			t.Errorf("%q: got %q, want %q", tt.stream, got, tt.want)
		}
	}
}

func TestLongEvent(t *testing.T) {
	var e events
	nothing := func(_, _ []byte) error { return nil }
	piece := []byte("data: " + strings.Repeat("a", 1<<20) + "\n")
	var err error
	for n := 0; err == nil && n < 2*maxEvent; n += len(piece) {
		err = e.feed(piece, nothing)
	}
	if err != errLongEvent {
		t.Errorf("lines without an end of the event: got %v", err)
	}
	e, err = events{}, nil
	for n := 0; err == nil && n < 2*maxEvent; n += len(piece) {
		err = e.feed(piece[:len(piece)-1], nothing)
	}
	if err != errLongEvent {
		t.Errorf("a line without an end: got %v", err)
	}
}

// FuzzEvents: the events do not depend on the pieces in which the stream arrives.
func FuzzEvents(f *testing.F) {
	for _, s := range []string{
		"event: response.created\ndata: {\"type\":\"response.created\"}\n\nevent: error\ndata: {}\n\ndata: [DONE]\n\n",
		"data: a\r\ndata: b\r\n\r\n: comment\r\n\r\nevent: x\r\ndata: c", "data\n\ndata:\n\n", "event:a\n\ndata:b\n\r\n\n",
	} {
		f.Add([]byte(s), []byte{1, 1, 2, 5, 7, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 9, 1, 1, 1})
		f.Add([]byte(s), []byte{6, 0, 8, 1})
	}
	f.Fuzz(func(t *testing.T, stream, at []byte) {
		want := reference(string(stream))
		if got := split(bytes.Clone(stream), at); !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}

// An event with many lines of data costs time in proportion to its length: its data does not move
// with each line.
func TestEventsWithManyLines(t *testing.T) {
	const lines = 10_000
	text := []byte(strings.Repeat("data: x\n", lines) + "\n")
	for name, piece := range map[string]int{"whole": len(text), "in pieces": 4 << 10, "in odd pieces": 13} {
		t.Run(name, func(t *testing.T) {
			allocs := testing.AllocsPerRun(1, func() {
				var e events
				got := 0
				for rest := text; len(rest) > 0; rest = rest[min(piece, len(rest)):] {
					if err := e.feed(rest[:min(piece, len(rest))], func(_, data []byte) error { got = len(data); return nil }); err != nil {
						t.Fatal(err)
					}
				}
				if got != 2*lines-1 {
					t.Fatalf("%d bytes of data", got)
				}
			})
			if allocs > 100 {
				t.Errorf("%v allocations for %d lines", allocs, lines)
			}
		})
	}
}
