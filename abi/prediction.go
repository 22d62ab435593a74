package abi

import "unsafe"

// Prediction is the expected time of a request's legs at one candidate, in µs; 0: not
// known. An error is the expected absolute deviation of the time before it, also in µs.
// Its layout in memory is that of a row of the predictions table.
type Prediction struct {
	// Prefill is the time from the placement to the end of the prompt's prefill here,
	// for a leg of prefill or an aggregated leg. Wait is the part of it for requests
	// that were placed here before.
	Prefill, PrefillError, Wait float32
	// Start is the time from the end of prefill to the first token, if this candidate
	// decodes and another one computes the prompt.
	Start, StartError float32
	// Token is the time between two tokens of the answer, if this candidate decodes.
	Token, TokenError float32
	_                 float32
}

// PredictionSize is the size of a row of the predictions table.
const PredictionSize = 32

// The compiler checks the layout: an index out of range does not build.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(Prediction{})-PredictionSize]
	_ = [1]struct{}{}[unsafe.Offsetof(Prediction{}.Wait)-predictWait]
	_ = [1]struct{}{}[unsafe.Offsetof(Prediction{}.StartError)-predictStartError]
	_ = [1]struct{}{}[unsafe.Offsetof(Prediction{}.TokenError)-predictTokenError]
)

// appendPredictions appends the rows in the frame's layout.
func appendPredictions(dst []byte, rows []Prediction) []byte {
	if littleEndian && len(rows) > 0 {
		return append(dst, unsafe.Slice((*byte)(unsafe.Pointer(&rows[0])), len(rows)*PredictionSize)...)
	}
	for i := range rows {
		p := &rows[i]
		at := len(dst)
		dst = append(dst, make([]byte, PredictionSize)...)
		row := dst[at:]
		putFloat(row, predictPrefill, p.Prefill)
		putFloat(row, predictPrefillError, p.PrefillError)
		putFloat(row, predictWait, p.Wait)
		putFloat(row, predictStart, p.Start)
		putFloat(row, predictStartError, p.StartError)
		putFloat(row, predictToken, p.Token)
		putFloat(row, predictTokenError, p.TokenError)
	}
	return dst
}

// decodePredictions returns the predictions table of a frame of version 2 with the given
// number of candidates. ok is false if the table does not fit into the frame.
func decodePredictions(b, facts []byte, candidates int) (rows []Prediction, ok bool) {
	from := int(get32(facts, placeSize+identitySize+morePredictions))
	switch {
	case from == 0 || candidates == 0:
		return nil, true
	case from > len(b) || candidates > (len(b)-from)/PredictionSize:
		return nil, false
	case littleEndian && aligned(b, from):
		return unsafe.Slice((*Prediction)(unsafe.Pointer(&b[from])), candidates), true
	}
	rows = make([]Prediction, candidates)
	for i := range rows {
		row := b[from+i*PredictionSize:]
		rows[i] = Prediction{
			Prefill: getFloat(row, predictPrefill), PrefillError: getFloat(row, predictPrefillError), Wait: getFloat(row, predictWait),
			Start: getFloat(row, predictStart), StartError: getFloat(row, predictStartError),
			Token: getFloat(row, predictToken), TokenError: getFloat(row, predictTokenError),
		}
	}
	return rows, true
}
