package cmd

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/plugins"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// isScores reports whether a value of --policy means sets of scorers: scores, or scores/SET.
func isScores(name string) bool {
	return name == config.PlaceScores || strings.HasPrefix(name, config.PlaceScores+"/")
}

// addScores adds the sets of scorers of --config to cfg, and the plugins that have scorers. With
// scores/SET, all requests use that set.
func (r *replayFlags) addScores(cfg *plugins.Config, name string) error {
	file := config.Default()
	if r.config != "" {
		text, err := os.ReadFile(r.config)
		if err != nil {
			return err
		}
		if file, err = config.ParseFile(r.config, text); err != nil {
			return err
		}
	}
	file.Policy.Place, cfg.Place = config.PlaceScores, config.PlaceScores
	if _, set, one := strings.Cut(name, "/"); one {
		i := slices.IndexFunc(file.Scores, func(s config.ScoreSet) bool { return s.Name == set })
		if i < 0 {
			return fmt.Errorf("--config has no [[scores]] with the name %q", set)
		}
		chosen := file.Scores[i]
		chosen.Models, chosen.Classes = nil, nil
		file.Scores = []config.ScoreSet{chosen}
	}
	for _, p := range file.Plugins {
		if p.Phase == config.PhasePolicy {
			cfg.Plugins = append(cfg.Plugins, node.PluginSpec(&p))
		}
	}
	return node.AddScores(cfg, &file)
}
