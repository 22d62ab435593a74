package replay

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// variants make other traces from the conversations of one, by kind. Their
// result is not ordered.
var variants = map[string]func(*source) []Request{
	"resampled": (*source).resampled,
	"shifted":   (*source).shifted,
	"thinned":   (*source).thinned,
	"bursty":    (*source).bursty,
	"joined":    (*source).joined,
	"mixed":     (*source).mixed,
}

// Variants are the kinds of traces that Vary makes, by name:
//
//   - bursty: every conversation, with arrivals in four waves between 0.3 and 1.7
//     times the mean rate;
//   - joined: the conversations of two resampled traces;
//   - mixed: half of the conversations, drawn with replacement, and as many tokens
//     of agents whose sessions share the prompts of their tools;
//   - resampled: conversations drawn with replacement, each moved by up to a tenth
//     of the trace's time;
//   - shifted: every conversation, begun at another time;
//   - thinned: half of the conversations.
func Variants() []string { return slices.Sorted(maps.Keys(variants)) }

// Vary makes another trace from the conversations of t. The same trace, kind, seed and number of
// tokens of a block give the same result. The error reports that there is no such kind.
func Vary(t *Trace, kind string, seed uint64, blockTokens int) (*Trace, error) {
	vary, ok := variants[kind]
	if !ok {
		return nil, fmt.Errorf("vary trace: no variant is named %q; the variants are %s", kind, strings.Join(Variants(), ", "))
	}
	s := newSource(t, rand.New(rand.NewPCG(seed, 14)), blockTokens)
	requests := vary(s)
	slices.SortStableFunc(requests, func(a, b Request) int { return cmp.Compare(a.Arrival, b.Arrival) })
	v := &Trace{Name: fmt.Sprintf("%s %d", kind, seed)}
	seen, known := make(map[uint64]bool), 0
	for _, q := range requests {
		known += v.add(q, seen)
	}
	v.count(known)
	return v, nil
}

// source holds the conversations from which traces are made.
type source struct {
	random        *rand.Rand
	blockTokens   int
	span          time.Duration
	conversations [][]Request // each in order of arrival
	shared        map[uint64]bool
	copies        uint64
}

// maxTurns is the largest number of requests of one conversation that share a
// block. A block of more requests is a prefix that conversations share.
const maxTurns = 64

// newSource finds the conversations of a trace: a request belongs to the
// conversation whose blocks it continues furthest.
func newSource(t *Trace, random *rand.Rand, blockTokens int) *source {
	s := &source{random: random, blockTokens: blockTokens, shared: sharedBlocks(t)}
	s.span = t.Requests[len(t.Requests)-1].Arrival - t.Requests[0].Arrival
	of := make(map[uint64]int) // conversation of each block
	for _, q := range t.Requests {
		q.Arrival -= t.Requests[0].Arrival
		n := len(s.conversations)
		for i := len(q.HashIDs) - 1; i >= 0; i-- {
			if at, ok := of[q.HashIDs[i]]; ok {
				n = at
				break
			}
		}
		if n == len(s.conversations) {
			s.conversations = append(s.conversations, nil)
		}
		s.conversations[n] = append(s.conversations[n], q)
		for _, id := range q.HashIDs {
			if _, ok := of[id]; !ok && !s.shared[id] {
				of[id] = n
			}
		}
	}
	return s
}

// begin returns the time at which a conversation begins.
func begin(conversation []Request) time.Duration { return conversation[0].Arrival }

// drawn draws that many conversations with replacement. Each is a copy with
// blocks of its own, moved by up to a tenth of the span.
func (s *source) drawn(n int) (requests []Request) {
	for range n {
		c := s.conversations[s.random.IntN(len(s.conversations))]
		by := time.Duration((s.random.Float64()*2 - 1) * 0.1 * float64(s.span))
		requests = append(requests, s.copied(c, begin(c)+by)...)
	}
	return requests
}

// copied returns a conversation that begins at another time and has blocks of
// its own, except the shared ones. Requests after the span wrap around to its
// begin, so that the rate is even.
func (s *source) copied(conversation []Request, at time.Duration) (requests []Request) {
	s.copies++
	length := conversation[len(conversation)-1].Arrival - begin(conversation)
	if room := s.span - length; room > 0 {
		at = ((at % room) + room) % room
	} else {
		at = 0
	}
	for _, q := range conversation {
		q.Arrival += at - begin(conversation)
		ids := make([]uint64, len(q.HashIDs))
		for i, id := range q.HashIDs {
			if ids[i] = id; !s.shared[id] {
				ids[i] = own(s.copies, id)
			}
		}
		q.HashIDs = ids
		requests = append(requests, q)
	}
	return requests
}

// own returns the id of a copy's block.
func own(copied, id uint64) uint64 { return id ^ copied*0x9e3779b97f4a7c15 }

func (s *source) resampled() []Request { return s.drawn(len(s.conversations)) }

func (s *source) joined() []Request { return s.drawn(2 * len(s.conversations)) }

func (s *source) shifted() (requests []Request) {
	for _, c := range s.conversations {
		requests = append(requests, s.copied(c, time.Duration(s.random.Int64N(int64(s.span)+1)))...)
	}
	return requests
}

func (s *source) thinned() (requests []Request) {
	for _, c := range s.conversations {
		if s.random.IntN(2) == 0 {
			requests = append(requests, c...)
		}
	}
	return requests
}

func (s *source) bursty() (requests []Request) {
	const waves, depth = 4, 0.7
	phase := s.random.Float64() * 2 * math.Pi
	for _, c := range s.conversations {
		for _, q := range c {
			x := 2 * math.Pi * waves * float64(q.Arrival) / float64(s.span)
			moved := depth * (math.Sin(x+phase) - math.Sin(phase)) / (2 * math.Pi * waves)
			q.Arrival += time.Duration(moved * float64(s.span))
			requests = append(requests, q)
		}
	}
	return requests
}

func (s *source) mixed() []Request {
	requests, tokens := s.drawn(len(s.conversations)/2), 0
	for i := range requests {
		tokens += requests[i].InputLength
	}
	for tokens > 0 {
		for _, q := range s.agent() {
			requests = append(requests, q)
			tokens -= q.InputLength
		}
	}
	return requests
}

// agent returns the session of an agent: the prompt of one of a hundred tools,
// a few of which are in most sessions, and some turns, each of which adds a
// tool's text. The numbers are close to those of Mooncake's trace of tools and
// agents: prompts of 8,600 tokens, of which 59 % are known.
func (s *source) agent() (requests []Request) {
	const tools = 100
	tool := uint64(math.Pow(tools, s.random.Float64())) // Zipf's law, with exponent 1
	prompt := int(3+tool*7%12) * s.blockTokens
	tokens := prompt + int(s.random.ExpFloat64()*4*float64(s.blockTokens)) + 1
	at := time.Duration(s.random.Float64() * float64(s.span))
	s.copies++
	for range 1 + int(s.random.ExpFloat64()*1.5) {
		output := 1 + int(s.random.ExpFloat64()*180)
		ids := make([]uint64, (tokens+s.blockTokens-1)/s.blockTokens)
		for i := range ids {
			copied, block := s.copies, uint64(i)
			if (i+1)*s.blockTokens <= prompt {
				copied = 0
			}
			if (i+1)*s.blockTokens > tokens {
				block |= uint64(tokens) << 8 // the next turn has more tokens in this block, so another id
			}
			ids[i] = own(copied, 1<<62|tool<<32|block)
		}
		if tokens > 64*1024 || at > s.span {
			break
		}
		requests = append(requests, Request{
			Line:    Line{Timestamp: millis(at), InputLength: tokens, OutputLength: output, HashIDs: ids},
			Arrival: at,
		})
		tokens += output + int(s.random.ExpFloat64()*3*float64(s.blockTokens))
		at += time.Duration((10 + s.random.ExpFloat64()*20) * float64(time.Second))
	}
	return requests
}
