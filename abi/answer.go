package abi

import (
	"math"
	"unsafe"
)

// Pack returns the answer as pdproxy_v1_on_plan returns it.
func (a PlanAnswer) Pack() uint64 {
	return uint64(a.Decision) | uint64(a.Status)<<16 | uint64(a.LimitMillis)<<32
}

// UnpackPlan is the inverse of PlanAnswer.Pack. ok is false for a value that
// the contract does not allow: an unknown decision, an undefined bit, a status
// that is not an error's, or a status without a reject.
func UnpackPlan(v uint64) (a PlanAnswer, ok bool) {
	a = PlanAnswer{Decision: PlanDecision(v), Status: uint16(v >> 16), LimitMillis: uint32(v >> 32)}
	switch {
	case a.Decision > PlanHold, v>>8&0xff != 0:
	case a.Status == 0, a.Decision == PlanReject && a.Status >= 400 && a.Status <= 599:
		return a, true
	}
	return PlanAnswer{}, false
}

// Pack returns the decision as pdproxy_v1_on_place returns it.
func (d PlaceDecision) Pack() uint64 { return uint64(uint32(d.Decode)) | uint64(uint32(d.Prefill))<<32 }

// UnpackPlace is the inverse of PlaceDecision.Pack. It does not check that the
// rows exist and suit the legs: the caller does.
func UnpackPlace(v uint64) PlaceDecision {
	return PlaceDecision{Prefill: int32(v >> 32), Decode: int32(v)}
}

// UnpackLeg decodes the answer of pdproxy_v1_on_leg to the event. ok is false
// for a value that the contract does not allow.
func UnpackLeg(v uint64, e LegEvent) (d LegDecision, ok bool) {
	last := LegGiveUp
	if e == LegSend {
		last = LegEdited
	}
	if v > uint64(last) {
		return LegPass, false
	}
	return LegDecision(v), true
}

// StoreScores writes the scores of f's candidates into the rows of its frame
// and sets the flag OutScored and the scale for the host. Guests call it.
func StoreScores(frame []byte, f *PlaceFacts) {
	facts := frame[get32(frame, offHeader):]
	from, stride := int(get32(facts, placeRows)), int(get32(facts, placeRows+8))
	if len(f.Candidates) != 0 && unsafe.Pointer(&f.Candidates[0]) != unsafe.Pointer(&frame[from]) { // else the candidates are the frame's own rows
		for i := range f.Candidates {
			put32(frame, from+rowScore+i*stride, math.Float32bits(f.Candidates[i].Score))
		}
	}
	put32(frame, offOut, get32(frame, offOut)|OutScored|uint32(f.Scale))
}

// ReadScores copies the scores that the guest wrote into the frame of f to the
// candidates of f. It sets f.Scored and f.Scale if the guest set the flag OutScored. frame
// is the result of AppendPlace for h and f. ReadScores trusts only the flag and the
// scores in it. A score that is not a finite number counts as 0.
func ReadScores(frame []byte, h *Header, f *PlaceFacts) {
	out := get32(frame, offOut)
	if out&OutScored == 0 {
		return
	}
	f.Scored, f.Scale = true, Scale(out&^OutScored)
	at := HeaderSize + placeSize + rowScore // the rows begin after the facts
	if h.Extended {
		at += moreSize + h.added()
	}
	for i := range f.Candidates {
		score := math.Float32frombits(get32(frame, at+i*RowSize))
		if score-score != 0 { // infinite, or not a number
			score = 0
		}
		f.Candidates[i].Score = score
	}
}
