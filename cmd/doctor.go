package cmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/doctor"
	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/cmd/terminal"
	"github.com/pdproxy/pdproxy/proxy/config"
)

func (a *app) doctorCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "doctor config.toml",
		Short: "Probe every engine of a configuration once, and say what does not fit",
		Long: `Validate a configuration as pdproxy check does, ask its sources of engines once,
and probe every engine as the proxy does. Print what each engine offers, which pairs
of prefill and decode fit, and findings: what is wrong on which side, the
configuration of the proxy or the flags of the engine, and the key or flag that
mends it.

The command sends only GET requests and connects to the publishers of KV events.
It generates nothing and changes no engine. A proxy may run at the same time.
Engines that register with a running proxy are not found: see pdproxy status.

The exit code is 0 if nothing is wrong, 1 if a finding stops requests, 2 if the
configuration is invalid, and 5 if there are only warnings. Notes change nothing.`,
		Example: `  pdproxy doctor config.toml
  pdproxy doctor --json config.toml | jq -r '.findings[] | select(.severity == "error") | .problem'`,
		Args: arguments("config.toml"),
		RunE: func(_ *cobra.Command, args []string) error {
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return a.doctor(ctx, args[0])
		},
	}
	return a.addJSON(c)
}

// doctor checks a file and examines its engines.
func (a *app) doctor(ctx context.Context, path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	cfg, problems := config.Draft(path, data)
	if cfg != nil {
		problems = checkRest(cfg, problems, slog.New(slog.DiscardHandler))
	}
	if len(problems) > 0 {
		return problems
	}
	report, err := examine(ctx, cfg)
	if err != nil {
		return err
	}
	if a.json {
		err = a.printJSON(report)
	} else {
		err = a.printReport(report)
	}
	if err != nil {
		return exit.Failed(err)
	}
	return doctorStatus(report)
}

// examine finds and examines the engines of a valid configuration.
func examine(ctx context.Context, cfg *config.Config) (*doctor.Report, error) {
	troubles := &troubleLog{}
	registry, missing, err := node.FindEngines(ctx, cfg, slog.New(troubles))
	if err != nil {
		return nil, err
	}
	defer registry.Close()
	report := doctor.Examine(ctx, cfg, registry)
	if ctx.Err() != nil {
		return nil, exit.Failed(errors.New("interrupted"))
	}
	if missing > 0 {
		report.Add(doctor.Finding{Severity: doctor.Error, Side: doctor.Config, Fix: "the keys of [discovery]",
			Problem: fmt.Sprintf("%d of the sources of engines named none in time", missing)})
	}
	for _, text := range troubles.list {
		report.Add(doctor.Finding{Severity: doctor.Warning, Side: doctor.Config, Problem: text, Fix: "the keys of [discovery]"})
	}
	for _, w := range cfg.Warnings() {
		report.Add(doctor.Finding{Severity: doctor.Warning, Side: doctor.Config, Problem: w.String()})
	}
	return report, nil
}

// doctorStatus returns the error with the exit code of a report.
func doctorStatus(r *doctor.Report) error {
	counts := map[doctor.Severity]int{}
	for _, f := range r.Findings {
		counts[f.Severity]++
	}
	text := fmt.Errorf("errors: %d, warnings: %d", counts[doctor.Error], counts[doctor.Warning])
	switch r.Status {
	case doctor.Errors:
		return exit.Failed(text)
	case doctor.Warnings:
		return &exit.Error{Code: exit.Warnings, Err: text}
	}
	return nil
}

// listedPairs and listedEngines bound the pairs that the text of a report lists, and the engines of one
// finding.
const (
	listedPairs   = 20
	listedEngines = 8
)

// printReport writes a report as text.
func (a *app) printReport(r *doctor.Report) error {
	columns, _, tty := terminal.Size(a.out)
	v := statusView{columns: columns, color: tty && os.Getenv("NO_COLOR") == ""}
	engines := section{name: "ENGINES", head: []string{"ENGINE", "ROLE", "CONNECTOR", "STATE", "KIND", "VERSION", "MODEL", "RANKS", "BLOCK", "EVENTS", "REPLAY", "LOAD", "SLEEP", "ROUTES"}, numbers: ".......##....."}
	for _, e := range r.Engines {
		state, attention := "ready", good
		switch {
		case !e.Reachable:
			state, attention = "unreachable", bad
		case !e.Ready:
			state, attention = "not ready", bad
		}
		engines.add(state, attention, engineCells(e, state)...)
	}
	pairs := section{name: "PAIRS", head: []string{"PREFILL", "DECODE", "FITS", "REASON"}, numbers: "...."}
	for _, p := range r.Pairs {
		state, attention := "fits", good
		if !p.Fits {
			state, attention = "do not fit", bad
		}
		pairs.add(state, attention, p.Prefill, p.Decode, map[bool]string{true: "yes", false: "no"}[p.Fits], p.Reason)
	}
	pairs.limit(listedPairs)
	lines := append([]line{engines.summary()}, engines.table()...)
	lines = append(lines, line{}, line{{text: fmt.Sprintf("%-10s%d: %d fit, %d do not", pairs.name, r.Fit+r.Misfits, r.Fit, r.Misfits)}})
	if r.Fit+r.Misfits > 0 {
		lines = append(lines, pairs.table()...)
	}
	var text strings.Builder
	for _, l := range lines {
		text.WriteString(v.text(l) + "\n")
	}
	v.columns = 0 // findings are not cut
	text.WriteByte('\n')
	for _, l := range findingLines(r) {
		text.WriteString(v.text(l) + "\n")
	}
	text.WriteString("status: " + r.Status + "\n")
	_, err := io.WriteString(a.out, text.String())
	return err
}

// engineCells are the columns of an engine.
func engineCells(e *doctor.Engine, state string) []string {
	models := ""
	if len(e.Models) > 0 {
		if models = e.Models[0]; len(e.Models) > 1 {
			models += fmt.Sprintf(" +%d", len(e.Models)-1)
		}
	}
	replay := "no"
	for _, p := range e.Publishers {
		if p.Replay != "" {
			replay = "yes"
		}
	}
	role := e.Role
	if e.Mode != "" && e.Mode != role && (e.Mode != "null" || role != config.RoleBoth) {
		role += " (is " + e.Mode + ")"
	}
	sleep := "-"
	if e.Ready {
		sleep = map[bool]string{true: "asleep", false: "awake"}[e.Asleep]
	}
	number := func(n int) string { return strings.TrimPrefix(fmt.Sprint(n), "0") }
	return []string{
		e.Name, role, e.Connector, state, cmp.Or(e.Kind, "-"), cmp.Or(e.Version, "-"), cmp.Or(models, "-"), number(e.Ranks), number(e.BlockTokens),
		e.Events, replay, cmp.Or(e.Load, "-"), sleep, cmp.Or(strings.Join(e.APIs, " "), "-"),
	}
}

// findingLines are the findings as text, the worst ones first, and equal ones about several engines
// as one.
func findingLines(r *doctor.Report) (lines []line) {
	attention := map[doctor.Severity]int{doctor.Error: bad, doctor.Warning: doubtful, doctor.Note: good}
	engines := make(map[doctor.Finding][]string) // by the finding without its engine
	for _, f := range r.Findings {
		same := f
		same.Engine = ""
		engines[same] = append(engines[same], f.Engine)
	}
	for _, severity := range []doctor.Severity{doctor.Error, doctor.Warning, doctor.Note} {
		for _, f := range r.Findings {
			f.Engine = ""
			names, unlisted := engines[f]
			if f.Severity != severity || !unlisted {
				continue
			}
			delete(engines, f)
			who := strings.Join(names[:min(len(names), listedEngines)], ", ")
			if more := len(names) - listedEngines; more > 0 {
				who += fmt.Sprintf(" and %d more", more)
			}
			if who != "" {
				who += ": "
			}
			lines = append(lines, line{{string(severity), attention[severity]}, {text: printable(": " + who + f.Problem)}})
			if f.Fix != "" {
				lines = append(lines, line{{text: fmt.Sprintf("  mend (%s): %s", f.Side, printable(f.Fix))}})
			}
		}
	}
	return lines
}

// troubleLog keeps the texts of the first warnings and errors that the sources of engines log.
type troubleLog struct {
	mu   sync.Mutex
	list []string
}

// maxTroubles bounds the kept texts.
const maxTroubles = 32

func (*troubleLog) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }
func (t *troubleLog) WithAttrs([]slog.Attr) slog.Handler         { return t }
func (t *troubleLog) WithGroup(string) slog.Handler              { return t }

// Handle implements slog.Handler.
func (t *troubleLog) Handle(_ context.Context, r slog.Record) error {
	text := r.Message
	r.Attrs(func(a slog.Attr) bool {
		text += fmt.Sprintf(", %s: %v", a.Key, a.Value)
		return true
	})
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.list) < maxTroubles {
		t.list = append(t.list, text)
	}
	return nil
}
