package kvaware

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/param"
)

// Params are the parameters for operators. Table has names, defaults and bounds.
type Params struct {
	QueueWeight, BalanceWeight         float64
	LateSeconds                        float64
	LateWeight                         float64
	HeldWeight, BusyHeldWeight         float64
	HeldFree                           float64
	EvenWeight, EvenFrom, EvenTo       float64
	BusyFrom, BusyTo                   float64
	SavedWeight, Patience              float64
	SizeSpread, SizeMiddle             float64
	RequestTokens                      float64
	SharedTokens, TypicalTokens        float64
	TokenMicros, CPUMicros, DiskMicros float64
	DecodeMicros, TransferMicros       float64
	PressureFrom, PressureSeconds      float64
	HomeShare, HomeRequests            float64
	LoRALoadSeconds, LoRAWaitSeconds   float64
	LabelMicros                        param.Labels
}

// Table describes the parameters; it points into p.
func (p *Params) Table() param.Table {
	const large = 1e9
	return param.Table{
		{Name: "queue_weight", Value: &p.QueueWeight, Default: 1, Most: 100, Meaning: "weight of the uncached tokens that wait at a target"},
		{Name: "balance_weight", Value: &p.BalanceWeight, Default: 0.1, Most: 100, Meaning: "weight of the uncached tokens that were recently placed on a target; 0 balances queues only"},
		{Name: "request_tokens", Value: &p.RequestTokens, Default: 256, Most: large, Unit: "tokens", Meaning: "tokens that a request adds to its uncached tokens, in the recent work of a target"},
		{Name: "late_seconds", Value: &p.LateSeconds, Default: 2.25, Most: large, Unit: "s", Meaning: "estimated time to the end of prefill above which a target is late"},
		{Name: "late_weight", Value: &p.LateWeight, Default: 6, Most: 1000, Meaning: "additional weight of each second between late_seconds and twice late_seconds"},
		{Name: "held_weight", Value: &p.HeldWeight, Default: 2.5, Most: 1000, Meaning: "requests that a second of computation above late_seconds delays on a target with the mean number of requests"},
		{Name: "busy_held_weight", Value: &p.BusyHeldWeight, Default: 5, Most: 1000, Meaning: "the same if targets are busy"},
		{Name: "held_free", Value: &p.HeldFree, Default: 0.2, Most: 1000, Meaning: "share of the mean target's requests that is free: held_weight counts only requests above it"},
		{Name: "even_weight", Value: &p.EvenWeight, Default: 1.2, Most: 1000, Meaning: "requests that held_weight adds to a target that lacks even_to of the mean target's recent work, as a share of the mean target's requests; 0 allows targets with only long prompts"},
		{Name: "even_from", Value: &p.EvenFrom, Default: 0.03, Most: 1, Meaning: "lack of recent work, as a share of the mean target's uncached tokens, from which even_weight begins to count"},
		{Name: "even_to", Value: &p.EvenTo, Default: 0.25, Most: 1, Meaning: "the same, from which even_weight counts fully"},
		{Name: "saved_weight", Value: &p.SavedWeight, Default: 4, Most: 1000, Meaning: "weight of the prefill that the blocks of a target save, in addition to its time: computing them again delays other requests"},
		{Name: "patience", Value: &p.Patience, Default: 85, Most: 10000, Unit: "requests", Meaning: "if targets are busy: additional typical requests that may wait at the only target with the whole prompt before another target computes the prompt; proportionally fewer if the target has a part of the prompt, or if several targets have it"},
		{Name: "busy_from", Value: &p.BusyFrom, Default: 0.56, Most: 1000, Meaning: "mean busy share of the last minute from which targets begin to count as busy"},
		{Name: "busy_to", Value: &p.BusyTo, Default: 0.66, Most: 1000, Meaning: "the same, from which targets count as fully busy"},
		{Name: "size_spread", Value: &p.SizeSpread, Default: 20, Most: 10000, Unit: "requests", Meaning: "if targets are busy, separates prompts without a match by size, short prompts on the first targets and long prompts on the last: additional typical requests that may wait at the right end of the list before a prompt goes to the other end; 0 mixes all sizes"},
		{Name: "size_middle", Value: &p.SizeMiddle, Default: 4, Least: 0.01, Most: 10000, Unit: "requests", Meaning: "size, in typical requests, of a prompt in the middle of the list"},
		{Name: "shared_tokens", Value: &p.SharedTokens, Default: 512, Most: large, Unit: "tokens", Meaning: "part of a match that gets no patience, because it is probably a prefix that all requests share"},
		{Name: "typical_tokens", Value: &p.TypicalTokens, Default: 4096, Least: 1, Most: large, Unit: "tokens", Meaning: "uncached tokens of a typical request, without recent placements"},
		{Name: "token_micros", Value: &p.TokenMicros, Default: 100, Least: 0.001, Most: large, Unit: "µs", Meaning: "prefill of one uncached token, without a measurement"},
		{Name: "cpu_micros", Value: &p.CPUMicros, Default: 10, Most: large, Unit: "µs", Meaning: "loading one token's KV from host memory"},
		{Name: "disk_micros", Value: &p.DiskMicros, Default: 40, Most: large, Unit: "µs", Meaning: "loading one token's KV from disk"},
		{Name: "decode_micros", Value: &p.DecodeMicros, Default: 4, Most: large, Unit: "µs", Meaning: "cost of one token in flight on a decode target for a stream there, over its whole answer"},
		{Name: "transfer_micros", Value: &p.TransferMicros, Default: 5, Most: large, Unit: "µs", Meaning: "transfer of the KV of one token that the decode target does not have"},
		{Name: "pressure_from", Value: &p.PressureFrom, Default: 0.9, Most: 0.99, Meaning: "share of KV memory in use from which pressure costs"},
		{Name: "pressure_seconds", Value: &p.PressureSeconds, Default: 2, Most: large, Unit: "s", Meaning: "cost of a target with full KV memory"},
		{Name: "home_requests", Value: &p.HomeRequests, Default: 8, Most: 10000, Unit: "requests", Meaning: "additional typical requests that may wait at the conversation's last target before its next turn goes elsewhere, in addition to the patience for blocks, and twice as many if another target has most of the beginning of the prompt, too; twice as many may also wait at the target whose turn it is for a conversation with a shared beginning"},
		{Name: "home_share", Value: &p.HomeShare, Default: 0.8, Most: 1, Meaning: "share of the prompt that the conversation's last target is assumed to have, without an index"},
		{Name: "lora_load_seconds", Value: &p.LoRALoadSeconds, Default: 0.1, Most: large, Unit: "s", Meaning: "cost of a target that runs no request with the LoRA adapter of the request, and has a place for the adapter"},
		{Name: "lora_wait_seconds", Value: &p.LoRAWaitSeconds, Default: 2, Most: large, Unit: "s", Meaning: "cost of a target where other adapters take all places; half of it if requests with the adapter already wait there"},
		{Name: "label_micros", Labels: &p.LabelMicros, Most: large, Unit: "µs", Meaning: "for each label of engines, such as label_micros.zone: cost of a decode target that does not have the same value of the label as the prefill target; an engine without the label has no value; 0 ignores the label"},
	}
}

// Needs returns the additional facts that the policy needs with these parameters.
func (p *Params) Needs() abi.Needs {
	if len(p.LabelMicros.Names) != 0 {
		return Needs | abi.NeedDetails
	}
	return Needs
}

// Defaults returns the parameters with their default values.
func Defaults() Params {
	var p Params
	p.Table().Reset()
	return p
}
