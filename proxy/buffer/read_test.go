package buffer

import (
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"
)

// timed is a TimedReader that never waits.
type timed struct{ io.Reader }

func (timed) SetIdleTimeout(time.Duration) {}

func TestReadAll(t *testing.T) {
	broken := errors.New("broken")
	past := time.Now().Add(-time.Second)
	tests := []struct {
		name      string
		size      int
		announced int64
		limit     int
		budget    int64
		by        time.Time
		end       error // the error that ends the reader; nil: io.EOF
		want      error
	}{
		{"announced", 100_000, 100_000, 1 << 20, 1 << 20, time.Time{}, nil, nil},
		{"not announced", 100_000, -1, 1 << 20, 1 << 20, time.Now().Add(time.Hour), nil, nil},
		{"as long as it may be", 100_000, -1, 100_000, 1 << 20, time.Time{}, nil, nil},
		{"empty", 0, 0, 1 << 20, 1 << 20, time.Time{}, nil, nil},
		{"announced too long", 10, 1000, 999, 1 << 20, time.Time{}, nil, ErrTooLarge},
		{"too long", 1000, -1, 999, 1 << 20, time.Time{}, nil, ErrTooLarge},
		{"no memory at all", 10, 10, 1 << 20, 100, time.Time{}, nil, ErrFull},
		{"no memory for more", 100_000, -1, 1 << 20, 50_000, time.Time{}, nil, ErrFull},
		{"too late", 10, 10, 1 << 20, 1 << 20, past, nil, os.ErrDeadlineExceeded},
		{"broken off", 10, 1000, 1 << 20, 1 << 20, time.Time{}, broken, broken},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var g Budget
			g.SetLimit(tt.budget)
			text := strings.Repeat("a", tt.size)
			r := io.Reader(strings.NewReader(text))
			if tt.end != nil {
				r = io.MultiReader(r, failing{tt.end})
			}
			b, err := g.ReadAll(timed{r}, tt.announced, tt.limit, tt.by)
			if err != tt.want {
				t.Errorf("g.ReadAll = %v, want %v", err, tt.want)
			}
			if err == nil && string(b.B) != text {
				t.Errorf("%d bytes were read of %d", len(b.B), tt.size)
			}
			b.Free()
			if n := g.Used(); n != 0 {
				t.Errorf("%d bytes are still counted", n)
			}
		})
	}
}

// failing is a reader whose reads fail.
type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }
