package loadgen

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Limits are those of a good request, in milliseconds; 0: no limit.
type Limits struct {
	TTFT  float64 `json:"ttft_ms,omitempty"`
	ITL   float64 `json:"itl_ms,omitempty"` // mean time between tokens
	Total float64 `json:"e2e_ms,omitempty"`
}

// ParseLimits reads ttft=DURATION,itl=DURATION,e2e=DURATION, of which any may be missing.
func ParseLimits(text string) (l Limits, err error) {
	if text == "" {
		return l, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(part, "=")
		to, ok := map[string]*float64{"ttft": &l.TTFT, "itl": &l.ITL, "e2e": &l.Total}[name]
		d, err := time.ParseDuration(value)
		switch {
		case !ok:
			return l, fmt.Errorf("%q is not ttft=, itl= or e2e=", part)
		case err != nil || d <= 0:
			return l, fmt.Errorf("%q is not a time above 0, such as %s=500ms", part, name)
		case *to != 0:
			return l, fmt.Errorf("%s occurs twice", name)
		}
		*to = float64(d) / float64(time.Millisecond)
	}
	return l, nil
}

// within reports whether a complete answer keeps all limits. An answer of one token keeps
// every limit for the time between tokens.
func (l *Limits) within(s *Sample) bool {
	perToken, _ := s.perToken()
	return !(l.TTFT > 0 && s.First > l.TTFT || l.ITL > 0 && perToken > l.ITL || l.Total > 0 && s.Total > l.Total)
}

// The settings that a sweep can change.
const (
	SweepRate        = "rate"
	SweepConcurrency = "concurrency"
	SweepSpeed       = "speed"
)

// Sweep is a setting with the values that it gets, one run after another.
type Sweep struct {
	Name   string
	Values []float64
}

// ParseSweep reads NAME=VALUE,VALUE and so on.
func ParseSweep(text string) (s Sweep, err error) {
	name, values, _ := strings.Cut(text, "=")
	s.Name = name
	if !slices.Contains([]string{SweepRate, SweepConcurrency, SweepSpeed}, name) {
		return s, fmt.Errorf("%q is not rate=, concurrency= or speed=", text)
	}
	for value := range strings.SplitSeq(values, ",") {
		v, err := strconv.ParseFloat(value, 64)
		if err != nil || !(v > 0) || v > 1e9 || name == SweepConcurrency && v != float64(int(v)) {
			return s, fmt.Errorf("%q is not a list of numbers above 0, such as %s=1,2,4", values, name)
		}
		if slices.Contains(s.Values, v) {
			return s, errors.New("value " + value + " occurs twice")
		}
		s.Values = append(s.Values, v)
	}
	return s, nil
}

// Config returns the configuration of the i-th run. The prompts of each run differ, so that
// no run finds those of an earlier one in a cache.
func (s *Sweep) Config(c Config, i int) Config {
	v := s.Values[i]
	switch s.Name {
	case SweepRate:
		c.Rate = v
	case SweepConcurrency:
		c.Concurrency = int(v)
	case SweepSpeed:
		c.Speed = v
	}
	c.Seed += uint64(i)
	c.Label = s.Name + "=" + strconv.FormatFloat(v, 'g', -1, 64)
	return c
}
