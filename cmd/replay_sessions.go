package cmd

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/internal/replay"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// defaultRetain is the retain policy of a proxy. A trace without turns retains no KV, so that any name fits.
var defaultRetain = config.Default().Policy.Retain

// replaySessions measures retain policies on the conversations of traces, or on sessions of agents.
func (a *app) replaySessions(r *replayFlags, log *slog.Logger) error {
	if err := r.checkSessions(a.json); err != nil {
		return err
	}
	if err := r.readModel(); err != nil {
		return err
	}
	params, err := parseParams(r.params)
	if err != nil {
		return err
	}
	labs, err := r.sessionLabs(log)
	if err != nil {
		return err
	}
	page, err := r.page()
	if err != nil {
		return err
	}
	defer page.Close()
	var reports []*replay.SessionReport
	for _, lab := range labs {
		var rows []*replay.SessionRow
		for _, retain := range r.retains {
			for _, stable := range r.filters() {
				p, err := r.newPlacer(r.policies[0], retain, params, log)
				if err != nil {
					return fmt.Errorf("--policy %s, --retain %s: %w", r.policies[0], retain, err)
				}
				rows = append(rows, lab.Run(p, replay.Setting{Retain: retain, Decide: p.set.Retain, Stable: stable}))
				if err := p.set.Close(context.Background()); err != nil {
					return exit.Failed(err)
				}
			}
		}
		reports = append(reports, lab.Report(rows))
	}
	return exit.Failed(writeReports(a, reports, page, replay.WriteSessionHTML))
}

// checkSessions checks the flags for sessions, and sets the defaults of --policy and --retain.
func (r *replayFlags) checkSessions(json bool) error {
	mode := "--agents"
	if r.turns {
		mode = "--turns"
	}
	switch {
	case r.turns && r.agents != 0:
		return fmt.Errorf("--agents: not with --turns")
	case r.turns && len(r.traces) == 0:
		return fmt.Errorf("--turns: needs --trace")
	case !r.turns && len(r.traces) > 0:
		return fmt.Errorf("--agents: not with --trace")
	case !r.turns && r.variant != "":
		return fmt.Errorf("--variant: not with --agents")
	case len(r.traces) > 1 && json:
		return fmt.Errorf("--trace: one with --json")
	case r.ttft != 0 || r.itl != 0:
		return fmt.Errorf("--slo-ttft and --slo-itl: not with %s", mode)
	case len(r.policies) > 1:
		return fmt.Errorf("--policy: one with %s", mode)
	case !(r.fleet.Volatile >= 0 && r.fleet.Volatile <= 1):
		return fmt.Errorf("--volatile: must be between 0 and 1")
	}
	if len(r.policies) == 0 {
		r.policies = []string{"kv_aware"}
	}
	if len(r.retains) == 0 {
		r.retains = policies.RetainNames()
	}
	return nil
}

// filters returns the settings of the filter stable_prefix to measure. Without volatile sessions the filter
// changes nothing.
func (r *replayFlags) filters() []bool {
	if r.fleet.Volatile == 0 {
		return []bool{false}
	}
	return []bool{false, true}
}

// sessionLabs sets up the fleet for each trace, or for agents.
func (r *replayFlags) sessionLabs(log *slog.Logger) (labs []*replay.SessionLab, err error) {
	if !r.turns {
		lab, err := replay.NewAgents(r.fleet, r.agents)
		return []*replay.SessionLab{lab}, err
	}
	for _, path := range r.traces {
		t, err := r.trace(path, log)
		if err != nil {
			return nil, err
		}
		lab, err := replay.NewConversations(r.fleet, t)
		if err != nil {
			return nil, fmt.Errorf("--turns: %s: %w", path, err)
		}
		labs = append(labs, lab)
	}
	return labs, nil
}
