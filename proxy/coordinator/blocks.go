package coordinator

import (
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/indexcheck"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/state/mediacache"
)

// State is the knowledge of a Local beside the loads. If a field is nil, the policies do
// not get its facts.
type State struct {
	Index         *kvindex.Index // the same as the registry's
	Conversations *conversation.Table
	Trust         *indexcheck.Check
}

// Key identifies a prompt among earlier ones: its blocks in each form that Cut requested, its
// conversation and its media. Place sets the scope of the conversation.
type Key struct {
	Conversation conversation.Query
	Chains       []Chain
	Media        []mediacache.Hash // at most mediacache.MaxMedia, each once; needs abi.NeedMedia
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

// CacheReport is an engine's report about its prefix cache for one prompt.
type CacheReport struct {
	Block          int            // tokens of a block of the engine; 0: unknown
	Blocks         []kvindex.Hash // of the prompt: those that may have been cached; empty: unknown
	Prompt, Cached int64          // tokens of the prompt, and of these the cached ones
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

// lookup is the blocks of one request in the index. Its memory serves later requests.
type lookup struct {
	index   *kvindex.Index // nil: there is none
	memory  []matches
	matched []matches // one for each chain of the request; empty: its blocks were not looked up
}

// match looks up the request's chains for all targets.
func (k *lookup) match(chains []Chain) {
	n := k.index.Targets()
	for len(k.memory) < len(chains) {
		k.memory = append(k.memory, matches{})
	}
	k.matched = k.memory[:len(chains)]
	for i := range chains {
		m := &k.matched[i]
		m.Chain = chains[i]
		if cap(m.of) < n {
			m.of = make([]kvindex.Match, n, 2*n)
		}
		m.of = m.of[:n]
		k.index.Match(m.Blocks, m.of)
	}
}

// beginning returns the last block of the longest part of the prompt that a target holds; 0: no
// target holds a part.
func (k *lookup) beginning() (end kvindex.Hash) {
	most := 0 // tokens
	for i := range k.matched {
		m, blocks := &k.matched[i], uint32(0)
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
func (k *lookup) held(target engine.Target) (kvindex.Match, *Chain) {
	if len(k.matched) == 0 || len(target.KV) <= target.Rank {
		return kvindex.Match{}, nil
	}
	form, slot := formOf(target.Instance), int(target.KV[target.Rank])
	for i := range k.matched {
		m := &k.matched[i]
		if m.Form == form && slot < len(m.of) {
			return m.of[slot], &m.Chain
		}
	}
	return kvindex.Match{}, nil
}

// know writes into the row the KV that its target holds.
func (k *lookup) know(c *abi.Candidate, target engine.Target) {
	m, chain := k.held(target)
	if chain == nil {
		return
	}
	c.BlocksGPU, c.BlocksCPU, c.BlocksDisk = m.GPU, m.CPU, m.Disk
	c.BlockTokens = uint32(TokensOf(chain.Form))
}

// homes returns the phases of the last turn that the target served.
func homes(last conversation.Turn, target engine.Target) (phases abi.Role) {
	if isHome(last.Prefill, target) {
		phases |= abi.RolePrefill
	}
	if isHome(last.Decode, target) {
		phases |= abi.RoleDecode
	}
	return phases
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

// expectation is the blocks of a request that its placement has entered at a target. The zero
// value has no blocks.
type expectation struct {
	target kvindex.Target
	blocks *[]kvindex.Hash // a copy from copies
}

// end ends an expectation that has blocks. It removes the blocks from the index unless they
// came to the target.
func (e *expectation) end(x *kvindex.Index, came bool) {
	if !came {
		x.Unexpect(e.target, *e.blocks)
	}
	copies.Put(e.blocks)
	*e = expectation{}
}

// expect enters the request's blocks at its targets before the request is sent, so that the next
// placement finds them: requests with the same prefix often come at the same time. The end of the
// lease removes the blocks that did not come there. expected is at the target that computes the
// prompt, unless computed says that this has happened, and at decode. matched is
// Placement.Matched.
func (k *lookup) expect(prefill, decode engine.Target, computed bool, now time.Time) (expected [2]expectation, matched int64) {
	computes := decode
	if prefill.Instance != nil {
		expected[1] = k.expectAt(decode, now)
		computes = prefill
	}
	m, chain := k.held(computes)
	if chain == nil || computed {
		return expected, -1
	}
	if matched = -1; !chain.Form.Text {
		matched = int64(m.Blocks()) * int64(chain.Form.Block)
	}
	expected[0] = k.expectAt(computes, now)
	return expected, matched
}

// expectAt enters the blocks of the request that a target does not hold yet. Blocks of text
// are entered again even if held, because no event confirms that they are still there.
func (k *lookup) expectAt(target engine.Target, now time.Time) expectation {
	m, chain := k.held(target)
	if chain == nil {
		return expectation{}
	}
	blocks := chain.Blocks
	if !chain.Form.Text {
		blocks = blocks[m.Blocks():]
	}
	if len(blocks) == 0 {
		return expectation{}
	}
	kv := target.KV[target.Rank]
	k.index.Expect(kv, blocks, now)
	return expectation{kv, copyOf(blocks)}
}

// copies holds memory for copies of blocks.
var copies = sync.Pool{New: func() any { return new([]kvindex.Hash) }}

func copyOf(blocks []kvindex.Hash) *[]kvindex.Hash {
	c := copies.Get().(*[]kvindex.Hash)
	*c = append((*c)[:0], blocks...)
	return c
}
