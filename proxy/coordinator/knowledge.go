package coordinator

import (
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/indexcheck"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// State is the knowledge of a Local beside the loads. If a field is nil, the policies do
// not get its facts.
type State struct {
	Index         *kvindex.Index // the same as the registry's
	Conversations *conversation.Table
	Trust         *indexcheck.Check
}

// Key identifies a prompt among earlier ones: its blocks in each form that Cut requested, and its
// conversation. Place sets the scope of the conversation.
type Key struct {
	Conversation conversation.Query
	Chains       []Chain
}

// Chain is the complete blocks of a prompt in one form.
type Chain struct {
	Form   kvindex.Form
	Blocks []kvindex.Hash
}

// TextForm is the form for instances whose events do not show their blocks. The proxy only has a
// record of the texts that it sent to these instances.
var TextForm = kvindex.Form{Block: 512, Text: true}

// bytesPerToken is the assumed size of a token in bytes of text.
const bytesPerToken = 4

// Cut is the way to cut the prompts for a model into blocks.
type Cut struct {
	// Model and LoRA seed the chains as the engines' events do: the first model of an
	// engine is its base model, the others are adapters.
	Model, LoRA string
	Forms       []kvindex.Form
}

// Cut fills in c for a model; "": the client named none. Forms stays empty if no policy
// needs blocks.
func (l *Local) Cut(c *Cut, model string) { l.CutFor(c, model, l.Demand()) }

// Demand lists the facts of a request that a coordinator needs.
type Demand struct {
	Needs   abi.Needs // of its policies
	Headers []string  // names of request headers that they declare
	Index   bool      // it has an index of KV blocks
}

// Equal reports whether two demands are the same.
func (d *Demand) Equal(other *Demand) bool {
	return d.Needs == other.Needs && d.Index == other.Index && slices.Equal(d.Headers, other.Headers)
}

// Demand returns the present demand of this coordinator.
func (l *Local) Demand() Demand {
	d := *l.decider.Load()
	return Demand{Needs: d.Needs(), Headers: d.Headers(), Index: l.state.Index != nil}
}

// adapterOf returns the model of a pool, and the LoRA adapter that the pool serves under a
// model's name; "": none. The first model of an engine is the base of its adapters.
func adapterOf(pool *engine.Pool) (model, adapter string) {
	if len(pool.Ready) > 0 {
		if base := pool.Ready[0].Models()[0]; base != pool.Model {
			return base, pool.Model
		}
	}
	return pool.Model, ""
}

// CutFor is Cut for a coordinator with that demand.
func (l *Local) CutFor(c *Cut, model string, d Demand) {
	c.Model, c.LoRA, c.Forms = "", "", c.Forms[:0]
	pool, err := resolve(l.registry.Snapshot(), model)
	if err != nil || len(pool.Ready) == 0 {
		return
	}
	c.Model, c.LoRA = adapterOf(pool)
	if d.Needs&abi.NeedConversation != 0 {
		c.Forms = append(c.Forms, TextForm)
	}
	if d.Needs&abi.NeedBlocks != 0 && d.Index {
		for i := range pool.Ready {
			i := pool.Ready[i].Instance
			c.Forms = withForm(c.Forms, formOf(i))
			if i.Publishes() && !i.Events() && i.BlockTokens() > 0 { // the first event may arrive before the placement
				c.Forms = withForm(c.Forms, kvindex.Form{Block: i.BlockTokens()})
			}
		}
	}
}

func withForm(forms []kvindex.Form, f kvindex.Form) []kvindex.Form {
	for _, known := range forms {
		if known == f {
			return forms
		}
	}
	return append(forms, f)
}

// formOf returns the form of an instance's blocks: that of its events, once an event has
// arrived.
func formOf(i *engine.Instance) kvindex.Form {
	if i.Events() {
		return kvindex.Form{Block: i.BlockTokens()}
	}
	return TextForm
}

// TextBlocks returns the number of TextForm blocks in that many tokens.
func TextBlocks(tokens int) int { return tokens / TokensOf(TextForm) }

// TokensOf returns the number of tokens in a block of the form.
func TokensOf(f kvindex.Form) int {
	if f.Text {
		return f.Block / bytesPerToken
	}
	return f.Block
}

// matches has the blocks of one chain that each target holds, by its slot in the index.
type matches struct {
	Chain
	of []kvindex.Match
}

// match looks up the request's chains for all targets.
func (t *table) match(x *kvindex.Index, chains []Chain) {
	n := x.Targets()
	for len(t.matches) < len(chains) {
		t.matches = append(t.matches, matches{})
	}
	t.matched = t.matches[:len(chains)]
	for i := range chains {
		m := &t.matched[i]
		m.Chain = chains[i]
		if cap(m.of) < n {
			m.of = make([]kvindex.Match, n, 2*n)
		}
		m.of = m.of[:n]
		x.Match(m.Blocks, m.of)
	}
}

// beginning returns the last block of the longest part of the prompt that a target holds; 0: no
// target holds a part.
func (t *table) beginning() (end kvindex.Hash) {
	most := 0 // tokens
	for i := range t.matched {
		m, blocks := &t.matched[i], uint32(0)
		for _, held := range m.of {
			blocks = max(blocks, held.Blocks())
		}
		if tokens := int(blocks) * TokensOf(m.Form); tokens > most {
			most, end = tokens, m.Blocks[blocks-1]
		}
	}
	return end
}

// held returns the blocks of the request that a target holds, and their chain; nil if that
// is unknown.
func (t *table) held(target engine.Target) (kvindex.Match, *Chain) {
	if len(t.matched) == 0 || len(target.KV) <= target.Rank {
		return kvindex.Match{}, nil
	}
	form, slot := formOf(target.Instance), int(target.KV[target.Rank])
	for i := range t.matched {
		m := &t.matched[i]
		if m.Form == form && slot < len(m.of) {
			return m.of[slot], &m.Chain
		}
	}
	return kvindex.Match{}, nil
}

// know writes into the row the KV that its target holds.
func (t *table) know(c *abi.Candidate, target engine.Target) {
	m, chain := t.held(target)
	if chain == nil {
		return
	}
	c.BlocksGPU, c.BlocksCPU, c.BlocksDisk = m.GPU, m.CPU, m.Disk
	c.BlockTokens = uint32(TokensOf(chain.Form))
}

// home marks in the row which phases of the conversation's last turn its target served.
func (t *table) home(c *abi.Candidate, target engine.Target) {
	if isHome(t.turn.Prefill, target) {
		c.Home |= abi.RolePrefill
	}
	if isHome(t.turn.Decode, target) {
		c.Home |= abi.RoleDecode
	}
}

func isHome(home conversation.Target, target engine.Target) bool {
	return home.Instance == target.ID && home.Rank == int32(target.Rank)
}

// homeOf converts a target for the table of conversations.
func homeOf(t engine.Target) conversation.Target {
	if t.IsZero() {
		return conversation.Target{}
	}
	return conversation.Target{Instance: t.ID, Rank: int32(t.Rank)}
}

// Computed compares the number of cached tokens that an engine reports with the index. key
// is the key of the placement.
func (l *Local) Computed(p *Placement, key *Key, prompt, cached int64) {
	l.Compare(p, p.CacheReport(key, prompt, cached))
}

// CacheReport is an engine's report about its prefix cache for one prompt.
type CacheReport struct {
	Block          int            // tokens of a block of the engine; 0: unknown
	Blocks         []kvindex.Hash // of the prompt: those that may have been cached; empty: unknown
	Prompt, Cached int64          // tokens of the prompt, and of these the cached ones
}

// CacheReport returns the report of the engine that computes p's prompt. Its Blocks
// alias those of key.
func (p *Placement) CacheReport(key *Key, prompt, cached int64) CacheReport {
	block := p.computer().BlockTokens()
	return CacheReport{Block: block, Blocks: key.reported(block, cached), Prompt: prompt, Cached: cached}
}

// computer returns the target that computes the prompt.
func (p *Placement) computer() engine.Target {
	if p.Prefill.IsZero() {
		return p.Decode
	}
	return p.Prefill
}

// reported returns the blocks that a number of cached tokens can stand for: those of the
// chain in the engine's block size.
func (k *Key) reported(block int, cached int64) []kvindex.Hash {
	for _, c := range k.Chains {
		if cached > 0 && c.Form == (kvindex.Form{Block: block}) {
			return c.Blocks[:min(int64(len(c.Blocks)), cached/int64(block)+1)]
		}
	}
	return nil
}

// Compare compares an engine's report with the state of the index at the time of the
// placement p.
func (l *Local) Compare(p *Placement, r CacheReport) {
	target := p.computer()
	if l.state.Trust == nil || p.Matched < 0 || len(target.KV) <= target.Rank || r.Block != target.BlockTokens() {
		return
	}
	slot := target.KV[target.Rank]
	o := indexcheck.Observation{
		Engine: target.Name(), Rank: target.Rank, Exact: true, Stored: l.state.Index.Counts(slot).Stored,
		Prompt: int(r.Prompt), Predicted: int(p.Matched), Reported: int(r.Cached), Block: r.Block,
	}
	if len(r.Blocks) > 0 {
		l.comparisons.compare(slot, r.Blocks, o)
		return
	}
	l.state.Trust.Observe(o)
}

// fillCosts computes the present costs of one leg and of two legs for the plan policy.
func (t *table) fillCosts(pool *engine.Pool, now time.Time) {
	f := &t.plan
	var transfer, handover mean
	f.PrefillCached, f.PrefillQueued, f.PrefillMicros = t.costs(pool.Paired, abi.RolePrefill, now, func(target engine.Target) {
		transfer.add(target.Transfers.PerToken())
		handover.add(target.Transfers.Fixed())
	})
	f.BothCached, f.BothQueued, f.BothMicros = t.costs(pool.Both, abi.RoleBoth, now, func(engine.Target) {})
	f.TransferMicros, f.HandoverMicros = transfer.of(), handover.of()
}

// costs returns, over the rows with one of the roles: the most prompt tokens that a row
// holds, the fewest tokens that wait at a row, and the mean time per token.
func (t *table) costs(rows []engine.Row, roles abi.Role, now time.Time, visit func(engine.Target)) (cached, queued int64, micros float32) {
	var speed mean
	queued = -1
	for i := range rows {
		r := &rows[i]
		if r.Facts.Roles&roles == 0 {
			continue
		}
		if m, chain := t.held(r.Target); chain != nil {
			cached = max(cached, int64(m.Blocks())*int64(TokensOf(chain.Form)))
		}
		load := r.Load[r.Rank].View(now)
		if queued < 0 || load.Queued < queued {
			queued = load.Queued
		}
		speed.add(load.PrefillMicros)
		visit(r.Target)
	}
	return cached, max(0, queued), speed.of()
}

// mean is the mean of the known values; 0 is unknown.
type mean struct {
	sum float32
	n   int
}

func (m *mean) add(v float32) {
	if v > 0 {
		m.sum += v
		m.n++
	}
}

func (m *mean) of() float32 {
	if m.n == 0 {
		return 0
	}
	return m.sum / float32(m.n)
}
