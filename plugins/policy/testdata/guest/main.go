// Command guest is a policy module for tests. Its configuration sets the action of each
// hook, as in "place=loop leg=edit". The model "do:loop" makes any hook do that for one
// request.
package main

import (
	"strings"
	"time"
	"unsafe"

	"github.com/pdproxy/pdproxy/abi"
)

func main() {}

//go:wasmexport proxy_abi_version_0_2_1
func marker() {}

var buffer []byte

//go:wasmexport proxy_on_memory_allocate
func allocate(size uint32) *byte {
	buffer = make([]byte, max(size, 1))
	return &buffer[0]
}

//go:wasmimport env proxy_get_buffer_bytes
func bufferBytes(kind, start, most uint32, data *uint32, size *uint32) uint32

//go:wasmimport env proxy_log
func log(level uint32, text *byte, size uint32) uint32

//go:wasmimport env proxy_call_foreign_function
func foreign(name *byte, nameSize uint32, args *byte, argsSize uint32, result, size *uint32) uint32

// call calls a foreign function and panics when it does not answer OK.
func call(function, args string) {
	name, text := []byte(function), []byte(args)
	var result, size uint32
	if status := foreign(&name[0], uint32(len(name)), &text[0], uint32(len(text)), &result, &size); status != 0 {
		panic("refused")
	}
}

const pluginConfiguration = 7

var config string

//go:wasmexport proxy_on_vm_start
func vmStart(_, _ uint32) uint32 { return 1 }

//go:wasmexport proxy_on_configure
func configure(_, size uint32) uint32 {
	if size > 0 {
		var data, n uint32 // data is the address that allocate returned
		if bufferBytes(pluginConfiguration, 0, size, &data, &n) != 0 {
			return 0
		}
		config = string(buffer[:n])
	}
	text := []byte("configured with " + config)
	log(2, &text[0], uint32(len(text)))
	switch told("configure", "") {
	case "false":
		return 0
	case "trap":
		panic("told to")
	case "loop":
		for {
		}
	}
	return 1
}

var scratch []uint64

//go:wasmexport pdproxy_v1_scratch
func room(size uint32) *uint64 {
	if told("scratch", "") == "refuse" && size > 64<<10 {
		return nil
	}
	scratch = make([]uint64, (size+7)/8)
	return &scratch[0]
}

// told returns the action that the request's model or the configuration selects for a
// hook.
func told(hook, model string) string {
	if do, ok := strings.CutPrefix(model, "do:"); ok {
		return do
	}
	for _, word := range strings.Fields(config) {
		if key, value, _ := strings.Cut(word, "="); key == hook {
			return value
		}
	}
	return ""
}

var (
	hoard [][]byte
	turns int
)

// misbehave does an action that no policy should do.
func misbehave(do string) {
	turns++
	switch do {
	case "loop":
		for {
			turns++
		}
	case "sleep":
		time.Sleep(24 * time.Hour)
	case "trap":
		panic("told to")
	case "note":
		call(abi.ForeignNote, "first")
		call(abi.ForeignNote, "second")
	case "count":
		call(abi.ForeignCounter, "\x03\x00\x00\x00\x00\x00\x00\x00turns")
	case "grow":
		for {
			hoard = append(hoard, make([]byte, 1<<20))
		}
	}
}

func frame(ptr *byte, size uint32) []byte { return unsafe.Slice(ptr, size) }

var (
	planFacts  abi.PlanFacts
	placeFacts abi.PlaceFacts
	rows       []abi.Candidate
	mintFacts  abi.MintFacts
	legFacts   abi.LegFacts
	finish     abi.FinishFacts
	header     abi.Header
)

//go:wasmexport pdproxy_v1_on_plan
func onPlan(ptr *byte, size uint32) uint64 {
	if !abi.DecodePlan(frame(ptr, size), &planFacts) {
		return 255
	}
	do := told("plan", planFacts.Request.Model)
	misbehave(do)
	switch do {
	case "nonsense":
		return 77
	case "pass":
		return abi.PlanAnswer{}.Pack()
	case "reject":
		return abi.PlanAnswer{Decision: abi.PlanReject, Status: 429}.Pack()
	case "hold":
		return abi.PlanAnswer{Decision: abi.PlanHold, LimitMillis: 700}.Pack()
	case "limit":
		return abi.PlanAnswer{Decision: abi.PlanDisaggregate, LimitMillis: 1500}.Pack()
	}
	return abi.PlanAnswer{Decision: abi.PlanAggregate}.Pack()
}

//go:wasmexport pdproxy_v1_on_place
func onPlace(ptr *byte, size uint32) uint64 {
	b := frame(ptr, size)
	if _, ok := abi.DecodeHeader(b, &header); !ok {
		return 0
	}
	if !abi.DecodePlace(b, &placeFacts, &rows) {
		return 0
	}
	f := &placeFacts
	do := told("place", f.Request.Model)
	misbehave(do)
	if do == "nonsense" {
		return abi.PlaceDecision{Prefill: 7000, Decode: -5}.Pack()
	}
	if do == "score" {
		for i := range f.Candidates {
			f.Candidates[i].Score = float32(i) + 0.5
		}
		abi.StoreScores(b, f)
	}
	if do == "zone" { // both legs in zone a, only for tenant 7
		d := abi.PlaceDecision{Prefill: -1, Decode: -1}
		for i := range f.Details {
			switch {
			case f.Details[i].Zone != abi.LabelID("a") || f.Request.Tenant != 7:
			case f.Candidates[i].Roles == abi.RolePrefill:
				d.Prefill = int32(i)
			default:
				d.Decode = int32(i)
			}
			f.Candidates[i].Score = f.Details[i].Weight
		}
		abi.StoreScores(b, f)
		return d.Pack()
	}
	if do == "facts" { // reads the details and the prediction of each row
		for i := range f.Candidates {
			if d, q := &f.Details[i], &f.Predictions[i]; d.Weight != 1 || d.Running != -1 || d.Waiting != -1 || q.Prefill != 0 {
				panic("facts")
			}
		}
	}
	if do == "tier" { // the first pair only for an x-tier of gold, and an empty x-empty; x-absent is absent
		if l := f.Request.Headers; len(l) == 3 && l[0].Value == "gold" && !l[1].Present && l[2].Present && l[2].Value == "" {
			header.Policy = 1
		}
	}
	// The last row of each phase, or the first for the policy at index 1.
	d := abi.PlaceDecision{Prefill: -1, Decode: -1}
	for i, c := range f.Candidates {
		if f.Flow != abi.FlowAggregated && c.Roles == abi.RolePrefill && (header.Policy == 0 || d.Prefill < 0) {
			d.Prefill = int32(i)
		}
		if (f.Flow == abi.FlowAggregated || c.Roles == abi.RoleDecode) && (header.Policy == 0 || d.Decode < 0) {
			d.Decode = int32(i)
		}
	}
	if do == "scribble" { // over the whole frame, including the flag of scores
		for i := range b {
			b[i] = 0xff
		}
	}
	return d.Pack()
}

//go:wasmexport pdproxy_v1_on_mint
func onMint(ptr *byte, size uint32) uint64 {
	if !abi.DecodeMint(frame(ptr, size), &mintFacts) {
		return 1
	}
	do := told("mint", "")
	misbehave(do)
	switch do {
	case "nonsense":
		return 5
	case "absent":
		return 0
	}
	return abi.MinDisaggID + uint64(mintFacts.Counter)
}

//go:wasmexport pdproxy_v1_on_leg
func onLeg(ptr *byte, size uint32) uint64 {
	if !abi.DecodeLeg(frame(ptr, size), &legFacts) {
		return 255
	}
	do := told("leg", legFacts.Request.Model)
	misbehave(do)
	switch do {
	case "edit", "wrong", "many":
		whole := unsafe.Slice((*byte)(unsafe.Pointer(&scratch[0])), len(scratch)*8)
		at := int(size+7) &^ 7
		edits := abi.NewEdits(whole[at:])
		edits.SetHeader("x-by", legFacts.Engine)
		edits.SetField("seed", "7")
		for do == "many" && len(edits.Bytes()) < (abi.MaxEdits+1)*13 {
			edits.RemoveHeader("x")
		}
		if do == "wrong" {
			at = len(whole) - 3
		}
		abi.MarkEdits(whole, at, len(edits.Bytes()))
		return uint64(abi.LegEdited)
	case "again":
		return uint64(abi.LegPlaceAgain)
	case "nonsense":
		return 9
	}
	return uint64(abi.LegPass)
}

//go:wasmexport pdproxy_v1_on_finish
func onFinish(ptr *byte, size uint32) {
	if !abi.DecodeFinish(frame(ptr, size), &finish) {
		panic("finish frame")
	}
	misbehave(told("finish", finish.Request.Model))
}

var scoreFacts = abi.ScoreFacts{PlaceFacts: &placeFacts}

//go:wasmexport pdproxy_v1_on_score
func onScore(ptr *byte, size uint32) uint64 {
	asked, scores, ok := abi.DecodeScore(frame(ptr, size), &scoreFacts, &rows)
	if !ok {
		return 0
	}
	do := told("score", placeFacts.Request.Model)
	misbehave(do)
	if do == "nonsense" {
		return 7
	}
	n := len(placeFacts.Candidates)
	for i := range asked { // the later the row, the better, or with "first" the earlier
		asked[i].Unit = abi.UnitBlocks
		for row := range n {
			score := float32(row+1) / float32(n)
			switch {
			case do == "first":
				score = 1 - score
			case do == "odd" && row%2 == 1, do == "all":
				score = abi.Removed
			}
			scores[i*n+row] = abi.RowScore{Score: score, Value: float32(row)}
		}
	}
	return abi.ScoreDone
}
