package replay

import (
	"math/rand/v2"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/leastload"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/state/load"
	"github.com/pdproxy/pdproxy/proxy/state/predict"
)

// Placer is a place policy. One goroutine at a time calls Place. When ok is
// false it has no decision, and a built-in rule decides.
type Placer interface {
	Place(*abi.PlaceFacts) (d abi.PlaceDecision, ok bool)
	Needs() abi.Needs
}

// epoch is virtual time 0 for packages that need a date.
var epoch = time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)

// usualAnswer is the number of tokens that the coordinator expects of a request
// without a limit.
const usualAnswer = 512

// target is the proxy's knowledge of one candidate.
type target struct {
	facts abi.Candidate
	load  load.Counter
	slot  kvindex.Target
	usage float32    // as polled
	said  abi.Detail // as polled
	queue predict.Target
}

// view is the proxy's knowledge during a trace, and the memory of one
// placement. Target i is row i of every placement: the prefill ranks, then the
// decode instances.
type view struct {
	cfg           *Config
	targets       []target
	conversations *conversation.Table
	begun         conversation.Begun
	index         *kvindex.Index
	matches       []kvindex.Match
	transfers     []load.Speed // by prefill rank and decode instance
	toAny         []load.Speed // by prefill rank
	random        *rand.Rand

	// The models of the two types of engines, and the predictions and times to first
	// token of requests that had a prediction.
	prefill, decode predict.Engine
	predicted       predicted
	scored          scoreTally

	facts     abi.PlaceFacts
	sequence  [2]uint64 // of first turns, and of other turns
	fallbacks int
	deciding  time.Duration // real time
}

func newView(cfg *Config) *view {
	v := &view{
		cfg: cfg, conversations: conversation.New(0), index: kvindex.New(kvindex.Options{}),
		random: rand.New(rand.NewPCG(cfg.Seed, 0)),
	}
	ranks := cfg.Prefill * cfg.Ranks
	v.targets = make([]target, ranks+cfg.Decode)
	v.transfers, v.toAny = make([]load.Speed, ranks*cfg.Decode), make([]load.Speed, ranks)
	for i := range v.targets {
		c := abi.Candidate{Instance: uint32(1 + i/cfg.Ranks), Rank: int32(i % cfg.Ranks), Group: 1, Roles: abi.RolePrefill}
		if i >= ranks {
			c.Instance, c.Rank, c.Roles = uint32(1+cfg.Prefill+i-ranks), 0, abi.RoleDecode
		}
		c.BlockTokens = uint32(cfg.BlockTokens)
		v.targets[i].said = abi.Detail{Weight: 1, Running: -1, Waiting: -1}
		v.targets[i].facts, v.targets[i].slot = c, v.index.Add()
	}
	v.matches = make([]kvindex.Match, v.index.Targets())
	return v
}

// lease is the state that a placement holds until its end.
type lease struct {
	prefill, decode int // rows
	chain           []kvindex.Hash
	holdPrefill     load.Hold
	holdDecode      load.Hold
	prompt          *predict.Prefill // nil: the policy needs no predictions
	stream          *predict.Stream
	placed          time.Duration
}

// place lets p choose the targets of a request and commits the decision.
func (v *view) place(p Placer, q *Request, now time.Duration) lease {
	began := time.Now()
	l := lease{chain: chain(q.HashIDs[:q.whole(v.cfg.BlockTokens)]), placed: now}
	turn := v.conversations.Look(conversation.Query{ID: q.Conversation, Chain: l.chain})
	needs := p.Needs()
	v.fill(needs, q, &l, &turn, now)
	d, ok := p.Place(&v.facts)
	v.deciding += time.Since(began)
	if !ok || !v.facts.Allows(d) {
		v.fallbacks++
		d = leastload.Place(&v.facts)
	} else {
		v.scored.add(&v.facts, d)
	}
	if needs&abi.NeedPredictions != 0 {
		v.follow(q, &l, d, now)
	}
	v.commit(q, &l, &turn, d, now)
	return l
}

// fill writes the facts of a request into v.facts.
func (v *view) fill(needs abi.Needs, q *Request, l *lease, turn *conversation.Turn, now time.Duration) {
	f := &v.facts
	*f = abi.PlaceFacts{
		Request: abi.RequestFacts{PromptTokens: int64(q.InputLength), MaxTokens: -1, N: 1, Stream: true, Model: v.cfg.Model.Name},
		Flow:    abi.FlowPrefillFirst, Fixed: -1,
		Candidates: f.Candidates[:0], Pairs: f.Pairs[:0], Predictions: f.Predictions[:0], Details: f.Details[:0], Scores: f.Scores[:0],
		Random: v.random.Uint64(),
	}
	// First turns are counted separately, so that a policy can spread them evenly.
	sequence := &v.sequence[1]
	if needs&abi.NeedConversation != 0 && turn.Number == 1 {
		sequence = &v.sequence[0]
	}
	f.Sequence = *sequence
	*sequence++
	if needs&abi.NeedConversation != 0 {
		f.Request.Conversation, f.Request.Turn = string(turn.Key.AppendText(nil)), turn.Number
	}
	clear(v.matches)
	if needs&abi.NeedBlocks != 0 {
		v.index.Match(l.chain, v.matches)
		if needs&abi.NeedConversation != 0 && turn.Begins() {
			f.Request.Shared = v.begun.Add(v.beginning(l.chain))
		}
	}
	for i := range v.targets {
		t := &v.targets[i]
		c, carries := t.facts, t.load.View(epoch.Add(now))
		c.Requests, c.Tokens, c.TokenMicros, c.Usage = carries.Requests, carries.Tokens, carries.PrefillMicros, t.usage
		if needs&abi.NeedBlocks != 0 {
			m := v.matches[t.slot]
			c.Queued, c.BlocksGPU, c.BlocksCPU, c.BlocksDisk = carries.Queued, m.GPU, m.CPU, m.Disk
			c.RecentTokens, c.RecentRequests, c.Busy = t.load.Recent(epoch.Add(now))
		}
		if needs&abi.NeedConversation != 0 {
			at := conversation.Target{Instance: c.Instance, Rank: c.Rank}
			if at == turn.Prefill {
				c.Home |= abi.RolePrefill
			}
			if at == turn.Decode {
				c.Home |= abi.RoleDecode
			}
		}
		f.Candidates = append(f.Candidates, c)
		if needs&abi.NeedDetails != 0 {
			f.Details = append(f.Details, t.said)
		}
		if needs&abi.NeedPredictions != 0 {
			f.Predictions = append(f.Predictions, t.queue.Predict(v.engine(i), c.Roles, promptOf(q, &c), streamsOf(&c), epoch.Add(now)))
		}
	}
	if needs&abi.NeedPairs != 0 {
		ranks := len(v.targets) - v.cfg.Decode
		for i := range v.transfers {
			pair := abi.Pair{
				Prefill: int32(i / v.cfg.Decode), Decode: int32(ranks + i%v.cfg.Decode),
				State: abi.PairReady, TransferMicros: v.transfers[i].PerToken(),
			}
			if pair.TransferMicros == 0 {
				pair.TransferMicros = v.toAny[pair.Prefill].PerToken()
			}
			f.Pairs = append(f.Pairs, pair)
		}
	}
}

// beginning returns the last block of the longest part of the chain that a target holds, as the
// coordinator does.
func (v *view) beginning(chain []kvindex.Hash) kvindex.Hash {
	blocks := uint32(0)
	for _, m := range v.matches {
		blocks = max(blocks, m.Blocks())
	}
	if blocks == 0 {
		return 0
	}
	return chain[blocks-1]
}

func (v *view) commit(q *Request, l *lease, turn *conversation.Turn, d abi.PlaceDecision, now time.Duration) {
	l.prefill, l.decode = int(d.Prefill), int(d.Decode)
	p, t := &v.targets[l.prefill], &v.targets[l.decode]
	prompt := int64(q.InputLength)
	uncached := max(0, prompt-v.facts.Candidates[d.Prefill].Matched())
	p.load.Placed(uncached, epoch.Add(now))
	l.holdPrefill = p.load.HoldPrefill(prompt, uncached)
	l.holdDecode = t.load.Hold(prompt + usualAnswer)
	v.index.Expect(p.slot, l.chain, epoch.Add(now))
	v.index.Expect(t.slot, l.chain, epoch.Add(now))
	v.conversations.Record(*turn,
		conversation.Target{Instance: p.facts.Instance, Rank: p.facts.Rank},
		conversation.Target{Instance: t.facts.Instance, Rank: t.facts.Rank}, epoch.Add(now))
}

// prefilled records that prefill has answered.
func (v *view) prefilled(l *lease, now time.Duration) {
	if l.prompt != nil {
		l.prompt.Done(epoch.Add(now))
	}
	work := l.holdPrefill.Work
	l.holdPrefill.Drop()
	v.targets[l.prefill].load.Prefill.Measure(work, now-l.placed)
}

// streaming records decode's first token and its delay after prefill's answer.
func (v *view) streaming(l *lease, prompt int, took, first time.Duration) {
	if l.stream != nil {
		v.predicted.add(l, first)
		l.stream.Started(took)
	}
	ranks := len(v.targets) - v.cfg.Decode
	v.transfers[l.prefill*v.cfg.Decode+l.decode-ranks].Measure(int64(prompt), took)
	v.toAny[l.prefill].Measure(int64(prompt), took)
}

// finished records the end of the answer.
func (v *view) finished(l *lease, tokens int, took time.Duration) {
	if l.stream != nil {
		t := v.targets[l.decode].load.View(epoch)
		v.decode.Streamed(predict.Streams{Requests: int64(t.Requests), Tokens: t.Decode}, int64(tokens), took)
	}
	l.holdDecode.Drop()
}

// stored handles a rank's event of filled blocks, evicted its event of dropped
// ones.
func (v *view) stored(row int, chain []kvindex.Hash) {
	if len(chain) > 0 {
		v.index.Store(v.targets[row].slot, kvindex.GPU, chain)
	}
}

func (v *view) evicted(row int, ids []uint64) {
	if len(ids) > 0 {
		v.index.Remove(v.targets[row].slot, kvindex.GPU, chain(ids))
	}
}

// chain returns the hashes by which the proxy knows blocks: the trace's ids,
// spread as a hash would be (the last step of SplitMix64; the low bits of a
// kvindex.Hash are zero).
func chain(ids []uint64) []kvindex.Hash {
	hashes := make([]kvindex.Hash, len(ids))
	for i, x := range ids {
		x += 0x9e3779b97f4a7c15
		x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
		x = (x ^ x>>27) * 0x94d049bb133111eb
		hashes[i] = kvindex.Hash((x ^ x>>31) &^ 7)
	}
	return hashes
}
