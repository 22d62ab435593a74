package loadgen

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/internal/replay"
)

// IDRange holds the token ids from First to Last, both included. Ids of this range must
// be valid and ordinary in the model's vocabulary.
type IDRange struct{ First, Last uint32 }

// DefaultIDs are ordinary tokens of most vocabularies.
var DefaultIDs = IDRange{1000, 2023}

// ParseIDRange reads FIRST-LAST.
func ParseIDRange(text string) (IDRange, error) {
	a, b, ok := strings.Cut(text, "-")
	first, err1 := strconv.ParseUint(a, 10, 31)
	last, err2 := strconv.ParseUint(b, 10, 31)
	if !ok || err1 != nil || err2 != nil || last < first+1 {
		return IDRange{}, fmt.Errorf("%q is not FIRST-LAST with at least two token ids", text)
	}
	return IDRange{uint32(first), uint32(last)}, nil
}

func (r IDRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// traced is a workload in which blocks of prompts are equal exactly where the ids of the
// trace are equal. An id stands for a block together with all blocks before it, so the
// text of a block depends on its id alone.
type traced struct {
	c     *Config
	count int
}

func newTraced(c *Config) *traced {
	w := &traced{c: c, count: len(c.Trace.Requests)}
	if c.Requests > 0 {
		w.count = min(w.count, c.Requests)
	}
	return w
}

// MeanBlock returns the mean number of tokens of a block of a trace: at least 1. It is for
// recordings whose blocks were counted in text and not in tokens.
func MeanBlock(t *replay.Trace) int {
	tokens, blocks := 0, 0
	for i := range t.Requests {
		if n := len(t.Requests[i].HashIDs); n > 0 {
			tokens, blocks = tokens+t.Requests[i].InputLength, blocks+n
		}
	}
	return max(1, tokens/max(1, blocks))
}

func (w *traced) conversations() int { return w.count }

// turns returns 1: the trace has the times of all requests, and its ids say which prompts
// continue which.
func (w *traced) turns(int) int { return 1 }

func (w *traced) arrivals() []time.Duration {
	speed := w.c.Speed
	if speed == 0 {
		speed = 1
	}
	times := make([]time.Duration, w.count)
	for n := range times {
		times[n] = time.Duration(float64(w.c.Trace.Requests[n].Arrival-w.c.Trace.Requests[0].Arrival) / speed)
	}
	return times
}

func (w *traced) task(conversation, _ int) task {
	q := &w.c.Trace.Requests[conversation]
	t := task{number: conversation, conversation: conversation, tokens: q.OutputLength, exact: true, session: q.Conversation}
	t.prompt = w.prompt(q.HashIDs, q.InputLength, uint64(conversation))
	return t
}

func (w *traced) warmUp(n int) task {
	return task{number: firstWarmUp + n, tokens: 16, exact: true, prompt: w.prompt(nil, w.c.BlockTokens, firstWarmUp+uint64(n))}
}

// prompt returns a prompt of length tokens. Its blocks are those of ids, the last one may
// be partial. Tokens after the blocks of ids are the request's own.
func (w *traced) prompt(ids []uint64, length int, number uint64) prompt {
	s := speller{ids: w.c.TokenIDs, asIDs: w.c.API == APICompletions}
	left := length
	for _, id := range ids {
		n := min(left, w.c.BlockTokens)
		s.block(mix(id^mix(w.c.Seed)), n)
		left -= n
	}
	s.block(mix(number^mix(w.c.Seed+1)), left)
	return s.prompt()
}

// speller writes the blocks of one prompt, as token ids or as words.
type speller struct {
	ids   IDRange
	asIDs bool
	out   prompt
	text  strings.Builder
}

// block writes n tokens. The first ones spell the value, so that blocks of different
// values differ within them: 7 tokens of 1024 ids, or 10 words.
func (s *speller) block(value uint64, n int) {
	letters := uint64(len(words))
	if s.asIDs {
		letters = uint64(s.ids.Last-s.ids.First) + 1
	}
	rest, filler := value, value
	for range n {
		if rest == 0 {
			filler = mix(filler)
			rest = filler
		}
		digit := rest % letters
		rest /= letters
		if s.asIDs {
			s.out.ids = append(s.out.ids, s.ids.First+uint32(digit))
			continue
		}
		s.text.WriteString(words[digit])
		s.text.WriteByte(' ')
	}
}

func (s *speller) prompt() prompt {
	s.out.text = strings.TrimSpace(s.text.String())
	return s.out
}

// mix returns a value that looks random; different values have different results
// (the end of SplitMix64).
func mix(v uint64) uint64 {
	v += 0x9e3779b97f4a7c15
	v = (v ^ v>>30) * 0xbf58476d1ce4e5b9
	v = (v ^ v>>27) * 0x94d049bb133111eb
	return v ^ v>>31
}
