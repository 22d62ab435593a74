package journal

import "time"

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func since(start, t time.Time) *float64 {
	if t.IsZero() {
		return nil
	}
	ms := millis(t.Sub(start))
	return &ms
}

func unix(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMicro()) / 1e6
}
