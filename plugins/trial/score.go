package trial

import (
	"encoding/json"
	"fmt"

	"github.com/pdproxy/pdproxy/abi"
)

// scoreJSON is a frame of the score hook: the keys of place, and the leg.
type scoreJSON struct {
	placeJSON
	Leg     string `json:"leg"`     // prefill, decode or aggregated
	Prefill int32  `json:"prefill"` // row of the chosen prefill target; -1: none
}

// scoreLeg is the leg of a score frame.
type scoreLeg struct {
	phases  abi.Role
	prefill int32
}

// scoreDecision is the answer of one scorer.
type scoreDecision struct {
	Scores []float32 `json:"scores"` // of all rows; -1: removed; 0 also if the row cannot take the leg
	Values []float32 `json:"values"`
	Unit   string    `json:"unit"`
}

func readScore(text json.RawMessage) (Frame, error) {
	j := scoreJSON{placeJSON: placeJSON{Request: plainRequest(), Fixed: -1, Flow: abi.FlowPrefillFirst.String()}, Leg: abi.Prefill.String(), Prefill: -1}
	if err := strictly(text, &j); err != nil {
		return Frame{}, err
	}
	f, err := j.frame()
	if err != nil {
		return f, err
	}
	f.score = &scoreLeg{prefill: j.Prefill}
	switch j.Leg {
	case abi.Prefill.String():
		f.score.phases = abi.RolePrefill
	case abi.Decode.String():
		f.score.phases = abi.RoleDecode
	case abi.FlowAggregated.String():
		f.score.phases = abi.RoleBoth
	default:
		return f, fmt.Errorf("leg: %q is not prefill, decode or aggregated", j.Leg)
	}
	if n := int32(len(f.place.Candidates)); j.Prefill < -1 || j.Prefill >= n {
		return f, fmt.Errorf("prefill: %d is not a row of %d candidates", j.Prefill, n)
	}
	return f, nil
}

// scoreFacts returns the facts of the score hook. Each row that serves a phase of the leg is open.
func (f *Frame) scoreFacts() *abi.ScoreFacts {
	facts := &abi.ScoreFacts{PlaceFacts: f.place, Phases: f.score.phases, Prefill: f.score.prefill}
	for i, c := range f.place.Candidates {
		facts.Open = append(facts.Open, c.Roles&f.score.phases != 0 && int32(i) != f.score.prefill)
	}
	return facts
}

// encodeScore returns a score frame for one scorer, whose index is that of the policy in the header.
func (f *Frame) encodeScore(h *abi.Header) []byte {
	plain := *h
	plain.Policy = 0
	return abi.AppendScore(nil, &plain, f.scoreFacts(), []uint32{h.Policy})
}

// scored reads the scores of the answer.
func (f *Frame) scored(answer uint64, frame []byte) (any, error) {
	if answer != abi.ScoreDone {
		return nil, fmt.Errorf("the answer %#x is not %d: the scorer has not written all scores", answer, abi.ScoreDone)
	}
	facts := f.scoreFacts()
	rows, units := make([]abi.RowScore, len(facts.Open)), make([]abi.Scale, 1)
	abi.ReadRowScores(frame, facts, rows, units)
	d := scoreDecision{Unit: units[0].Unit()}
	for i, row := range rows {
		switch {
		case !facts.Open[i]:
			row = abi.RowScore{}
		case row.Score < 0:
			row.Score = abi.Removed
		}
		d.Scores, d.Values = append(d.Scores, row.Score), append(d.Values, row.Value)
	}
	return d, nil
}
