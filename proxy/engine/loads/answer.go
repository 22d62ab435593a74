package loads

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// Answer is an engine's report of its load.
type Answer struct {
	Ranks       []Rank // ranks in the report, each once
	BlockTokens int    // tokens per KV block; 0 if not reported
}

// Rank is an engine's report about one data-parallel rank. The fields At and Every of the
// report are not set here.
type Rank struct {
	Rank int // Whole, or from 0 to below maxRanks
	load.Report
	Moved   int64         // tokens of the KV in the rank's last transfer; 0: unknown
	MovedIn time.Duration // duration of that transfer
	Sleep   Sleep
}

// Sleep is the sleep mode of a rank. A rank that sleeps answers no request until it is woken.
type Sleep uint8

// The sleep modes.
const (
	SleepUnknown Sleep = iota // the engine reports none
	Awake
	Asleep
	Discarded // asleep without its weights
)

func (s Sleep) asleep() bool { return s >= Asleep }

// Whole is the rank of a report about all ranks together.
const Whole = -1

// maxRanks bounds the rank numbers that are accepted.
const maxRanks = 4096

// errNoLoad reports that an answer contains no load.
var errNoLoad = errors.New("the engine reports no load")

// statusError reports that an engine answered with an error status.
type statusError struct {
	path   string
	status int
}

func (e *statusError) Error() string {
	return fmt.Sprintf("%s answered with status %d", e.path, e.status)
}

// rank returns the entry of rank n and creates the entry if necessary. It returns nil for
// a number outside the limits.
func (a *Answer) rank(n int) *Rank {
	for i := range a.Ranks {
		if a.Ranks[i].Rank == n {
			return &a.Ranks[i]
		}
	}
	if n < Whole || n >= maxRanks {
		return nil
	}
	a.Ranks = append(a.Ranks, Rank{Rank: n, Report: load.Report{Queued: -1}})
	return &a.Ranks[len(a.Ranks)-1]
}

// sum returns the total load of all ranks. Usage is the mean.
func sum(ranks []Rank) load.Report {
	var all load.Report
	for _, r := range ranks {
		all.Running += r.Running
		all.Waiting += r.Waiting
		all.Tokens += r.Tokens
		all.Capacity += r.Capacity
		all.Usage += r.Usage / float32(len(ranks))
		if r.Queued < 0 || all.Queued < 0 {
			all.Queued = -1
		} else {
			all.Queued += r.Queued
		}
	}
	if len(ranks) == 1 {
		all.Adapters = ranks[0].Adapters
	}
	return all
}

// share divides a report about all ranks into nearly equal parts, and returns part n.
// ranks is the number of parts. Usage is not divided.
func (r Rank) share(n, ranks int) load.Report {
	part := r.Report
	part.Adapters = load.Adapters{} // of an unknown rank
	part.Running = int32(piece(int64(r.Running), n, ranks))
	part.Waiting = int32(piece(int64(r.Waiting), n, ranks))
	part.Tokens = piece(r.Tokens, n, ranks)
	part.Capacity = piece(r.Capacity, n, ranks)
	if r.Queued >= 0 {
		part.Queued = piece(r.Queued, n, ranks)
	}
	return part
}

// piece divides total into nearly equal parts and returns part n, counted from 0.
func piece(total int64, n, parts int) int64 {
	p := total / int64(parts)
	if int64(n) < total%int64(parts) {
		p++
	}
	return p
}

// requests converts an engine's number of requests. The bound ensures that the sum of all
// ranks fits into an int32.
func requests(x float64) int32 { return int32(bounded(x, 1<<18)) }

// tokens converts a number of tokens.
func tokens(x float64) int64 { return int64(bounded(x, 1<<40)) }

// portion converts a fraction from 0 to 1.
func portion(x float64) float32 { return float32(bounded(x, 1)) }

// bounded limits x to the range from 0 to most, and converts NaN to 0.
func bounded(x, most float64) float64 {
	if math.IsNaN(x) {
		return 0
	}
	return min(most, max(0, x))
}
