package plot

import (
	"math"
	"strconv"
)

// Scale maps values to positions.
type Scale struct {
	From, To    float64 // values
	Logarithmic bool
	Zero        bool    // the logarithm of the value plus 1, which has a place for 0
	start, end  float64 // positions
}

// At returns the position of a value. Values below a logarithmic scale are at its start.
func (s *Scale) At(v float64) float64 {
	from, to := s.From, s.To
	switch {
	case s.Zero:
		v, from, to = math.Log1p(max(v, from)), math.Log1p(from), math.Log1p(to)
	case s.Logarithmic:
		v, from, to = math.Log(max(v, from)), math.Log(from), math.Log(to)
	}
	if to <= from {
		return s.start
	}
	return s.start + (v-from)/(to-from)*(s.end-s.start)
}

// The widest logarithmic scales that have ticks at equal steps: the last value by the first one, and
// the last value of a scale with 0.
const (
	evenRatio = 4
	evenCount = 8
)

// ticks returns at least three round values, about n at most. The scale grows to the first and
// the last of them, so that no value is beyond the labels.
func (s *Scale) ticks(n int) []float64 {
	if !(s.To > s.From) {
		s.To = s.From + 1
	}
	var ticks []float64
	switch {
	case s.Zero && s.To > evenCount:
		ticks = append([]float64{0}, decades(1, s.To, n)...)
	case s.Logarithmic && s.To > evenRatio*s.From:
		ticks = decades(s.From, s.To, n)
	case s.Zero:
		ticks = even(s.From, max(math.Ceil(s.To), 2), 1, max(n, evenCount))
	default:
		ticks = even(s.From, s.To, 0, n)
	}
	if s.Logarithmic && ticks[0] <= 0 {
		ticks = ticks[1:]
	} else {
		s.From = ticks[0]
	}
	s.To = ticks[len(ticks)-1]
	return ticks
}

// even returns values at equal steps of 1, 2 or 5 times a power of ten, least or more, from below the
// first value to above the last one.
func even(from, to, least float64, n int) []float64 {
	power := math.Pow(10, math.Floor(math.Log10((to-from)/float64(n))))
	factor := 10.0
	for _, f := range []float64{1, 2, 5} {
		if (to-from)/(power*f) <= float64(n) {
			factor = f
			break
		}
	}
	step := max(power*factor, least)
	var ticks []float64
	for i := math.Floor(from/step + 1e-9); ; i++ {
		ticks = append(ticks, i*step)
		if i*step >= to-step*1e-9 {
			return ticks
		}
	}
}

// decades returns 1, 2 and 5 of each power of ten, or only the powers if these are too many, from below
// the first value to above the last one.
func decades(from, to float64, n int) []float64 {
	var all, powers []float64
	first, last := math.Floor(math.Log10(from)+1e-9), math.Ceil(math.Log10(to)-1e-9)
	for p := first; p <= last; p++ {
		powers = append(powers, math.Pow(10, p))
		for _, f := range []float64{1, 2, 5} {
			v := f * math.Pow(10, p)
			above := len(all) > 0 && all[len(all)-1] >= to*(1-1e-9)
			if !above {
				all = append(all, v)
			}
		}
	}
	for len(all) > 1 && all[1] <= from*(1+1e-9) {
		all = all[1:]
	}
	if len(all) > n && len(powers) > 3 {
		return powers
	}
	return all
}

// number writes all digits of a tick, without those that come from binary fractions.
func number(v float64) string {
	v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'e', 11, 64), 64)
	return strconv.FormatFloat(v, 'f', -1, 64)
}

// TickTime writes a time in milliseconds.
func TickTime(ms float64) string {
	if ms >= 1000 {
		return number(ms/1000) + " s"
	}
	return number(ms) + " ms"
}

// TickPercent writes a share as a percentage.
func TickPercent(v float64) string { return number(100*v) + " %" }

// TickCount writes a number, with k or M for thousands and millions.
func TickCount(v float64) string {
	switch {
	case v >= 1e6:
		return number(v/1e6) + " M"
	case v >= 10_000:
		return number(v/1000) + "k"
	}
	return number(v)
}
