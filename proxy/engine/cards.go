package engine

import (
	"slices"

	"github.com/pdproxy/pdproxy/abi"
)

// ModelCard has an instance's statements about one of its models. The members of GET
// /v1/models have the same names. Sources: vLLM entrypoints/openai/engine/protocol.py and
// SGLang entrypoints/openai/protocol.py, class ModelCard; TensorRT-LLM's has none of them.
type ModelCard struct {
	ID          string // the name of the model in requests
	MaxModelLen int64  // limit of prompt and answer together, in tokens; 0 unknown
	Root        string // name or path of the weights; "" unknown
	Parent      string // the model that an adapter extends; "" if it is no adapter
}

// Card returns the statements of all instances of a model, except encoders and draining
// instances. MaxModelLen is the smallest that an instance states, because a request may run
// on any of them. Root and Parent are those of the oldest instance that states them.
func (s *Snapshot) Card(model string) ModelCard {
	card := ModelCard{ID: model}
	for _, i := range s.Instances {
		if i.Role == abi.RoleEncode || i.State() == Draining || !slices.Contains(i.Models(), model) {
			continue
		}
		for _, c := range i.Facts().Cards {
			if c.ID != model {
				continue
			}
			if card.MaxModelLen == 0 || c.MaxModelLen > 0 && c.MaxModelLen < card.MaxModelLen {
				card.MaxModelLen = c.MaxModelLen
			}
			if card.Root == "" {
				card.Root = c.Root
			}
			if card.Parent == "" {
				card.Parent = c.Parent
			}
		}
	}
	return card
}

// SameModel returns the names under which the instance serves the model of that name: model itself,
// and, unless model is an adapter, the other names of the same weights. An engine may give an
// answer another of these names than that of the request: vLLM's answers have the first one, and
// the own name of an adapter (entrypoints/openai/models/serving.py, model_name).
func (i *Instance) SameModel(model string) []string {
	names := []string{model}
	cards := i.Facts().Cards
	at := slices.IndexFunc(cards, func(c ModelCard) bool { return c.ID == model })
	if at < 0 || cards[at].Root == "" || cards[at].Parent != "" {
		return names
	}
	for _, c := range cards {
		if c.ID != model && c.Root == cards[at].Root && c.Parent == "" {
			names = append(names, c.ID)
		}
	}
	return names
}
