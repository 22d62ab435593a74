package policy

import "github.com/pdproxy/pdproxy/abi"

// builtinScores is the label of the built-in scorers.
const builtinScores = "scores"

// Scorer is one scorer of a version. Its policy is that of the score hook, under the name "".
type Scorer struct {
	Name  string // within the module; "" if the module gives no names
	Index uint32
	Needs abi.Needs // in addition to those of the module
}

// Scorers returns the scorers of the module in its order. The caller must not change the list.
func (v *Version) Scorers() []Scorer { return v.scorers }

// Scorer returns the scorer of that name.
func (v *Version) Scorer(name string) (Scorer, bool) {
	if s := v.scorer(name); s != nil {
		return *s, true
	}
	return Scorer{}, false
}

func (v *Version) scorer(name string) *Scorer {
	for i := range v.scorers {
		if v.scorers[i].Name == name {
			return &v.scorers[i]
		}
	}
	return nil
}

// Score calls the score hook for the scorers with these indices. It writes their scores for each
// candidate to rows, and their units to units.
func (p *Policy) Score(f *abi.ScoreFacts, scorers []uint32, rows []abi.RowScore, units []abi.Scale) (reason string) {
	var c call
	if c.begin(p, f.FrameSize(&p.layout, len(scorers))) {
		frame := abi.AppendScore(c.scratch[:0], &c.header, f, scorers)
		c.vm.notes.show(f.Candidates)
		if answer, ok := c.run(frame); ok {
			c.vm.notes.show(nil)
			if frame, ok = c.vm.View(c.at, uint32(len(frame))); !ok || answer != abi.ScoreDone {
				c.reason = Nonsense
			} else {
				abi.ReadRowScores(frame, f, rows, units)
			}
			f.Notes = append(f.Notes, c.notes...)
		}
	}
	return c.end()
}

// scoreFrames are the made-up requests for the score hook: the legs of the tables, with all scorers.
func (p *Policy) scoreFrames(tables []abi.PlaceFacts) (frames []abi.ScoreFacts, scorers []uint32) {
	for _, s := range p.version.scorers[:min(len(p.version.scorers), abi.MaxScorers)] {
		scorers = append(scorers, s.Index)
	}
	for i := range tables {
		f := abi.ScoreFacts{PlaceFacts: &tables[i], Phases: abi.RolePrefill, Prefill: -1}
		switch {
		case tables[i].Flow == abi.FlowAggregated:
			f.Phases = abi.RoleBoth
		case tables[i].Fixed >= 0:
			f.Phases, f.Prefill = abi.RoleDecode, tables[i].Fixed
		}
		for _, c := range tables[i].Candidates {
			f.Open = append(f.Open, c.Roles&f.Phases != 0)
		}
		frames = append(frames, f)
	}
	return frames, scorers
}

// allNeeds returns the needs of the policy and of its module; for the score hook, of all scorers.
func (p *Policy) allNeeds() abi.Needs {
	needs := p.Needs | p.version.needs
	if p.Hook == abi.HookScore {
		for i := range p.version.scorers {
			needs |= p.version.scorers[i].Needs
		}
	}
	return needs
}
