package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Duration is a time.Duration written as a string with a unit: "30s", "5ms",
// "1m30s". The empty string is zero.
type Duration time.Duration

// UnmarshalText accepts the texts that time.ParseDuration accepts, and "" as zero. It
// accepts a negative duration, which Validate rejects.
func (d *Duration) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*d = 0
		return nil
	}
	v, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("invalid duration %q: want a number with a unit, such as 30s or 5ms", text)
	}
	*d = Duration(v)
	return nil
}

// MarshalText writes the form that UnmarshalText reads: engines are sent between nodes
// as JSON.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// String formats d as time.Duration does.
func (d Duration) String() string { return time.Duration(d).String() }

// ByteSize is a number of bytes, written as a string: "16MiB", "64KiB",
// "4096" or "4096B".
type ByteSize int64

// byteUnits are the units of a ByteSize, largest first. B is last, so that it is tried
// after the units that end in it.
func byteUnits() []struct {
	name string
	size int64
} {
	return []struct {
		name string
		size int64
	}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}}
}

// UnmarshalText accepts an integer and one of the units B, KiB, MiB, GiB; no unit means
// bytes. It rejects signs and fractions.
func (s *ByteSize) UnmarshalText(text []byte) error {
	digits, factor := string(text), int64(1)
	for _, unit := range byteUnits() {
		if rest, found := strings.CutSuffix(digits, unit.name); found {
			digits, factor = rest, unit.size
			break
		}
	}
	n, err := strconv.ParseUint(digits, 10, 63)
	if err != nil {
		return fmt.Errorf("invalid size %q: want a whole number with B, KiB, MiB or GiB, such as 16MiB", text)
	}
	if int64(n) > math.MaxInt64/factor {
		return fmt.Errorf("invalid size %q: too large", text)
	}
	*s = ByteSize(int64(n) * factor)
	return nil
}

// String formats s in the largest unit that divides it: "16MiB", "1000B".
func (s ByteSize) String() string {
	for _, unit := range byteUnits() {
		if int64(s) >= unit.size && int64(s)%unit.size == 0 {
			return strconv.FormatInt(int64(s)/unit.size, 10) + unit.name
		}
	}
	return strconv.FormatInt(int64(s), 10) + "B"
}
