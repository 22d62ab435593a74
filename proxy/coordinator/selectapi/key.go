package selectapi

import (
	"encoding/binary"
	"errors"
	"strconv"

	"github.com/tinylib/msgp/msgp"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// maxPrompt is the largest accepted prompt length in tokens.
const maxPrompt = 1 << 24

// routingKey is the useful part of a worker's description of a request: the name of the
// conversation, and the prompt as token ids or block hashes. The form depends on the
// worker's router. The conversation router sends a conversation id or null. The
// cache-aware router sends an object.
type routingKey struct {
	conversation string
	tokens       []uint32
	hashes       []uint64
	numTokens    int64 // prompt tokens; 0: not given
}

// readKey reads a routing key of any type and ignores other parts. hash is the block hash
// algorithm of the engines; "": any. m counts the lists. The error is errMemory.
func readKey(raw []byte, hash string, m *held) (k routingKey, err error) {
	switch msgp.NextType(raw) {
	case msgp.StrType:
		k.conversation, err = m.text(raw)
	case msgp.IntType, msgp.UintType:
		k.conversation, _, _ = integer(raw)
	case msgp.ArrayType:
		list := sequence(raw)
		if list.small {
			k.tokens, err = list.tokens(m)
		} else {
			k.hashes, err = list.hashes(m)
		}
	case msgp.MapType:
		err = k.object(raw, hash, m)
	}
	return k, err
}

// object reads a key that is an object.
func (k *routingKey) object(raw []byte, hash string, m *held) error {
	affinity, conversation := "", []byte(nil)
	var tokens, hashes numberList // of equal members the last one counts
	members(raw, func(name, value []byte) {
		switch string(name) {
		case "conversation_id":
			conversation = value
		case "conv_key": // a hash of the first messages
			affinity, _, _ = integer(value)
		case "token_ids", "prompt_token_ids":
			if list := sequence(value); list.small {
				tokens = list
			}
		case "block_hashes":
			hashes = sequence(value)
		case "block_hashes_by_algo":
			members(value, func(algo, list []byte) {
				if string(algo) == hash || hash == "" && hashes.n == 0 {
					hashes = sequence(list)
				}
			})
		case "num_tokens":
			if _, n, err := integer(value); err == nil {
				k.numTokens = int64(min(n, maxPrompt))
			}
		}
	})
	err := error(nil)
	if k.conversation, err = m.text(conversation); err != nil {
		return err
	}
	if k.conversation == "" && affinity != "" {
		k.conversation = "conv_key:" + affinity
	}
	if k.tokens, err = tokens.tokens(m); err != nil {
		return err
	}
	k.hashes, err = hashes.hashes(m)
	return err
}

// members calls f with each member of a map whose key is a string.
func members(raw []byte, f func(name, value []byte)) {
	n, rest, err := msgp.ReadMapHeaderBytes(raw)
	for ; err == nil && n > 0; n-- {
		name, value, notText := msgp.ReadStringZC(rest)
		if notText != nil {
			if value, err = msgp.Skip(rest); err != nil {
				return
			}
		}
		if rest, err = msgp.Skip(value); err == nil && notText == nil {
			f(name, value[:len(value)-len(rest)])
		}
	}
}

// numberList is a list of numbers that is not read yet. The zero value is no list.
type numberList struct {
	n     int    // numbers
	raw   []byte // the numbers, without the head of the list
	small bool   // all numbers can be token ids
}

// sequence finds a list of numbers. Of a list of lists it finds the first list, because
// each placed request has one prompt. It finds none if the list contains a value of another
// type.
func sequence(raw []byte) (list numberList) {
	n, rest, err := msgp.ReadArrayHeaderBytes(raw)
	if err == nil && n > 0 && msgp.NextType(rest) == msgp.ArrayType {
		n, rest, err = msgp.ReadArrayHeaderBytes(rest)
	}
	if err != nil || n == 0 {
		return numberList{}
	}
	list = numberList{int(n), rest, true}
	for range n {
		v, text := uint64(0), false
		if v, text, rest, err = number(rest); err != nil {
			return numberList{}
		}
		list.small = list.small && !text && v < 1<<31
	}
	return list
}

var errNumber = errors.New("no number")

// number reads a number, or the first 16 hexadecimal digits of a digest, as kvevents does. text
// reports that it is a digest.
func number(raw []byte) (v uint64, text bool, rest []byte, err error) {
	switch msgp.NextType(raw) {
	case msgp.IntType, msgp.UintType:
		v, rest, err = msgp.ReadUint64Bytes(raw)
	case msgp.StrType:
		var digits []byte
		if digits, rest, err = msgp.ReadStringZC(raw); err == nil {
			v, err = strconv.ParseUint(string(digits[:min(len(digits), 16)]), 16, 64)
		}
		text = true
	default:
		err = errNumber
	}
	return v, text, rest, err
}

// hashes reads the list; nil without one. The error is errMemory.
func (l *numberList) hashes(m *held) ([]uint64, error) {
	if l.n == 0 {
		return nil, nil
	}
	if err := m.take(8 * l.n); err != nil {
		return nil, err
	}
	list, rest := make([]uint64, l.n), l.raw
	for i := range list {
		list[i], _, rest, _ = number(rest) // sequence has checked the numbers
	}
	return list, nil
}

// tokens is hashes for a list of small numbers.
func (l *numberList) tokens(m *held) ([]uint32, error) {
	if l.n == 0 {
		return nil, nil
	}
	if err := m.take(4 * l.n); err != nil {
		return nil, err
	}
	list, rest := make([]uint32, l.n), l.raw
	for i := range list {
		v, _, after, _ := number(rest)
		list[i], rest = uint32(v), after
	}
	return list, nil
}

// prompt returns the number of prompt tokens. If the key has only block hashes, it
// returns their number times the block size.
func (k *routingKey) prompt(s *side) int64 {
	switch {
	case k.numTokens > 0:
		return k.numTokens
	case k.tokens != nil:
		return int64(len(k.tokens))
	}
	return min(int64(len(k.hashes))*int64(s.blockTokens), maxPrompt)
}

// whole returns the hashes of complete blocks. TensorRT-LLM's routers omit the last token
// of the prompt, and they also hash the incomplete last block.
func (k *routingKey) whole(s *side) []uint64 {
	if k.numTokens == 0 || s.blockTokens == 0 {
		return k.hashes
	}
	return k.hashes[:min(len(k.hashes), int(k.numTokens-1)/s.blockTokens)]
}

// matchBy sets the conversation and the prompt's blocks in a, as far as the placement
// policies need them. The error is errMemory.
func (h *Handler) matchBy(a *coordinator.PlacementRequest, k *routingKey, v *servers, s *side, m *held) error {
	needs := h.o.Local.Needs()
	if needs&abi.NeedConversation != 0 {
		a.Key.Conversation.ID = k.conversation
	}
	if needs&(abi.NeedBlocks|abi.NeedConversation) == 0 || k.tokens == nil && k.hashes == nil {
		return nil
	}
	var cut coordinator.Cut
	h.o.Local.Cut(&cut, v.model)
	seed := kvindex.Seed(cut.Model, cut.LoRA, "")
	for _, form := range cut.Forms {
		// Hashes of 8 bytes, in a slice that append makes larger.
		if err := m.take(3 * 8 * (len(k.tokens)/max(1, coordinator.TokensOf(form)) + len(k.hashes) + 1)); err != nil {
			return err
		}
		blocks := k.blocks(form, seed, s, h.o.Index)
		if len(blocks) == 0 {
			continue
		}
		a.Key.Chains = append(a.Key.Chains, coordinator.Chain{Form: form, Blocks: blocks})
		if form == coordinator.TextForm {
			a.Key.Conversation.Chain = blocks
		}
	}
	return nil
}

// blocks returns the prompt's blocks in a form. For instances without KV events, the proxy only has
// a record of the prompts that it sent there. Blocks of the same length from tokens or from hashes
// show this as well as blocks of text do. Their hashes differ from those of text, so a prompt that
// came as text does not match a prompt that came as tokens.
func (k *routingKey) blocks(form kvindex.Form, seed kvindex.Hash, s *side, index *kvindex.Index) []kvindex.Hash {
	length := coordinator.TokensOf(form)
	switch {
	case k.tokens != nil:
		return kvindex.AppendTokens(nil, seed, k.tokens, length)
	case form.Text:
		if s.blockTokens == 0 || length%s.blockTokens != 0 {
			return nil
		}
		every := length / s.blockTokens
		var text []byte
		for hashes := k.whole(s); len(hashes) >= every; hashes = hashes[every:] {
			text = binary.LittleEndian.AppendUint64(text, hashes[every-1])
		}
		return kvindex.AppendText(nil, seed, text, 8)
	case index != nil && form.Block == s.blockTokens:
		return index.Translate(nil, k.whole(s), s.slots)
	}
	return nil
}
