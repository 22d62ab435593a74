package node

import (
	"fmt"
	"slices"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/plugins"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/policies/scorers"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// AddScores adds the sets of scorers of cfg to c, and at their end the usual set, which is for all
// other requests. The error is config.Problems.
func AddScores(c *plugins.Config, cfg *config.Config) error {
	if !cfg.ByScores() {
		return nil
	}
	var problems config.Problems
	var ids []string
	for i, s := range append(slices.Clone(cfg.Scores), config.UsualScores()) {
		set := plugins.ScoreSet{
			Key: fmt.Sprintf("scores[%d]", i), Name: s.Name, Models: s.Models, Weighted: s.Picker == config.PickerWeightedRandom,
		}
		for _, class := range s.Classes {
			set.Classes = append(set.Classes, abi.LabelID(class))
		}
		for n, scorer := range s.Scorers {
			one := plugins.Scorer{Name: scorer.Name, Weight: scorer.Weight, Leg: legs[scorer.Leg]}
			if !cfg.OwnScorer(scorer.Name) {
				built, key, err := scorers.Check(scorer.Name, scorer.Params)
				if err != nil {
					problems = append(problems, cfg.Problem(scorerKey(set.Key, n, key), scorerText(&scorer, err)))
					continue
				}
				if one.Builtin = built.ID; !slices.Contains(ids, built.ID) {
					ids = append(ids, built.ID)
				}
			}
			set.Scorers = append(set.Scorers, one)
		}
		c.Scores = append(c.Scores, set)
	}
	if len(problems) > 0 {
		return problems
	}
	c.Params += policies.ScorerText(ids)
	return nil
}

// legs are the phases of the legs that a scorer may be for.
var legs = map[string]abi.Role{config.LegPrefill: abi.RolePrefill, config.LegDecode: abi.RoleDecode}

// scorerKey returns the key of a problem of the n-th scorer of the set at the key set. param is the
// parameter that is wrong; "": another part.
func scorerKey(set string, n int, param string) string {
	key := fmt.Sprintf("%s.scorer[%d]", set, n)
	if param != "" {
		return config.ScorerParamKey(key, param)
	}
	return key + ".name"
}

// scorerText returns the text of a problem.
func scorerText(s *config.Scorer, err error) string {
	if slices.Contains(scorers.Names(), s.Name) {
		return s.Name + ": " + err.Error()
	}
	return err.Error() + config.DidYouMean(s.Name, scorers.Names())
}

// nativeScorer returns the compiled-in scorer of an ID.
func nativeScorer(id string) (plugins.NativeScorer, bool) {
	s, err := scorers.New(id)
	return plugins.NativeScorer{Score: s.Score, Needs: s.Needs, Headers: s.Headers}, err == nil
}
