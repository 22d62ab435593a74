package cmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"reflect"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
)

// trialStart bounds a guest's start, which in a proxy has more than a call's time.
const trialStart = 10 * time.Second

// trialScratch is what a policy's guest is asked for at its start, as by the proxy.
const trialScratch = 64 << 10

type trialOptions struct {
	config    string
	upstreams map[string]string // name to URL
	timeout   time.Duration
	repeat    int
	trusted   bool
	logLevel  string
}

func (a *app) pluginTestCommand() *cobra.Command {
	var o trialOptions
	c := &cobra.Command{
		Use:   "test MODULE FRAMES.json",
		Short: "Run a module on recorded frames; print decisions and cost",
		Long: `Run a policy's hooks on recorded facts, or a filter on recorded requests, and
print what was decided and what it cost.

FRAMES.json holds frames (see docs/plugins.md), or what "pdproxy explain --json"
printed. The exit code is 1 when a frame failed: the guest trapped or was late,
its answer breaks the contract, or it is not the one that the frame expects.`,
		Args: cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error { return a.pluginTest(args[0], args[1], o) },
	}
	c.Flags().StringVar(&o.config, "config", "", "the plugin's configuration, as in [[plugin]] config")
	c.Flags().StringToStringVar(&o.upstreams, "upstream", nil, "NAME=URL of an upstream that a filter may call, as in [[upstream]]")
	c.Flags().DurationVar(&o.timeout, "timeout", time.Second, "longest time of a call (in a proxy 5ms for policies and 1s for filters, by default)")
	c.Flags().IntVar(&o.repeat, "repeat", 1, "calls of each frame; the time shown is their mean")
	c.Flags().BoolVar(&o.trusted, "trusted", false, "as with trusted = true: faster code that nothing interrupts")
	c.Flags().StringVar(&o.logLevel, "guest-log", "info", "lowest level of the guest's log: trace, debug, info, warn, error or critical")
	return c
}

// trialResult is what came of one frame.
type trialResult struct {
	Frame    int      `json:"frame"`
	Name     string   `json:"name"`
	Hook     string   `json:"hook"`
	Policy   string   `json:"policy"`
	Decision any      `json:"decision"` // null when there is none
	US       float64  `json:"us"`
	Error    string   `json:"error"` // "" when the frame passed
	Notes    []string `json:"notes,omitempty"`
	Stack    string   `json:"stack,omitempty"` // of a guest that failed
}

func (a *app) pluginTest(modulePath, framesPath string, o trialOptions) error {
	level := -1
	for i, name := range logLevelNames {
		if name == o.logLevel {
			level = i
		}
	}
	if level < 0 || o.repeat < 1 || o.timeout <= 0 {
		return errors.New("--guest-log, --repeat and --timeout: a level, at least 1, more than 0")
	}
	wasm, err := os.ReadFile(modulePath)
	if err != nil {
		return err
	}
	file, err := os.Open(framesPath)
	if err != nil {
		return err
	}
	defer file.Close()
	frames, err := readFrames(file)
	if err != nil {
		return fmt.Errorf("%s: %w", framesPath, err)
	}
	t := &trial{trialOptions: o, wasm: wasm, log: a.err, level: host.LogLevel(level)}
	results, err := t.run(context.Background(), frames)
	if err != nil {
		return failed(fmt.Errorf("test %s: %w", modulePath, err))
	}
	if a.json {
		err = a.printJSON(results)
	} else {
		err = printResults(a.out, results)
	}
	bad := 0
	for _, r := range results {
		if r.Error != "" {
			bad++
		}
	}
	if bad > 0 {
		err = fmt.Errorf("test %s: %d of %d frames failed", modulePath, bad, len(results))
	}
	return failed(err)
}

func printResults(out io.Writer, results []trialResult) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "FRAME\tHOOK\tDECISION\tUS\tERROR")
	for _, r := range results {
		name := r.Name
		if name == "" {
			name = fmt.Sprint(r.Frame)
		}
		decision, _ := json.Marshal(r.Decision)
		if d, ok := r.Decision.(*httpDecision); ok {
			decision = []byte(d.brief())
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%.1f\t%s\n", name, r.Hook, decision, r.US, orNone(r.Error))
		for _, note := range r.Notes {
			fmt.Fprintf(w, "\t\tnote: %s\t\t\n", note)
		}
		for line := range strings.Lines(r.Stack) {
			fmt.Fprintf(w, "\t\tat %s\t\t\n", strings.TrimSpace(line))
		}
	}
	return w.Flush()
}

func orNone(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// trial runs frames through one module: those of hooks in a VM of its own, as
// the proxy calls policies, those of http in the proxy's chain of filters.
type trial struct {
	trialOptions
	wasm  []byte
	log   io.Writer
	level host.LogLevel

	world  *trialWorld
	module *host.Module // nil until a frame of a hook comes
	vm     *host.VM     // nil: the next frame starts one
	lines  []string     // of the list of policies, nil: hooks are not named
	stream *streamTrial // nil until a frame of http comes
}

// run runs all frames. The error is that of a module that cannot be used at all.
func (t *trial) run(ctx context.Context, frames []trialFrame) (results []trialResult, err error) {
	defer func() { err = errors.Join(err, t.close(ctx)) }()
	for i := range frames {
		f := &frames[i]
		r := trialResult{Frame: i, Name: f.Name, Hook: f.Hook, Policy: f.Policy}
		if f.http == nil {
			r.Hook = f.hook.String()
		}
		if err := t.load(ctx, f); err != nil {
			return nil, err
		}
		var err error
		if f.http != nil {
			err = t.stream.frame(ctx, f.http, t.repeat, &r)
		} else {
			err = t.frame(ctx, f, &r)
			r.Notes = t.world.takeNotes()
		}
		if err == nil {
			err = meets(f.Expect, r.Decision)
		}
		if err != nil {
			r.Error = err.Error()
		}
		if failure := new(host.Error); errors.As(err, &failure) {
			r.Stack, t.vm = failure.Stack, nil
		}
		results = append(results, r)
	}
	return results, nil
}

// load makes what a frame needs, once.
func (t *trial) load(ctx context.Context, f *trialFrame) (err error) {
	switch {
	case f.http != nil && t.stream == nil:
		levels := [...]slog.Level{slog.LevelDebug - 4, slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError, slog.LevelError + 4}
		log := slog.New(slog.NewTextHandler(t.log, &slog.HandlerOptions{Level: levels[t.level]}))
		t.stream, err = newStreamTrial(ctx, t.wasm, t.trialOptions, log)
	case f.http == nil && t.module == nil:
		t.world = newTrialWorld(t.log, t.level, t.config)
		if t.module, err = host.Load(ctx, t.wasm, host.LoadOptions{Guarded: !t.trusted, CompileWorkers: 2}); err != nil {
			return err
		}
		if len(t.module.Info().Hooks) == 0 {
			return errors.New("the module exports no hook (pdproxy_v1_on_...): frames of hooks are for policies, those of http for filters")
		}
		err = t.start(ctx)
	}
	return err
}

func (t *trial) close(ctx context.Context) error {
	var err error
	if t.stream != nil {
		err = t.stream.close()
	}
	if t.module != nil {
		err = errors.Join(err, t.module.Close(ctx))
	}
	return err
}

// start makes and configures the VM, as the proxy does.
func (t *trial) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, trialStart)
	defer cancel()
	vm, err := t.module.NewVM(ctx, t.world)
	if err != nil {
		return err
	}
	if t.module.Info().ABIVersion != "" {
		if err := vm.ContextCreate(ctx, 1, 0); err != nil {
			return err
		}
		for _, step := range []struct {
			name string
			call func(context.Context, uint32) (bool, error)
		}{{"proxy_on_vm_start", vm.VMStart}, {"proxy_on_configure", vm.Configure}} {
			switch ok, err := step.call(ctx, 1); {
			case err != nil:
				return err
			case !ok:
				return fmt.Errorf("%s answered false", step.name)
			}
		}
	}
	if _, _, err := vm.Scratch(ctx, trialScratch); err != nil {
		return err
	}
	names, named, err := vm.Text(ctx, abi.ExportPolicies)
	if named {
		t.lines = strings.Split(strings.TrimSpace(names), "\n")
	}
	t.vm = vm
	return err
}

// index finds a policy among those of its hook.
func (t *trial) index(f *trialFrame) (uint32, error) {
	if t.lines == nil {
		if f.Policy != "" {
			return 0, fmt.Errorf("policy: the module names none, so not %q either", f.Policy)
		}
		return 0, nil
	}
	var names []string
	for _, line := range t.lines {
		if hook, name, _ := strings.Cut(strings.TrimSpace(line), " "); hook == f.hook.String() {
			names = append(names, name)
		}
	}
	if f.Policy == "" && len(names) == 1 {
		return 0, nil
	}
	for i, name := range names {
		if name == f.Policy {
			return uint32(i), nil
		}
	}
	return 0, fmt.Errorf("policy: %q is not one of the module's for %s: %s", f.Policy, f.hook, strings.Join(names, ", "))
}

// frame asks the hook, and reads the answer of its last call.
func (t *trial) frame(ctx context.Context, f *trialFrame, r *trialResult) error {
	if t.vm == nil {
		if err := t.start(ctx); err != nil {
			return err
		}
	}
	hook, ok := t.vm.Hook(f.hook.Export())
	if !ok {
		return fmt.Errorf("the module has no export %s", f.hook.Export())
	}
	header := f.header()
	var err error
	if header.Policy, err = t.index(f); err != nil {
		return err
	}
	frame := f.encode(&header)
	var spent time.Duration
	var answer int64
	for range t.repeat {
		if answer, err = t.call(ctx, hook, frame, &spent); err != nil {
			return err
		}
	}
	r.US = float64(spent.Nanoseconds()) / 1000 / float64(t.repeat)
	view, _, err := t.vm.Scratch(ctx, uint32(max(trialScratch, len(frame))))
	if err != nil {
		return err
	}
	r.Decision, err = f.decision(uint64(answer), view, len(frame))
	return err
}

// call writes the frame and calls the hook once.
func (t *trial) call(ctx context.Context, hook *host.Hook, frame []byte, spent *time.Duration) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	view, at, err := t.vm.Scratch(ctx, uint32(max(trialScratch, len(frame))))
	if err != nil {
		return 0, err
	}
	copy(view, frame)
	began := time.Now()
	answer, err := hook.Call(ctx, at, uint32(len(frame)))
	*spent += time.Since(began)
	return answer, err
}

// meets compares a decision with the expected one: of an object only the named
// members, anything else as a whole.
func meets(expect json.RawMessage, decision any) error {
	if len(expect) == 0 {
		return nil
	}
	text, err := json.Marshal(decision)
	if err != nil {
		return err
	}
	var want, got any
	if err := errors.Join(exactly(expect, &want), exactly(text, &got)); err != nil {
		return err
	}
	if within(want, got) {
		return nil
	}
	return fmt.Errorf("the decision is %s, expected %s", text, expect)
}

// exactly decodes numbers as their digits: ids have more than a float64 holds.
func exactly(text []byte, into *any) error {
	dec := json.NewDecoder(strings.NewReader(string(text)))
	dec.UseNumber()
	return dec.Decode(into)
}

func within(want, got any) bool {
	members, ok := want.(map[string]any)
	if !ok {
		return reflect.DeepEqual(want, got)
	}
	object, ok := got.(map[string]any)
	if !ok {
		return false
	}
	for name, value := range members {
		if found, ok := object[name]; !ok || !within(value, found) {
			return false
		}
	}
	return true
}
