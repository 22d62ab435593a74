package coordinator

import (
	"slices"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

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

// CutFor is Cut for a coordinator with that demand.
func (l *Local) CutFor(c *Cut, model string, d Demand) {
	c.Model, c.LoRA, c.Forms = "", "", c.Forms[:0]
	pool, err := resolve(l.registry.Snapshot(), model)
	if err != nil || len(pool.Ready) == 0 {
		return
	}
	c.Model, c.LoRA = pool.Base, pool.Adapter
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
