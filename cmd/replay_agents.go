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

// defaultRetain is the retain policy of a proxy. A trace retains no KV, so that any name fits.
var defaultRetain = config.Default().Policy.Retain

// replayAgents measures retain policies on sessions of agents.
func (a *app) replayAgents(r *replayFlags, log *slog.Logger) error {
	switch {
	case len(r.traces) > 0:
		return fmt.Errorf("--agents: not with --trace")
	case r.variant != "":
		return fmt.Errorf("--variant: not with --agents")
	case r.html != "":
		return fmt.Errorf("--html: not with --agents")
	case r.ttft != 0 || r.itl != 0:
		return fmt.Errorf("--slo-ttft and --slo-itl: not with --agents")
	case len(r.policies) > 1:
		return fmt.Errorf("--policy: one with --agents")
	case len(r.policies) == 0:
		r.policies = []string{"kv_aware"}
	}
	if len(r.retains) == 0 {
		r.retains = policies.RetainNames()
	}
	if err := r.readModel(); err != nil {
		return err
	}
	params, err := parseParams(r.params)
	if err != nil {
		return err
	}
	lab, err := replay.NewAgents(r.fleet, r.agents)
	if err != nil {
		return err
	}
	var rows []*replay.AgentRow
	for _, retain := range r.retains {
		p, err := r.newPlacer(r.policies[0], retain, params, log)
		if err != nil {
			return err
		}
		rows = append(rows, lab.Run(retain, p, p.set.Retain))
		if err := p.set.Close(context.Background()); err != nil {
			return exit.Failed(err)
		}
	}
	report := lab.Report(rows)
	if a.json {
		return exit.Failed(a.printJSON(report))
	}
	return exit.Failed(report.WriteTable(a.out))
}
