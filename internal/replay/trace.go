package replay

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// Line is one request of a trace: a line of JSON in the form of the Mooncake
// traces (kvcache-ai/Mooncake, FAST25-release), of which a recording of the
// proxy is a superset. There is no text in it.
type Line struct {
	Timestamp    float64 `json:"timestamp"`     // ms since the trace began
	InputLength  int     `json:"input_length"`  // tokens of the prompt
	OutputLength int     `json:"output_length"` // tokens of the answer
	// HashIDs has one id for each block of the prompt, including a partial last
	// one. An id stands for the block together with all blocks before it.
	HashIDs []uint64 `json:"hash_ids"`
	// Conversation is the client's id, hashed; "" if the client sent none.
	// Mooncake's traces do not have it.
	Conversation string `json:"conversation,omitempty"`
}

// Trace is a recorded load.
type Trace struct {
	Name     string
	Requests []Request // by arrival
	Blocks   int       // of all prompts
	// IdealHitRatio is the share of Blocks whose id occurred in an earlier
	// line: the hit ratio of one unlimited cache.
	IdealHitRatio float64
	// Uneven is the number of lines in which the number of ids differs from
	// that of the prompt's blocks: the trace has blocks of another size.
	Uneven int
}

// Request is one line in the form for playing.
type Request struct {
	Line
	Arrival time.Duration // as recorded
	Ideal   int           // number of leading blocks that occurred in an earlier line
}

// Limits of the input: a line with millions of blocks, prompts and answers of a
// billion tokens, a trace of thirty years.
const (
	maxLine   = 64 << 20
	maxTokens = 1e9
	maxMillis = 1e12
)

// ReadTrace reads lines of JSON with blocks of blockTokens tokens. An error
// names the line.
func ReadTrace(name string, r io.Reader, blockTokens int) (*Trace, error) {
	t := &Trace{Name: name}
	seen := make(map[uint64]bool)
	known := 0
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for n := 1; lines.Scan(); n++ {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var q Request
		if err := json.Unmarshal(lines.Bytes(), &q.Line); err != nil {
			return nil, fmt.Errorf("read trace: line %d: %w", n, err)
		}
		if q.InputLength < 1 || q.InputLength > maxTokens || q.OutputLength < 0 || q.OutputLength > maxTokens || !(q.Timestamp >= 0 && q.Timestamp <= maxMillis) {
			return nil, fmt.Errorf("read trace: line %d: input_length %d, output_length %d, timestamp %v", n, q.InputLength, q.OutputLength, q.Timestamp)
		}
		q.OutputLength = max(1, q.OutputLength)
		q.Arrival = time.Duration(q.Timestamp * float64(time.Millisecond))
		whole := q.InputLength / blockTokens
		if blocks := len(q.HashIDs); blocks != whole && blocks != (q.InputLength+blockTokens-1)/blockTokens {
			t.Uneven++
		}
		known += t.add(q, seen)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read trace: %w", err)
	}
	if len(t.Requests) == 0 {
		return nil, errors.New("read trace: no requests")
	}
	t.count(known)
	slices.SortStableFunc(t.Requests, func(a, b Request) int { return cmp.Compare(a.Arrival, b.Arrival) })
	return t, nil
}

// add appends a request and returns how many of its blocks are in seen, which
// are those of earlier requests. It adds its own blocks to seen.
func (t *Trace) add(q Request, seen map[uint64]bool) (known int) {
	q.Ideal = 0
	leading := true
	for _, id := range q.HashIDs {
		if seen[id] {
			known++
		} else {
			leading = false
		}
		if leading {
			q.Ideal++
		}
	}
	for _, id := range q.HashIDs {
		seen[id] = true
	}
	t.Blocks += len(q.HashIDs)
	t.Requests = append(t.Requests, q)
	return known
}

// count sets the ideal hit ratio from the number of known blocks.
func (t *Trace) count(known int) {
	if t.Blocks > 0 {
		t.IdealHitRatio = float64(known) / float64(t.Blocks)
	}
}

// uncached returns the number of the prompt's tokens to compute when that many
// leading blocks are held: at least one, from which the first token comes.
func (q *Request) uncached(held, blockTokens int) int {
	return max(1, q.InputLength-held*blockTokens)
}

// whole returns the number of the prompt's ids that stand for whole blocks:
// those that a proxy can know.
func (q *Request) whole(blockTokens int) int {
	return min(len(q.HashIDs), q.InputLength/blockTokens)
}
