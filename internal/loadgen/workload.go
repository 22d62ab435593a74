package loadgen

import (
	"math/rand/v2"
	"strings"
	"time"
)

// workload determines the requests of a run. The numbers of conversations and of requests begin at
// 0. Several goroutines call its methods at the same time.
type workload interface {
	conversations() int
	// turns returns the number of requests of a conversation.
	turns(conversation int) int
	task(conversation, turn int) task
	// warmUp returns a request whose prompt shares no block with measured requests.
	warmUp(n int) task
	// arrivals returns the times at which conversations begin, since the run began; nil:
	// one begins when another ends.
	arrivals() []time.Duration
}

// task is one request before it is sent.
type task struct {
	number, conversation, turn int
	prompt                     prompt
	tokens                     int  // most tokens of the answer
	exact                      bool // the answer has exactly that many
	session                    string
	keep                       bool // the text of the answer is needed
}

// prompt is the new text of a request, or its token ids.
type prompt struct {
	text string
	ids  []uint32
}

// newWorkload returns the workload of a configuration.
func newWorkload(c *Config) workload {
	if c.Trace != nil {
		return newTraced(c)
	}
	return &random{c}
}

// random is a workload of prompts of random words.
type random struct{ c *Config }

func (w *random) perConversation() int { return max(1, w.c.Turns) }

func (w *random) conversations() int {
	return (w.c.Requests + w.perConversation() - 1) / w.perConversation()
}

// turns returns fewer turns for the last conversation, so that the number of requests is
// exact.
func (w *random) turns(conversation int) int {
	return min(w.perConversation(), w.c.Requests-conversation*w.perConversation())
}

func (w *random) task(conversation, turn int) task {
	number := conversation*w.perConversation() + turn
	t := task{number: number, conversation: conversation, turn: turn, tokens: w.c.MaxTokens, exact: w.c.IgnoreEOS}
	if turn == 0 {
		t.prompt.text = w.first(number)
		return t
	}
	var b strings.Builder
	text(&b, rand.New(rand.NewPCG(w.c.Seed, 3+uint64(number))), w.c.TurnWords)
	t.prompt.text = strings.TrimSpace(b.String())
	return t
}

func (w *random) arrivals() []time.Duration {
	if w.c.Rate <= 0 {
		return nil
	}
	return poisson(w.conversations(), w.c.Rate/float64(w.perConversation()), w.c.Seed)
}

// firstWarmUp is the number of the first request that is not measured. Its prompt differs
// from those of all measured requests, so that it does not bring them into a cache.
const firstWarmUp = 1 << 40

func (w *random) warmUp(n int) task {
	return task{number: firstWarmUp + n, prompt: prompt{text: w.first(firstWarmUp + n)}, tokens: w.c.MaxTokens, exact: w.c.IgnoreEOS}
}

// first returns the first prompt of a conversation, which begins with request n.
func (w *random) first(n int) string {
	shared := min(w.c.Shared, w.c.PromptWords)
	var b strings.Builder
	text(&b, rand.New(rand.NewPCG(w.c.Seed, 2)), shared)
	text(&b, rand.New(rand.NewPCG(w.c.Seed, 3+uint64(n))), w.c.PromptWords-shared)
	return strings.TrimSpace(b.String())
}

// words are short words; each is a token for most tokenizers.
var words = strings.Fields("the of and to in is that it was for on are with as his they at be this from have or by one had not but what all were when we there can an your which their said if do will each about how up out them then she many some so these would other into has more her two like him see time could no make than first been its who now people my made over did down only way find use may water long little very after called just where most know")

// text writes that many random words.
func text(b *strings.Builder, of *rand.Rand, count int) {
	for range count {
		b.WriteString(words[of.IntN(len(words))])
		b.WriteByte(' ')
	}
}
