package engine

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// Detail returns the labels and the weight of the instance as policies get them,
// without counts.
func (i *Instance) Detail() abi.Detail { return i.detail }

func detailOf(e *config.Engine) abi.Detail {
	d := abi.Detail{Weight: 1, Running: -1, Waiting: -1}
	if e.Weight > 0 {
		d.Weight = float32(e.Weight)
	}
	_ = d.SetLabels(e.Labels.Map()) // fails only for labels that the configuration refuses; then d has none
	return d
}
