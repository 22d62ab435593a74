package tenant

import "time"

// bucket is the used part of a budget per minute. It becomes empty at a constant rate. The
// clock is the time in µs since the Unix epoch, because the state outlives processes.
type bucket struct {
	used int64 // in units: unit for each request or token
	at   int64 // µs, when used was right
}

// unit is the number of units of a request or token. A budget of n per minute frees n units
// each µs, so that all amounts are exact integers.
const unit = int64(time.Minute / time.Microsecond)

// maxDebt bounds used, as a multiple of the budget: an answer that is longer than its
// reservation makes a debt.
const maxDebt = 2

// smallStep is the largest step back of the clock, in µs, for which the bucket waits until
// the clock has passed the old time. After a larger step the bucket continues from the new
// time.
const smallStep = int64(time.Second / time.Microsecond)

// drain frees the units of the time since the last call.
func (b *bucket) drain(now, perMinute int64) {
	elapsed := now - b.at
	switch {
	case elapsed < 0 && elapsed > -smallStep:
		return
	case elapsed >= maxDebt*unit:
		b.used = 0
	case elapsed > 0:
		b.used = max(0, b.used-elapsed*perMinute)
	}
	b.at = now
}

// lacks returns the time in µs until n can be taken; 0: now. n is at most perMinute.
func (b *bucket) lacks(n, perMinute int64) int64 {
	over := b.used + n*unit - perMinute*unit
	if over <= 0 {
		return 0
	}
	return (over + perMinute - 1) / perMinute
}

// add takes n, or gives -n back.
func (b *bucket) add(n, perMinute int64) {
	n = min(max(n, -MaxPerMinute), MaxPerMinute)
	b.used = min(max(0, b.used+n*unit), maxDebt*perMinute*unit)
}

// level describes the bucket.
func (b *bucket) level(perMinute int64) Level {
	if perMinute == 0 {
		return Level{}
	}
	return Level{
		Limit:     perMinute,
		Remaining: max(0, perMinute*unit-b.used) / unit,
		Reset:     time.Duration((b.used+perMinute-1)/perMinute) * time.Microsecond,
	}
}
