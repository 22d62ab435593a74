package kvaware

import "github.com/pdproxy/pdproxy/policies/param"

// Params are the parameters for operators. Table has names, defaults and bounds.
type Params struct {
	QueueWeight, BalanceWeight         float64
	LateSeconds                        float64
	LateWeight, BusyLateWeight         float64
	HeldWeight, HeldFree               float64
	EvenWeight, EvenFrom, EvenTo       float64
	BusyFrom, BusyTo, BusyPatience     float64
	Patience, FirstPatience            float64
	SizeSpread, SizeMiddle             float64
	RequestTokens                      float64
	SharedTokens, TypicalTokens        float64
	TokenMicros, CPUMicros, DiskMicros float64
	DecodeMicros, TransferMicros       float64
	PressureFrom, PressureSeconds      float64
	HomeShare, HomeRequests            float64
}

// Table describes the parameters; it points into p.
func (p *Params) Table() param.Table {
	const large = 1e9
	return param.Table{
		{Name: "queue_weight", Value: &p.QueueWeight, Default: 1, Most: 100, Meaning: "weight of the uncached tokens that wait at a target"},
		{Name: "balance_weight", Value: &p.BalanceWeight, Default: 0.1, Most: 100, Meaning: "weight of the uncached tokens that were placed on a target of late; 0 balances queues only"},
		{Name: "request_tokens", Value: &p.RequestTokens, Default: 256, Most: large, Unit: "tokens", Meaning: "what a request counts beside its uncached tokens, in what was placed of late"},
		{Name: "late_seconds", Value: &p.LateSeconds, Default: 2.25, Most: large, Unit: "s", Meaning: "estimated time to the end of prefill above which a target is late"},
		{Name: "late_weight", Value: &p.LateWeight, Default: 12, Most: 1000, Meaning: "how much more each second counts from there to twice that time"},
		{Name: "busy_late_weight", Value: &p.BusyLateWeight, Default: 5, Most: 1000, Meaning: "the same where targets are busy"},
		{Name: "held_weight", Value: &p.HeldWeight, Default: 10, Most: 1000, Meaning: "how many requests a second of computing above late_seconds holds up at a target that gets as many as the others; 0 where targets are busy"},
		{Name: "held_free", Value: &p.HeldFree, Default: 0.2, Most: 1000, Meaning: "share of the mean target's requests up to which a target's do not count for that"},
		{Name: "even_weight", Value: &p.EvenWeight, Default: 1, Most: 1000, Meaning: "how many requests a target counts as having, beside its own, for that price if it lacks much of the mean target's work of late, as a share of the mean target's requests; 0 lets long prompts have targets for themselves"},
		{Name: "even_from", Value: &p.EvenFrom, Default: 0.05, Most: 1, Meaning: "share of the mean target's work of late, in uncached tokens, above which a target begins to lack it"},
		{Name: "even_to", Value: &p.EvenTo, Default: 0.25, Most: 1, Meaning: "the same, from which it lacks much"},
		{Name: "patience", Value: &p.Patience, Default: 85, Most: 10000, Unit: "requests", Meaning: "how many typical requests more may wait at the one target that holds the whole prompt before another computes it anew; with part of it, or several holders, accordingly fewer"},
		{Name: "first_patience", Value: &p.FirstPatience, Default: 140, Most: 10000, Unit: "requests", Meaning: "the same for the first turn of a conversation, which can match shared prefixes only"},
		{Name: "busy_patience", Value: &p.BusyPatience, Default: 0.25, Most: 1000, Meaning: "how much more patience there is where targets are busy, as a share"},
		{Name: "busy_from", Value: &p.BusyFrom, Default: 0.59, Most: 1000, Meaning: "busy share of the last minute, on average, at which targets begin to count as busy"},
		{Name: "busy_to", Value: &p.BusyTo, Default: 0.64, Most: 1000, Meaning: "the same, from which they are"},
		{Name: "size_spread", Value: &p.SizeSpread, Default: 20, Most: 10000, Unit: "requests", Meaning: "prompts that match nowhere are kept apart by their size, short ones on the first targets and long ones on the last: how many typical requests more may wait at the right end of the list before the other end takes it; 0 mixes all"},
		{Name: "size_middle", Value: &p.SizeMiddle, Default: 4, Least: 0.01, Most: 10000, Unit: "requests", Meaning: "size, in typical requests, of a prompt whose place is the middle of the list"},
		{Name: "shared_tokens", Value: &p.SharedTokens, Default: 512, Most: large, Unit: "tokens", Meaning: "so much of a match is worth no patience, for it is likely a prefix that everyone shares"},
		{Name: "typical_tokens", Value: &p.TypicalTokens, Default: 4096, Least: 1, Most: large, Unit: "tokens", Meaning: "uncached tokens of a typical request, while none was placed of late"},
		{Name: "token_micros", Value: &p.TokenMicros, Default: 100, Least: 0.001, Most: large, Unit: "µs", Meaning: "prefill of one uncached token, while no target's is measured"},
		{Name: "cpu_micros", Value: &p.CPUMicros, Default: 10, Most: large, Unit: "µs", Meaning: "loading one token's KV from host memory"},
		{Name: "disk_micros", Value: &p.DiskMicros, Default: 40, Most: large, Unit: "µs", Meaning: "loading one token's KV from disk"},
		{Name: "decode_micros", Value: &p.DecodeMicros, Default: 4, Most: large, Unit: "µs", Meaning: "what one token in flight at a decode target costs a stream there, over its whole answer"},
		{Name: "transfer_micros", Value: &p.TransferMicros, Default: 5, Most: large, Unit: "µs", Meaning: "transfer of one token's KV that the decode target does not hold"},
		{Name: "pressure_from", Value: &p.PressureFrom, Default: 0.9, Most: 0.99, Meaning: "share of KV memory in use from which it costs"},
		{Name: "pressure_seconds", Value: &p.PressureSeconds, Default: 2, Most: large, Unit: "s", Meaning: "what a target with all of its KV memory in use costs"},
		{Name: "home_requests", Value: &p.HomeRequests, Default: 8, Most: 10000, Unit: "requests", Meaning: "how many typical requests more may wait at the conversation's last target before its next turn goes elsewhere, beside the patience for blocks"},
		{Name: "home_share", Value: &p.HomeShare, Default: 0.8, Most: 1, Meaning: "share of the prompt that the conversation's last target is taken to hold, where no index knows"},
	}
}

// Defaults returns the parameters with their default values.
func Defaults() Params {
	var p Params
	p.Table().Reset()
	return p
}
