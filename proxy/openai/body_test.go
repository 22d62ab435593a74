package openai

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

func TestReadBody(t *testing.T) {
	big := strings.Repeat("0123456789abcdef", 3<<20/16)
	for _, tt := range []struct {
		name        string
		body        string
		size, limit int64
		room        int
		status      int
	}{
		{"length known", "abc", 3, 10, 0, 0},
		{"length unknown", "abc", -1, 10, 0, 0},
		{"empty", "", 0, 10, 0, 0},
		{"at the limit", "0123456789", 10, 10, 0, 0},
		{"at the limit, length unknown", "0123456789", -1, 10, 0, 0},
		{"into room", "abc", 3, 10, 64, 0},
		{"into more room than the limit", "0123456789", -1, 10, 64, 0},
		{"large", big, int64(len(big)), 16 << 20, 0, 0},
		{"large, length unknown", big, -1, 16 << 20, 100, 0},
		{"declared too large", "", 11, 10, 0, 413},
		{"too large", "0123456789a", -1, 10, 0, 413},
		{"too large for the room", big, -1, 1000, 5000, 413},
		{"longer than declared", "0123456789a", 5, 10, 0, 413},
	} {
		for name, src := range map[string]io.Reader{
			"whole":     strings.NewReader(tt.body),
			"half":      iotest.HalfReader(strings.NewReader(tt.body)),
			"early end": iotest.DataErrReader(strings.NewReader(tt.body)),
		} {
			t.Run(tt.name+", "+name, func(t *testing.T) {
				got, err := ReadBody(make([]byte, tt.room/2, tt.room), src, tt.size, tt.limit)
				if tt.status == 0 {
					if err != nil || string(got) != tt.body {
						t.Fatalf("%d bytes, %v", len(got), err)
					}
					return
				}
				var e *Error
				if !errors.As(err, &e) || e.Status != tt.status || e.Code != "body_too_large" || len(got) != 0 {
					t.Fatalf("%d bytes, %v", len(got), err)
				}
			})
		}
	}
}

func TestReadBodyPassesErrorsOn(t *testing.T) {
	gone := errors.New("gone")
	_, err := ReadBody(nil, io.MultiReader(strings.NewReader("ab"), iotest.ErrReader(gone)), 5, 10)
	if !errors.Is(err, gone) {
		t.Error(err)
	}
}

func TestReadBodyKeepsRoom(t *testing.T) {
	body := bytes.Repeat([]byte("x"), 1000)
	room := make([]byte, 0, 1024)
	src := bytes.NewReader(body)
	if n := testing.AllocsPerRun(10, func() {
		src.Reset(body)
		if got, err := ReadBody(room, src, 1000, 1<<20); err != nil || &got[0] != &room[:1][0] {
			t.Fatal("not read into the room given")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A header alone must not reserve much memory.
func TestReadBodyTrustsLittle(t *testing.T) {
	got, err := ReadBody(nil, strings.NewReader("x"), 1<<30, 1<<40)
	if err != nil || cap(got) > 2*trusted {
		t.Errorf("%d bytes of room, %v", cap(got), err)
	}
}
