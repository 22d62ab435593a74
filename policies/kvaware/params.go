package kvaware

import "github.com/pdproxy/pdproxy/policies/param"

// Params is what an operator may change. Table has names, defaults and bounds.
type Params struct {
	QueueWeight, BalanceWeight         float64
	Patience, FirstPatience            float64
	SharedTokens, TypicalTokens        float64
	TokenMicros, CPUMicros, DiskMicros float64
	DecodeMicros, TransferMicros       float64
	PressureFrom, PressureSeconds      float64
	HomeShare                          float64
}

// Table describes the parameters; it points into p.
func (p *Params) Table() param.Table {
	const large = 1e9
	return param.Table{
		{Name: "queue_weight", Value: &p.QueueWeight, Default: 1, Most: 100, Meaning: "weight of the uncached tokens that wait at a target"},
		{Name: "balance_weight", Value: &p.BalanceWeight, Default: 0.1, Most: 100, Meaning: "weight of the uncached tokens that a target was given lately; 0 balances queues only"},
		{Name: "patience", Value: &p.Patience, Default: 32, Most: 10000, Unit: "requests", Meaning: "how many typical requests more may wait at the one target that holds the whole prompt before another computes it anew; with part of it, or several holders, accordingly fewer"},
		{Name: "first_patience", Value: &p.FirstPatience, Default: 32, Most: 10000, Unit: "requests", Meaning: "the same for the first turn of a conversation, which can match shared prefixes only"},
		{Name: "shared_tokens", Value: &p.SharedTokens, Default: 512, Most: large, Unit: "tokens", Meaning: "so much of a match is worth no patience, for it is likely a prefix that everyone shares"},
		{Name: "typical_tokens", Value: &p.TypicalTokens, Default: 4096, Least: 1, Most: large, Unit: "tokens", Meaning: "uncached tokens of a typical request, while none was placed lately"},
		{Name: "token_micros", Value: &p.TokenMicros, Default: 100, Least: 0.001, Most: large, Unit: "µs", Meaning: "prefill of one uncached token, while no target's is measured"},
		{Name: "cpu_micros", Value: &p.CPUMicros, Default: 10, Most: large, Unit: "µs", Meaning: "loading one token's KV from host memory"},
		{Name: "disk_micros", Value: &p.DiskMicros, Default: 40, Most: large, Unit: "µs", Meaning: "loading one token's KV from disk"},
		{Name: "decode_micros", Value: &p.DecodeMicros, Default: 4, Most: large, Unit: "µs", Meaning: "what one token in flight at a decode target costs a stream there, over its whole answer"},
		{Name: "transfer_micros", Value: &p.TransferMicros, Default: 5, Most: large, Unit: "µs", Meaning: "transfer of one token's KV that the decode target does not hold"},
		{Name: "pressure_from", Value: &p.PressureFrom, Default: 0.9, Most: 0.99, Meaning: "share of KV memory in use from which it costs"},
		{Name: "pressure_seconds", Value: &p.PressureSeconds, Default: 2, Most: large, Unit: "s", Meaning: "what a target with all of its KV memory in use costs"},
		{Name: "home_share", Value: &p.HomeShare, Default: 0.8, Most: 1, Meaning: "share of the prompt that the conversation's last target is taken to hold, where no index knows"},
	}
}

// Defaults returns the parameters as they are when nothing is configured.
func Defaults() Params {
	var p Params
	p.Table().Reset()
	return p
}
