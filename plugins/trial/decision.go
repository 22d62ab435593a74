package trial

import (
	"errors"
	"fmt"
	"math"

	"github.com/pdproxy/pdproxy/abi"
)

// Decisions in the form in which they are printed and expected.

type planDecision struct {
	Plan    string `json:"plan"`
	Status  uint16 `json:"status"`   // of a reject; 0: 503
	LimitMS uint32 `json:"limit_ms"` // 0: as configured
}

type placeDecision struct {
	Prefill    string    `json:"prefill"` // "engine/rank", "" for none
	Decode     string    `json:"decode"`
	PrefillRow int32     `json:"prefill_row"` // -1: none
	DecodeRow  int32     `json:"decode_row"`
	Scores     []float32 `json:"scores,omitempty"` // of all rows, if the policy gave any
}

type mintDecision struct {
	ID uint64 `json:"id"`
}

type retainDecision struct {
	Millis     uint32  `json:"retain_ms"`
	Likelihood float64 `json:"likelihood"`
}

type evictDecision struct {
	Row int32 `json:"row"` // -1: none
}

type legDecision struct {
	Leg   string     `json:"leg"`
	Edits []editJSON `json:"edits,omitempty"`
}

type editJSON struct {
	Op    string `json:"op"`
	Name  string `json:"name"`
	Value string `json:"value"`
}

var planNames = [...]string{"pass", "aggregate", "disaggregate", "reject", "hold"}

// legNames are the names of answers by event.
var legNames = [...][4]string{
	abi.LegSend:   {"as_is", "edited"},
	abi.LegFailed: {"built_in_rule", "retry", "place_again", "give_up"},
}

var editNames = map[abi.EditOp]string{
	abi.EditSetHeader: "set_header", abi.EditAddHeader: "add_header", abi.EditRemoveHeader: "remove_header",
	abi.EditSetField: "set_field", abi.EditRemoveField: "remove_field",
}

// encode returns the bytes that the guest receives.
func (f *Frame) encode(h *abi.Header) []byte {
	switch f.hook {
	case abi.HookPlan:
		return abi.AppendPlan(nil, h, f.plan)
	case abi.HookPlace:
		return abi.AppendPlace(nil, h, f.place)
	case abi.HookMint:
		return abi.AppendMint(nil, h, f.mint)
	case abi.HookLeg:
		return abi.AppendLeg(nil, h, f.leg)
	case abi.HookRetain:
		return abi.AppendRetain(nil, h, f.retain)
	case abi.HookScore:
		return f.encodeScore(h)
	case abi.HookEvict:
		return abi.AppendEvict(nil, h, f.evict)
	default:
		return abi.AppendFinish(nil, h, f.finish)
	}
}

// decision reads the answer and returns an error where it breaks the contract.
// scratch begins with the frame, of that size, as the guest left it; h is the
// header of the frame.
func (f *Frame) decision(answer uint64, scratch []byte, size int, h *abi.Header) (any, error) {
	switch f.hook {
	case abi.HookPlan:
		a, ok := abi.UnpackPlan(answer)
		if !ok {
			return nil, fmt.Errorf("the answer %#x is not a plan", answer)
		}
		return planDecision{Plan: planNames[a.Decision], Status: a.Status, LimitMS: a.LimitMillis}, nil
	case abi.HookPlace:
		return f.placed(abi.UnpackPlace(answer), scratch[:size], h)
	case abi.HookScore:
		return f.scored(answer, scratch[:size])
	case abi.HookMint:
		switch {
		case answer == 0:
			return nil, errors.New("the policy returned no id")
		case answer < abi.MinDisaggID || answer >= abi.MaxDisaggID:
			return mintDecision{answer}, fmt.Errorf("the id %d is not within [%d, %d)", answer, abi.MinDisaggID, abi.MaxDisaggID)
		}
		return mintDecision{answer}, nil
	case abi.HookLeg:
		d, ok := abi.UnpackLeg(answer, f.leg.Event)
		if !ok {
			return nil, fmt.Errorf("the answer %#x is not a decision on a leg", answer)
		}
		r := legDecision{Leg: legNames[f.leg.Event][d]}
		var err error
		if f.leg.Event == abi.LegSend && d == abi.LegEdited {
			r.Edits, err = readEdits(scratch, size)
		}
		return r, err
	}
	if f.hook == abi.HookRetain {
		d, ok := abi.UnpackRetain(answer)
		if !ok {
			return nil, fmt.Errorf("the answer %#x is not a time and a likelihood", answer)
		}
		return retainDecision{min(d.Millis, f.retain.MostMillis), math.Round(1000*float64(d.Likelihood)/abi.FullLikelihood) / 1000}, nil
	}
	if f.hook == abi.HookEvict {
		row, ok := abi.UnpackEvict(answer, f.evict)
		if !ok {
			return nil, fmt.Errorf("the answer %#x is not a row of %d running requests", answer, len(f.evict.Running))
		}
		return evictDecision{row}, nil
	}
	return struct{}{}, nil
}

// placed checks a placement against the contract.
func (f *Frame) placed(d abi.PlaceDecision, frame []byte, h *abi.Header) (any, error) {
	r := placeDecision{PrefillRow: d.Prefill, DecodeRow: d.Decode}
	rows := f.place.Candidates
	last := int32(len(rows)) - 1
	if d.Prefill < -1 || d.Prefill > last || d.Decode < -1 || d.Decode > last {
		return r, fmt.Errorf("prefill row %d and decode row %d: the frame has rows 0 to %d", d.Prefill, d.Decode, last)
	}
	abi.ReadScores(frame, h, f.place)
	if f.place.Scored {
		for i := range rows {
			r.Scores = append(r.Scores, rows[i].Score)
		}
	}
	if d.Prefill >= 0 {
		r.Prefill = f.names[d.Prefill]
	}
	if d.Decode >= 0 {
		r.Decode = f.names[d.Decode]
	}
	aggregated := f.place.Flow == abi.FlowAggregated
	switch {
	case d.Decode < 0:
		return r, errors.New("no row for the decode leg")
	case aggregated && d.Prefill >= 0:
		return r, errors.New("an aggregated request uses only its decode row")
	case aggregated:
		return r, nil
	case d.Prefill < 0:
		return r, errors.New("no row for the prefill leg")
	case d.Prefill == d.Decode:
		return r, errors.New("both legs are on one target")
	case rows[d.Prefill].Roles&abi.RolePrefill == 0:
		return r, fmt.Errorf("%s does not serve prefill", r.Prefill)
	case rows[d.Decode].Roles&abi.RoleDecode == 0:
		return r, fmt.Errorf("%s does not serve decode", r.Decode)
	case rows[d.Prefill].Group != rows[d.Decode].Group:
		return r, fmt.Errorf("%s and %s are in different groups", r.Prefill, r.Decode)
	case f.place.Fixed >= 0 && d.Prefill != f.place.Fixed:
		return r, fmt.Errorf("prefill is fixed at row %d", f.place.Fixed)
	}
	return r, nil
}

// readEdits reads the list of edits that the guest left after the frame.
func readEdits(scratch []byte, size int) ([]editJSON, error) {
	offset, length := abi.EditsOf(scratch)
	if offset < size || length < 0 || length > len(scratch)-offset {
		return nil, fmt.Errorf("edits at %d, %d bytes: they do not lie after the frame and within the scratch buffer", offset, length)
	}
	var edits []editJSON
	for list := scratch[offset : offset+length]; len(list) > 0; {
		e, rest, ok := abi.NextEdit(list)
		if !ok {
			return edits, fmt.Errorf("edit %d breaks the contract", len(edits))
		}
		edits, list = append(edits, editJSON{Op: editNames[e.Op], Name: string([]byte(e.Name)), Value: string([]byte(e.Value))}), rest
	}
	return edits, nil
}
