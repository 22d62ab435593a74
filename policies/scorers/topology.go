package scorers

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/param"
)

// levels are the levels of closeness, from the closest.
const levels = 4

// levelScores are llm-d's (scorer/topologyaffinity), from the same host to the same region.
var levelScores = [levels + 1]float32{1, 0.2, 0.05, 0.02, 0}

// places are the labels of engines that name their place.
type places struct {
	names [levels]string // of host, rack, zone and region
	ids   [levels]uint32
}

func (s *places) table() param.Table {
	var t param.Table
	for i, level := range [levels]string{"host", "rack", "zone", "region"} {
		t = append(t, param.Param{Name: level, Text: &s.names[i], DefaultText: level, Meaning: "name of the label with the " + level + " of an engine"})
	}
	return t
}

func (s *places) ready() error {
	for i, name := range s.names {
		s.ids[i] = abi.LabelID(name)
	}
	return nil
}

// level returns the closest level that two rows share, 0 for the same host; levels: none.
func (s *places) level(f *abi.ScoreFacts, a, b int) int {
	for i, id := range s.ids {
		if v := f.Details[a].Value(id); v != 0 && v == f.Details[b].Value(id) {
			return i
		}
	}
	return levels
}

// peer returns the row of the chosen prefill target. ok is false if there is none, or if it has none
// of the labels.
func (s *places) peer(f *abi.ScoreFacts) (row int, ok bool) {
	row = int(f.Prefill)
	return row, row >= 0 && row < len(f.Details) && s.level(f, row, row) < levels
}

// topology scores the closeness to the chosen prefill target. Without one all scores are 0.
type topology struct{ places }

func (s *topology) score(f *abi.ScoreFacts, to *abi.Scores) {
	peer, ok := s.peer(f)
	for i, open := range f.Open {
		if open && ok {
			to.Rows[i].Score = levelScores[s.level(f, peer, i)]
		}
	}
}

// topologyFilter keeps the targets that are close to the chosen prefill target.
type topologyFilter struct {
	places
	least float64
}

func (s *topologyFilter) table() param.Table {
	return append(s.places.table(), param.Param{Name: "min_affinity", Value: &s.least, Default: 1, Least: 1, Most: levels, Meaning: "1: on the same host, 2: also in the same rack, 3: zone, 4: region"})
}

func (s *topologyFilter) score(f *abi.ScoreFacts, to *abi.Scores) {
	peer, ok := s.peer(f)
	for i, open := range f.Open {
		if open && ok && s.level(f, peer, i) >= int(s.least) {
			to.Remove(i)
		}
	}
}
