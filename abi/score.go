package abi

import (
	"slices"
	"unsafe"
)

// ScoreFacts are the facts of the score hook: those of place, and one leg of the request.
type ScoreFacts struct {
	*PlaceFacts
	Phases  Role  // phases of the leg: prefill, decode, or both for an aggregated request
	Prefill int32 // row of the chosen prefill target, if the leg is decode of two legs; else -1
	// Open has one entry for each candidate: the candidate can take the leg, and no scorer before
	// has removed it. Only open candidates get scores.
	Open []bool
}

// Scores is the answer of one scorer.
type Scores struct {
	Unit Scale      // unit of RowScore.Value, for explain
	Rows []RowScore // one for each candidate, zero before the call

	removed bool
}

// Remove removes the i-th candidate.
func (s *Scores) Remove(i int) { s.Rows[i].Score, s.removed = Removed, true }

// Close closes the candidates that the scorer has removed, and then expects the scores of the next
// scorer, which are rows. Only package guest and hosts of compiled-in scorers call it.
func (s *Scores) Close(open []bool, rows []RowScore) {
	if s.removed {
		CloseRemoved(open, s.Rows)
	}
	s.Unit, s.Rows, s.removed = 0, rows, false
}

// RowScore is the score of one candidate. Its layout in memory is that of a row of the table of
// scores.
type RowScore struct {
	Score float32 // 0 to 1, where 1 is best; negative: the scorer removes the candidate, see Scores.Remove
	Value float32 // the fact that the score was computed from, in the unit of the scorer, for explain
}

// Removed is the score by which a scorer removes a candidate.
const Removed = -1

// AskedScorer is a scorer in a score frame. Its layout in memory is that of a row of the table of
// scorers.
type AskedScorer struct {
	Index uint32 // among the score policies of the module
	Unit  Scale  // out: as Scores.Unit
}

// ScoreDone is the answer of a guest that has written all scores.
const ScoreDone = 1

// MaxScorers bounds the scorers in one score frame.
const MaxScorers = 64

// LegScores is how the score of each candidate for one leg came about, for explain and the lab.
type LegScores struct {
	Phases  Role
	Set     string        // name of the set of scorers
	Scorers []NamedScorer // as configured; constant
	Units   []Scale       // of each scorer
	// Rows has the scores of the first scorer for each candidate, then those of the second one.
	// Candidates that a scorer did not have to consider have the score Closed there.
	Rows []RowScore
}

// NamedScorer is the name and the weight of a scorer of a set.
type NamedScorer struct {
	Name   string
	Weight float32
}

// Closed is the score of a candidate that a scorer did not have to consider. Only LegScores has it.
const Closed = -2

// AddScores appends the scores of a leg to f.Scores, with room for those of each scorer. It reuses the
// memory of earlier decisions.
func (f *PlaceFacts) AddScores(phases Role, set string, scorers []NamedScorer) *LegScores {
	if len(f.Scores) < cap(f.Scores) {
		f.Scores = f.Scores[:len(f.Scores)+1]
	} else {
		f.Scores = append(f.Scores, LegScores{})
	}
	l := &f.Scores[len(f.Scores)-1]
	l.Phases, l.Set, l.Scorers = phases, set, scorers
	l.Units = slices.Grow(l.Units[:0], len(scorers))[:len(scorers)]
	n := len(scorers) * len(f.Candidates)
	l.Rows = slices.Grow(l.Rows[:0], n)[:n]
	return l
}

// Of returns the scores of the i-th scorer.
func (l *LegScores) Of(i int) []RowScore {
	n := len(l.Rows) / max(1, len(l.Scorers))
	return l.Rows[i*n : (i+1)*n]
}

// CloseRemoved closes the candidates that a scorer has removed. A scorer that removes all open
// candidates removes none, because a request needs a target; then kept is true.
func CloseRemoved(open []bool, rows []RowScore) (kept bool) {
	left, removed := 0, 0
	for i := range open {
		switch {
		case !open[i]:
		case rows[i].Score < 0:
			removed++
		default:
			left++
		}
	}
	if removed == 0 || left == 0 {
		return removed > 0
	}
	for i := range open {
		open[i] = open[i] && !(rows[i].Score < 0)
	}
	return false
}

// Offsets of the facts of a score frame, which is always one of version 2 and has the bytes of all
// optional facts of place.
const (
	scoreTraits  = placeSize + identitySize + moreSize
	scorePhases  = scoreTraits + traitsSize + headersSize
	scorePrefill = scorePhases + 4
	scoreScorers = scorePhases + 8  // offset, count, stride
	scoreOpen    = scorePhases + 20 // offset, count, stride
	scoreRows    = scorePhases + 32 // offset, count, stride
	scoreSize    = scorePhases + 48

	askedSize  = 8
	askedIndex = 0
	askedUnit  = 4

	scoredSize  = 8
	scoredScore = 0
	scoredValue = 4
)

// The compiler checks the layout: an index out of range does not build.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(AskedScorer{})-askedSize]
	_ = [1]struct{}{}[unsafe.Offsetof(AskedScorer{}.Unit)-askedUnit]
	_ = [1]struct{}{}[unsafe.Sizeof(RowScore{})-scoredSize]
	_ = [1]struct{}{}[unsafe.Offsetof(RowScore{}.Value)-scoredValue]
)

// FrameSize returns the size of the facts' frame for that number of scorers.
func (f *ScoreFacts) FrameSize(l *Layout, scorers int) int {
	place := *l
	place.Extended = true
	return f.PlaceFacts.FrameSize(&place) - placeSize - identitySize - moreSize - place.optional() + scoreSize + f.tables(scorers)
}

// optional returns the size of the optional facts of version 2 that l has.
func (l *Layout) optional() int { return l.added() - identitySize }

// tables returns the size of the tables that a score frame has beside those of place.
func (f *ScoreFacts) tables(scorers int) int {
	n := len(f.Candidates)
	return scorers*askedSize + scorers*n*scoredSize + (n+7)&^7
}

// AppendScore appends a frame of the score hook for these scorers, by their indices.
func AppendScore(dst []byte, h *Header, f *ScoreFacts, scorers []uint32) []byte {
	total := f.FrameSize(&h.Layout, len(scorers))
	w := begin(dst, HookScore, h, scoreSize, total)
	w.placeFacts(f.PlaceFacts)
	put32(w.facts, scorePhases, uint32(f.Phases))
	put32(w.facts, scorePrefill, uint32(f.Prefill))
	w.section(scoreScorers, len(scorers), askedSize)
	for _, index := range scorers {
		w.word(uint64(index)) // and no unit
	}
	n := len(f.Candidates)
	w.section(scoreRows, len(scorers)*n, scoredSize)
	from := len(w.dst)
	w.dst = w.dst[:from+len(scorers)*n*scoredSize]
	clear(w.dst[from:])
	w.section(scoreOpen, n, 1)
	from = len(w.dst)
	w.dst = w.dst[:from+(n+7)&^7]
	clear(w.dst[from+n:])
	for i, open := range f.Open {
		w.dst[from+i] = bit(open)
	}
	if h.Headers != nil {
		w.headers(scoreTraits+traitsSize, h.Headers, &f.Request)
	}
	w.added(placeSize, scoreTraits, h, &f.Request)
	w.request(&f.Request)
	w.adapters(f.PlaceFacts)
	return w.dst
}

// word appends 8 bytes.
func (w *writer) word(v uint64) {
	at := len(w.dst)
	w.dst = w.dst[:at+8]
	put64(w.dst, at, v)
}

// DecodeScore reads a score frame into f, whose PlaceFacts must be set. The scorers and their
// scores are in the memory of the frame: the scores of the i-th scorer for n candidates are
// rows[i*n : (i+1)*n]. spare is as in DecodePlace.
func DecodeScore(b []byte, f *ScoreFacts, spare *[]Candidate) (scorers []AskedScorer, rows []RowScore, ok bool) {
	facts, ok := factsOf(b, HookScore, scoreSize)
	if !ok || get16(b, offVersion) == 1 || !decodePlace(b, facts, f.PlaceFacts, scoreTraits, spare) {
		return nil, nil, false
	}
	f.Phases, f.Prefill = Role(get32(facts, scorePhases)), int32(get32(facts, scorePrefill))
	n := len(f.Candidates)
	asked, ok := sectionOf(b, facts, scoreScorers, askedSize)
	scores, ok2 := sectionOf(b, facts, scoreRows, scoredSize)
	open, ok3 := sectionOf(b, facts, scoreOpen, 1)
	if !ok || !ok2 || !ok3 || len(open) != n || len(scores) != len(asked)/askedSize*n*scoredSize || f.Prefill < -1 || int(f.Prefill) >= n {
		return nil, nil, false
	}
	f.Open = unsafe.Slice((*bool)(unsafe.Pointer(unsafe.SliceData(open))), n)
	return unsafe.Slice((*AskedScorer)(unsafe.Pointer(unsafe.SliceData(asked))), len(asked)/askedSize),
		unsafe.Slice((*RowScore)(unsafe.Pointer(unsafe.SliceData(scores))), len(scores)/scoredSize), true
}

// sectionOf returns the bytes of a table whose rows have exactly that size and are aligned in
// memory. ok is false for any other table.
func sectionOf(b, facts []byte, at, size int) (rows []byte, ok bool) {
	from, n, stride := int(get32(facts, at)), int(get32(facts, at+4)), int(get32(facts, at+8))
	switch {
	case n == 0:
		return nil, true
	case stride != size || from > len(b) || n > (len(b)-from)/size || !littleEndian || size > 1 && !aligned(b, from):
		return nil, false
	}
	return b[from : from+n*size], true
}

// ReadRowScores copies the scores that the guest wrote into a frame to rows, and the units of the
// scorers to units. frame is the result of AppendScore for f and as many scorers as units. A score
// that is not a number counts as 0, a score above 1 as 1.
func ReadRowScores(frame []byte, f *ScoreFacts, rows []RowScore, units []Scale) {
	at := HeaderSize + scoreSize + len(f.Candidates)*RowSize + len(f.Pairs)*pairSize + len(f.Details)*DetailSize + len(f.Predictions)*PredictionSize
	for i := range units {
		units[i] = Scale(get32(frame, at+i*askedSize+askedUnit)) & unitBits
	}
	at += len(units) * askedSize
	for i := range rows {
		row := frame[at+i*scoredSize:]
		score, value := getFloat(row, scoredScore), getFloat(row, scoredValue)
		if score != score {
			score = 0
		}
		if value-value != 0 { // infinite, or not a number
			value = 0
		}
		rows[i] = RowScore{max(min(score, 1), Removed), value}
	}
}
