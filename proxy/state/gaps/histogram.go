package gaps

import (
	"math/bits"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// A bucket has the gaps up to 16 ms, and each further bucket those up to 1.5 or 1.33 times as long
// as the bucket before it: 24, 32, 48, 64 ms and so on. The last bucket has all longer gaps.
const (
	buckets = 32
	lost    = buckets // turns without a next turn
)

// bucketOf returns the bucket of a gap.
func bucketOf(gap time.Duration) int {
	ms := uint64(max(0, gap.Milliseconds()))
	if gap > time.Duration(ms)*time.Millisecond {
		ms++
	}
	if ms <= 16 {
		return 0
	}
	octave := bits.Len64(ms-1) - 5 // 0 for 17 to 32 ms
	bucket := 2*octave + 1
	if ms > 24<<octave {
		bucket++
	}
	return min(bucket, buckets-1)
}

// limitMillis returns the longest gap of a bucket in ms.
func limitMillis(bucket int) float32 {
	if bucket%2 == 1 {
		return float32(uint64(24) << (bucket / 2))
	}
	return float32(uint64(16) << (bucket / 2))
}

// histogram counts turns by their gaps.
type histogram struct {
	counts [buckets + 1]uint16
	sum    uint16
}

// add counts a turn. The sum stays below limit.
func (h *histogram) add(bucket int, limit uint16) {
	h.counts[bucket]++
	if h.sum++; h.sum < limit {
		return
	}
	h.sum = 0
	for i := range h.counts {
		h.counts[i] /= 2
		h.sum += h.counts[i]
	}
}

// gaps returns the summary for policies. A quantile is the limit of the bucket in which it is.
func (h *histogram) gaps() (g abi.Gaps) {
	if h.sum == 0 {
		return abi.Gaps{}
	}
	back := uint32(h.sum - h.counts[lost])
	g.Turns, g.Back = float32(h.sum), float32(back)/float32(h.sum)
	if back == 0 {
		return g
	}
	bucket, seen := 0, uint32(h.counts[0])
	for _, q := range [...]struct {
		percent uint32
		to      *float32
	}{{50, &g.P50}, {75, &g.P75}, {90, &g.P90}, {95, &g.P95}, {99, &g.P99}} {
		for 100*seen < q.percent*back {
			bucket++
			seen += uint32(h.counts[bucket])
		}
		*q.to = limitMillis(bucket)
	}
	return g
}
