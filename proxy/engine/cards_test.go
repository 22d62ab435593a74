package engine

import (
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestSameModel: the names of one model are those of the same weights on the same model.
func TestSameModel(t *testing.T) {
	i := made(1, "e", abi.RoleBoth, "x", Ready, 1, Facts{Cards: []ModelCard{
		{ID: "a", Root: "/w"}, {ID: "b", Root: "/w"}, {ID: "lora", Root: "/l", Parent: "a"}, {ID: "lora2", Root: "/l", Parent: "a"}, {ID: "on-b", Root: "/l", Parent: "b"}, {ID: "merged", Root: "/w", Parent: "a"}, {ID: "c"}, {ID: "d"},
	}})
	for name, want := range map[string]string{"a": "a b", "b": "b a", "lora": "lora", "lora2": "lora2", "on-b": "on-b", "c": "c", "d": "d", "unknown": "unknown"} {
		if got := strings.Join(i.SameModel(name), " "); got != want {
			t.Errorf("%s: got %s, want %s", name, got, want)
		}
	}
}

// The smallest limit of the engines that serve a model holds. Encoders, draining engines and
// engines that serve another model under the same name do not count.
func TestCard(t *testing.T) {
	facts := func(cards ...ModelCard) Facts {
		f := Facts{Cards: cards}
		for _, c := range cards {
			f.Models = append(f.Models, c.ID)
		}
		return f
	}
	other := made(6, "other", abi.RoleBoth, "x", Ready, 1, facts(ModelCard{ID: "m", MaxModelLen: 5}))
	other.Spec.Model = "mine"
	s := newSnapshot([]*Instance{
		made(1, "old", abi.RoleDecode, "x", Down, 1, facts(ModelCard{ID: "m"})),
		made(2, "p", abi.RolePrefill, "x", Ready, 1, facts(ModelCard{ID: "lora", Parent: "m"}, ModelCard{ID: "m", MaxModelLen: 4096, Root: "/a"})),
		made(3, "d", abi.RoleDecode, "x", Unhealthy, 1, facts(ModelCard{ID: "m", MaxModelLen: 1024, Root: "/b"})),
		made(4, "e", abi.RoleEncode, "x", Ready, 1, facts(ModelCard{ID: "m", MaxModelLen: 7})),
		made(5, "leaves", abi.RoleDecode, "x", Draining, 1, facts(ModelCard{ID: "m", MaxModelLen: 6})),
		other,
	}, pairing{})
	for _, want := range []ModelCard{{ID: "m", MaxModelLen: 1024, Root: "/a"}, {ID: "lora", Parent: "m"}, {ID: "mine"}, {ID: "unknown"}} {
		if got := s.Card(want.ID); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
}
