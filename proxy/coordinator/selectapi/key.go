package selectapi

import (
	"encoding/binary"
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
// algorithm of the engines; "": any.
func readKey(raw []byte, hash string) (k routingKey) {
	switch msgp.NextType(raw) {
	case msgp.StrType:
		k.conversation, _, _ = msgp.ReadStringBytes(raw) // no error is possible: msgp.Skip has checked the value
	case msgp.IntType, msgp.UintType:
		k.conversation, _, _ = integer(raw)
	case msgp.ArrayType:
		numbers, small := sequence(raw)
		if small {
			k.tokens = asTokens(numbers)
		} else {
			k.hashes = numbers
		}
	case msgp.MapType:
		k.object(raw, hash)
	}
	return k
}

// object reads a key that is an object.
func (k *routingKey) object(raw []byte, hash string) {
	affinity := ""
	members(raw, func(name string, value []byte) {
		switch name {
		case "conversation_id":
			k.conversation, _, _ = msgp.ReadStringBytes(value) // a value of another type is ignored
		case "conv_key": // a hash of the first messages
			affinity, _, _ = integer(value)
		case "token_ids", "prompt_token_ids":
			if numbers, small := sequence(value); small {
				k.tokens = asTokens(numbers)
			}
		case "block_hashes":
			k.hashes, _ = sequence(value)
		case "block_hashes_by_algo":
			members(value, func(algo string, list []byte) {
				if algo == hash || hash == "" && k.hashes == nil {
					k.hashes, _ = sequence(list)
				}
			})
		case "num_tokens":
			if _, n, err := integer(value); err == nil {
				k.numTokens = int64(min(n, maxPrompt))
			}
		}
	})
	if k.conversation == "" && affinity != "" {
		k.conversation = "conv_key:" + affinity
	}
}

// members calls f with each member of a map whose key is a string.
func members(raw []byte, f func(name string, value []byte)) {
	n, rest, err := msgp.ReadMapHeaderBytes(raw)
	for ; err == nil && n > 0; n-- {
		name, value, notText := msgp.ReadStringZC(rest)
		if notText != nil {
			if value, err = msgp.Skip(rest); err != nil {
				return
			}
		}
		if rest, err = msgp.Skip(value); err == nil && notText == nil {
			f(string(name), value[:len(value)-len(rest)])
		}
	}
}

// sequence reads a list of numbers. Of a list of lists it reads the first list, because
// each placed request has one prompt. It reads the first 16 hexadecimal digits of a
// digest, as kvevents does. It returns nil if the list contains a value of another type.
// small: all numbers can be token ids.
func sequence(raw []byte) (numbers []uint64, small bool) {
	n, rest, err := msgp.ReadArrayHeaderBytes(raw)
	if err != nil || n == 0 {
		return nil, false
	}
	if msgp.NextType(rest) == msgp.ArrayType {
		return sequenceFlat(rest)
	}
	return sequenceFlat(raw)
}

// sequenceFlat is sequence for a list that contains no lists.
func sequenceFlat(raw []byte) (numbers []uint64, small bool) {
	n, rest, err := msgp.ReadArrayHeaderBytes(raw)
	small = true
	for ; err == nil && n > 0; n-- {
		var v uint64
		switch msgp.NextType(rest) {
		case msgp.IntType, msgp.UintType:
			v, rest, err = msgp.ReadUint64Bytes(rest)
		case msgp.StrType:
			var digits []byte
			if digits, rest, err = msgp.ReadStringZC(rest); err == nil {
				v, err = strconv.ParseUint(string(digits[:min(len(digits), 16)]), 16, 64)
			}
			small = false
		default:
			return nil, false
		}
		small = small && v < 1<<31
		numbers = append(numbers, v)
	}
	if err != nil {
		return nil, false
	}
	return numbers, small
}

func asTokens(numbers []uint64) []uint32 {
	tokens := make([]uint32, len(numbers))
	for i, n := range numbers {
		tokens[i] = uint32(n)
	}
	return tokens
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
// policies need them.
func (h *Handler) matchBy(a *coordinator.Ask, k *routingKey, v *servers, s *side) {
	needs := h.o.Local.Needs()
	if needs&abi.NeedConversation != 0 {
		a.Key.Conversation.ID = k.conversation
	}
	if needs&(abi.NeedBlocks|abi.NeedConversation) == 0 || k.tokens == nil && k.hashes == nil {
		return
	}
	var cut coordinator.Cut
	h.o.Local.Cut(&cut, v.model)
	seed := kvindex.Seed(cut.Model, cut.LoRA, "")
	for _, form := range cut.Forms {
		blocks := k.blocks(form, seed, s, h.o.Index)
		if len(blocks) == 0 {
			continue
		}
		a.Key.Chains = append(a.Key.Chains, coordinator.Chain{Form: form, Blocks: blocks})
		if form == coordinator.TextForm {
			a.Key.Conversation.Chain = blocks
		}
	}
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
