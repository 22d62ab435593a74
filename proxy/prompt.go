package proxy

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// prompt is the memory in which an exchange keeps what its prompt is matched by.
type prompt struct {
	cut    coordinator.Cut
	ids    []uint32 // that the client sent
	found  []uint32 // those of the prompt, wherever they are from; shared
	exact  bool     // found are what an engine computes
	chains []coordinator.Chain
	blocks [][]kvindex.Hash // memory of the chains
	seed   kvindex.Hash     // before the first block of the text
	at     []int32          // positions of the ends
	ends   []conversation.End
}

// mostKept is how many token ids or blocks an exchange at rest keeps room for.
const mostKept = 64 << 10

// reset drops what is too large to be kept for the next exchange.
func (p *prompt) reset() {
	p.dropIDs()
	if cap(p.at) > mostKept {
		p.at = nil
	}
	clear(p.chains)
	for i := range p.blocks {
		if cap(p.blocks[i]) > mostKept/8 {
			p.blocks[i] = nil
		}
	}
}

// dropIDs drops the token ids that are too many to be kept, when nobody needs them
// any more.
func (p *prompt) dropIDs() {
	if cap(p.ids) > mostKept {
		p.ids = nil
	}
	p.found, p.exact = nil, false
}

// matchBy says what the policies' needs are met by: the prompt's blocks in each
// form that some engine has them in, and what names the conversation. A prompt
// whose token ids cannot be had is placed without its blocks. The error says that
// there is no memory for them.
func (x *exchange) matchBy() error {
	c := x.s.deps.Coordinator
	needs := c.Needs()
	if needs&(abi.NeedBlocks|abi.NeedConversation) == 0 || !x.req.API.Generates() {
		return nil
	}
	p := &x.prompt
	c.Cut(&p.cut, x.req.Model)
	lora := x.req.LoRA()
	if lora == "" {
		lora = p.cut.LoRA
	}
	seed := kvindex.Seed(p.cut.Model, lora, x.req.CacheSalt())
	p.chains = p.chains[:0]
	for _, form := range p.cut.Forms {
		if form.Text {
			x.chain(form, func(dst []kvindex.Hash) []kvindex.Hash { return x.appendText(dst, seed, form.Block) })
			continue
		}
		ids, err := x.tokenIDs()
		if err != nil {
			return err
		}
		if len(ids) > 0 {
			p.found = ids
			x.ask.Request.PromptTokens = int64(len(ids))
			x.chain(form, func(dst []kvindex.Hash) []kvindex.Hash { return kvindex.AppendTokens(dst, seed, ids, form.Block) })
		}
	}
	x.ask.Key.Chains = p.chains
	if needs&abi.NeedConversation != 0 {
		x.nameConversation()
	}
	return nil
}

// chain adds the chain of one form, in memory that is kept.
func (x *exchange) chain(form kvindex.Form, fill func([]kvindex.Hash) []kvindex.Hash) {
	p := &x.prompt
	n := len(p.chains)
	if n == len(p.blocks) {
		p.blocks = append(p.blocks, nil)
	}
	p.blocks[n] = fill(p.blocks[n][:0])
	p.chains = append(p.chains, coordinator.Chain{Form: form, Blocks: p.blocks[n]})
}

// appendText cuts the prompt's text. What the engine puts before it makes it
// another prompt.
func (x *exchange) appendText(dst []kvindex.Hash, seed kvindex.Hash, block int) []kvindex.Hash {
	for raw := range x.req.Preamble {
		dst = kvindex.AppendText(dst[:0], seed, raw, len(raw))
		seed = dst[0]
	}
	x.prompt.seed = seed
	return kvindex.AppendText(dst[:0], seed, x.req.PromptText(), block)
}

// nameConversation says what names the conversation: the client's id, else the
// text of the prompt.
func (x *exchange) nameConversation() {
	q := &x.ask.Key.Conversation
	q.ID = x.s.idSources.Load().ConversationID(&x.req, x.r.Header.Get)
	for _, c := range x.prompt.chains {
		if c.Form == coordinator.TextForm {
			q.Chain = c.Blocks
			x.nameEnds(q)
		}
	}
	holds, known := x.req.HoldsAnswer()
	q.First = known && !holds
}

const (
	// leastNamed is the shortest prompt that names a conversation, in bytes of its
	// text: shorter ones are sent by many clients.
	leastNamed = 64
	// endsWithin is the part of a prompt, in bytes before its end, whose words or
	// token ids are ends. An earlier prompt that ended before that part is found by
	// its last whole block.
	endsWithin = 4 << 10
	// mostEnds bounds the ends of one prompt: a coordinator is sent 9 bytes each.
	mostEnds = 1024
)

// nameEnds adds the positions at which an earlier turn may have ended.
func (x *exchange) nameEnds(q *conversation.Query) {
	p, text, block := &x.prompt, x.req.PromptText(), coordinator.TextForm.Block
	if q.ID != "" || len(text) < leastNamed {
		return
	}
	from := 0
	if x.req.Prompt != openai.PromptMessages {
		from = max(0, len(text)-endsWithin) / block * block
	}
	p.at = x.req.AppendPromptEnds(p.at[:0], from)
	at := p.at
	if len(at) > mostEnds { // whole blocks of them only
		at = at[len(at)-mostEnds:]
		from = (int(at[0])/block + 1) * block
		for len(at) > 1 && int(at[0]) < from {
			at = at[1:]
		}
	}
	q.EndsFrom = from / block
	p.ends = conversation.AppendEnds(p.ends[:0], p.seed, q.Chain, block, text, at)
	q.Ends = p.ends
}

// conversation is what engines are told of the conversation: the client's own id,
// else the key of the one that the prompt continues. It is good as long as the
// body is there.
func (x *exchange) conversation() string {
	if id := x.ask.Key.Conversation.ID; id != "" {
		return id
	}
	if x.ask.Request.Turn > 1 {
		return x.ask.Request.Conversation
	}
	return ""
}

// roomForIDs gives p.ids room for the token ids that the client sent, which is
// counted before it is taken.
func (x *exchange) roomForIDs() error {
	p, n := &x.prompt, x.req.MostTokenIDs()
	if n <= max(mostKept, cap(p.ids)) {
		return nil
	}
	if err := x.derive(4 * n); err != nil {
		return err
	}
	p.ids = make([]uint32, 0, n)
	return nil
}

// tokenIDs are those of the prompt; none where nobody has them in time. The error
// says that there is no memory for them.
func (x *exchange) tokenIDs() ([]uint32, error) {
	if err := x.roomForIDs(); err != nil {
		return nil, err
	}
	p := &x.prompt
	var err error
	if p.ids, err = x.req.AppendTokenIDs(p.ids[:0]); err != nil {
		p.ids = p.ids[:0]
	}
	t := x.s.deps.Tokens
	if t == nil {
		p.exact = len(p.ids) > 0 && x.req.API != openai.Chat // where vLLM takes none
		return p.ids, nil
	}
	result := t.Tokens(x.ctx, tokens.Prompt{Request: &x.req, IDs: p.ids, Model: p.cut.Model, Instances: x.s.askable(p.cut.Model)})
	x.s.deps.Metrics.Prompt(result.Source.String(), result.Reason.String())
	if result.Err != nil {
		x.s.log.Debug("no token ids", x.logAttrs("engine", result.Instance, "reason", result.Reason.String(), "error", result.Err)...)
	}
	p.exact = result.Exact && (result.Source != tokens.Client || x.req.API != openai.Chat)
	return result.IDs, nil
}

// askables are the instances that tokenize, by the model they serve.
type askables struct {
	of      *engine.Snapshot
	byModel map[string][]tokens.Instance
}

// askable lists the ready instances that may tokenize for a model.
func (s *Server) askable(model string) []tokens.Instance {
	now := s.deps.Registry.Snapshot()
	if known := s.askables.Load(); known != nil && known.of == now {
		return known.byModel[model]
	}
	fresh := &askables{of: now, byModel: make(map[string][]tokens.Instance)}
	for _, i := range now.Instances {
		if i.State() == engine.Ready {
			for _, m := range i.Models() {
				fresh.byModel[m] = append(fresh.byModel[m], tokens.Instance{Name: i.Spec.Name, Dialect: dialectOf(i)})
			}
		}
	}
	s.askables.Store(fresh)
	return fresh.byModel[model]
}
