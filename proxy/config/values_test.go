package config

import (
	"math"
	"testing"
	"time"
)

func TestDuration(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"30s": 30 * time.Second, "5ms": 5 * time.Millisecond, "1m30s": 90 * time.Second, "0s": 0, "": 0, "-1s": -time.Second, "1.5h": 90 * time.Minute,
	} {
		var d Duration
		if err := d.UnmarshalText([]byte(text)); err != nil || time.Duration(d) != want {
			t.Errorf("%q: got %v, %v, want %v", text, d, err, want)
		}
		written, _ := d.MarshalText()
		if again := Duration(7); again.UnmarshalText(written) != nil || again != d {
			t.Errorf("%q: written %q, read %v", text, written, again)
		}
	}
	for _, text := range []string{"30", "s", "1d", " 1s", "1 s", "9999999999h"} {
		d := Duration(7)
		if err := d.UnmarshalText([]byte(text)); err == nil || d != 7 {
			t.Errorf("%q: got %v, %v, want an error and no change", text, d, err)
		}
	}
}

func TestByteSize(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "1": 1, "4096": 4096, "10B": 10, "64KiB": 65536, "16MiB": 16777216, "4GiB": 4294967296, "9223372036854775807": math.MaxInt64,
	} {
		var s ByteSize
		if err := s.UnmarshalText([]byte(text)); err != nil || int64(s) != want {
			t.Errorf("%q: got %d, %v, want %d", text, s, err, want)
		}
	}
	for _, text := range []string{"", "MiB", "-1", "+1", "1.5MiB", "1 MiB", "1mib", "1MB", "1K", "0x10", "9223372036854775808", "9223372036854775807KiB"} {
		s := ByteSize(7)
		if err := s.UnmarshalText([]byte(text)); err == nil || s != 7 {
			t.Errorf("%q: got %d, %v, want an error and no change", text, s, err)
		}
	}
	for size, want := range map[ByteSize]string{0: "0B", 1000: "1000B", 1024: "1KiB", 1025: "1025B", 16 << 20: "16MiB", 3 << 30: "3GiB", 1 << 40: "1024GiB"} {
		if got := size.String(); got != want {
			t.Errorf("String of %d: got %q, want %q", int64(size), got, want)
		}
	}
}
