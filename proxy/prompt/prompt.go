// Package prompt computes the facts by which a prompt is matched: its token ids, the
// hashes of its blocks, and the conversation that it continues. Place policies compare
// these facts with the KV that engines hold.
//
// The decisions behind this package are in docs/design/placement.md.
package prompt

import (
	"context"
	"log/slog"
	"net/http"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/state/mediacache"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// Options configures a Matcher. All fields but Tokens are required.
type Options struct {
	Coordinator coordinator.Coordinator
	Registry    *engine.Registry
	Metrics     *telemetry.Metrics
	Log         *slog.Logger
	Tokens      *tokens.Tokenizer // nil: only token ids that the client sends are used
}

// Matcher computes the facts by which prompts are matched. Safe for concurrent use. The
// caller sets the sources of conversation ids before the first request.
type Matcher struct {
	o          Options
	idSources  atomic.Pointer[openai.IDSources]
	tokenizers atomic.Pointer[tokenizers]
}

// New returns a matcher.
func New(o Options) *Matcher { return &Matcher{o: o} }

// SetIDSources replaces the places of a request that may hold the client's id of the
// conversation.
func (m *Matcher) SetIDSources(s *openai.IDSources) { m.idSources.Store(s) }

// Memory counts the memory that is allocated for data from a request's body, until the
// body is freed.
type Memory interface {
	// Derive counts n bytes. The error is the answer for the client.
	Derive(n int) error
}

// Source is the request that a prompt comes from.
type Source struct {
	Request   *openai.Request
	Header    http.Header
	RequestID string // for the log
	Memory    Memory
}

// Prompt has the facts by which the prompt of one request is matched. One request at a
// time uses a Prompt. After Reset the next request reuses its memory. The zero value is
// ready.
type Prompt struct {
	// Used is set by Match and ExactIDs. Without it there is nothing to drop or to reset.
	Used bool

	cut    coordinator.Cut
	ids    []uint32 // token ids that the client sent
	found  []uint32 // token ids of the prompt from any source; not to be changed
	exact  bool     // the engine computes exactly the tokens of found
	chains []coordinator.Chain
	blocks [][]kvindex.Hash // memory of the chains
	seed   kvindex.Hash     // seed of the first block of the text
	at     []int32          // positions of the ends
	ends   []conversation.End
	media  []mediacache.Hash // memory of Media; nil: no request had images, sounds or videos
}

// maxKept is the number of token ids or blocks up to which a Prompt keeps its memory
// for the next request.
const maxKept = 64 << 10

// Reset frees memory that is too large to keep for the next request.
func (p *Prompt) Reset() {
	p.Used = false
	p.DropTokenIDs()
	if cap(p.at) > maxKept {
		p.at = nil
	}
	clear(p.chains)
	for i := range p.blocks {
		if cap(p.blocks[i]) > maxKept/8 {
			p.blocks[i] = nil
		}
	}
}

// DropTokenIDs drops the token ids, and frees their memory if it is too large for reuse.
func (p *Prompt) DropTokenIDs() {
	if cap(p.ids) > maxKept {
		p.ids = nil
	}
	p.found, p.exact = nil, false
}

// TokenIDs returns the token ids that Match or ExactIDs has found, nil for none. The
// caller must not change them, and they are valid until DropTokenIDs.
func (p *Prompt) TokenIDs() []uint32 { return p.found }

// Match writes to ask the facts of a prompt for policies that need abi.NeedBlocks or
// abi.NeedConversation: its blocks, in each form in which an engine reports blocks, and the identity of
// the conversation. A prompt whose token ids
// are unknown is placed without its blocks. The error reports that there is no memory for the token
// ids. The facts are valid until the body is freed.
func (m *Matcher) Match(ctx context.Context, p *Prompt, s Source, ask *coordinator.PlacementRequest) error {
	p.Used = true
	m.o.Coordinator.Cut(&p.cut, s.Request.Model)
	lora := s.Request.LoRA()
	if lora == "" {
		lora = p.cut.LoRA
	}
	seed := kvindex.Seed(p.cut.Model, lora, s.Request.CacheSalt())
	p.chains = p.chains[:0]
	for _, form := range p.cut.Forms {
		if form.Text {
			p.chain(form, func(dst []kvindex.Hash) []kvindex.Hash { return p.appendText(dst, s.Request, seed, form.Block) })
			continue
		}
		ids, err := m.tokenIDs(ctx, p, s)
		if err != nil {
			return err
		}
		if len(ids) > 0 {
			p.found = ids
			ask.Request.PromptTokens = int64(len(ids))
			p.chain(form, func(dst []kvindex.Hash) []kvindex.Hash { return kvindex.AppendTokens(dst, seed, ids, form.Block) })
		}
	}
	ask.Key.Chains = p.chains
	if m.o.Coordinator.Needs()&abi.NeedConversation != 0 {
		m.identify(p, s, &ask.Key.Conversation)
	}
	return nil
}

// chain adds the chain of one form. It uses the memory of an earlier chain.
func (p *Prompt) chain(form kvindex.Form, fill func([]kvindex.Hash) []kvindex.Hash) {
	n := len(p.chains)
	if n == len(p.blocks) {
		p.blocks = append(p.blocks, nil)
	}
	p.blocks[n] = fill(p.blocks[n][:0])
	p.chains = append(p.chains, coordinator.Chain{Form: form, Blocks: p.blocks[n]})
}

// appendText appends the blocks of the prompt's text. The engine puts the preamble
// before the text, so that the preamble changes the hash of every block.
func (p *Prompt) appendText(dst []kvindex.Hash, r *openai.Request, seed kvindex.Hash, block int) []kvindex.Hash {
	for raw := range r.Preamble {
		dst = kvindex.AppendText(dst[:0], seed, raw, len(raw))
		seed = dst[0]
	}
	p.seed = seed
	return kvindex.AppendText(dst[:0], seed, r.PromptText(), block)
}
