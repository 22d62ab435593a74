package prompt

import (
	"github.com/zeebo/xxh3"

	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

const (
	// minIdentifying is the length from which the text of a prompt identifies a
	// conversation, in bytes: many clients send the same shorter texts.
	minIdentifying = 64
	// endsWithin is the last part of a prompt in which the ends of words or token ids
	// count as possible ends of an earlier turn, in bytes. An earlier prompt that ended
	// before that part is found by its last whole block.
	endsWithin = 4 << 10
	// maxEnds bounds the ends of one prompt: the message to a coordinator has 9 bytes
	// for each end.
	maxEnds = 1024
)

// ClientID returns the client's own id of the conversation; "" for none. It may alias
// the request's body.
func (m *Matcher) ClientID(s Source) string {
	return m.idSources.Load().ConversationID(s.Request, s.Header.Get)
}

// ConversationKey returns a number that all turns of a conversation have in common: the
// hash of the client's own id of the conversation, otherwise of the prompt's opening. It
// is the same in every process.
func (m *Matcher) ConversationKey(s Source) uint64 {
	if id := m.ClientID(s); id != "" {
		return xxh3.HashString(id)
	}
	return xxh3.Hash(s.Request.Opening())
}

// Conversation returns the name of the conversation for engines: the client's own id,
// else the key of the conversation that the prompt continues, else "". It is valid
// until the body is freed.
func Conversation(ask *coordinator.PlacementRequest) string {
	if id := ask.Key.Conversation.ID; id != "" {
		return id
	}
	if ask.Request.Turn > 1 {
		return ask.Request.Conversation
	}
	return ""
}

// identify writes the identity of the conversation to q: the client's id, otherwise the
// text of the prompt.
func (m *Matcher) identify(p *Prompt, s Source, q *conversation.Query) {
	if q.ID = m.ClientID(s); q.ID != "" {
		q.Parent = m.idSources.Load().ParentID(q.ID, s.Header.Get)
	}
	for _, c := range p.chains {
		if c.Form == coordinator.TextForm {
			q.Chain = c.Blocks
			p.addEnds(s.Request, q)
		}
	}
	holds, known := s.Request.HoldsAnswer()
	q.First = known && !holds
}

// addEnds adds the positions at which an earlier turn may have ended.
func (p *Prompt) addEnds(r *openai.Request, q *conversation.Query) {
	text, block := r.PromptText(), coordinator.TextForm.Block
	if q.ID != "" || len(text) < minIdentifying {
		return
	}
	from := 0
	if r.Prompt != openai.PromptMessages {
		from = max(0, len(text)-endsWithin) / block * block
	}
	p.at = r.AppendPromptEnds(p.at[:0], from)
	at := p.at
	if len(at) > maxEnds { // keep the ends of whole blocks
		at = at[len(at)-maxEnds:]
		from = (int(at[0])/block + 1) * block
		for len(at) > 1 && int(at[0]) < from {
			at = at[1:]
		}
	}
	q.EndsFrom = from / block
	p.ends = conversation.AppendEnds(p.ends[:0], p.seed, q.Chain, block, text, at)
	q.Ends = p.ends
}
