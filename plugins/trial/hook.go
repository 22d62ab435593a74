package trial

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/policy"
	"github.com/pdproxy/pdproxy/plugins/shared"
)

// scratchSize is the size in bytes of the scratch buffer that a policy's guest
// provides at its start, as in the proxy.
const scratchSize = 64 << 10

// root is the id of the only context of the VM.
const root = 1

// newNotebook returns the environment of a guest: a policy's world that no
// other guest uses.
func newNotebook(log *slog.Logger, config string) (*policy.Notebook, *policy.World) {
	world := policy.NewWorld(policy.Setting{
		Name: "trial", Config: config, Level: host.LowestLevel(log), Log: log,
		Store: new(shared.Store), Metrics: shared.NewMetricTable(new(shared.LocalMetrics)),
	})
	return &policy.Notebook{Env: world}, world
}

// hookTrial calls hooks, in one VM at a time.
type hookTrial struct {
	options *Options
	module  *host.Module
	world   *policy.World
	notes   *policy.Notebook
	vm      *host.VM // nil: the next frame starts one
	lines   []string // of the list of policies, nil: hooks are not named
	needs   abi.Needs
	each    []abi.PolicyNeeds // in addition to needs
	headers []string          // that the module declares
}

func newHookTrial(ctx context.Context, wasm []byte, o *Options) (*hookTrial, error) {
	module, err := host.Load(ctx, wasm, o.load())
	if err != nil {
		return nil, err
	}
	t := &hookTrial{options: o, module: module}
	t.notes, t.world = newNotebook(o.Log, o.Config)
	if len(module.Info().Hooks) == 0 {
		err = errors.New("the module exports no hook (pdproxy_v1_on_...): frames of hooks are for policies, those of http for filters")
	} else {
		err = t.start(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, t.close(ctx))
	}
	return t, nil
}

func (t *hookTrial) close(ctx context.Context) error {
	err := t.module.Close(ctx) // and its VMs
	t.world.Close()
	return err
}

// start makes and configures the VM, as the proxy does.
func (t *hookTrial) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, host.StartBudget)
	defer cancel()
	vm, err := t.module.NewVM(ctx, t.notes)
	if err != nil {
		return err
	}
	if t.module.Info().ABIVersion != "" {
		if err := vm.Begin(ctx, root); err != nil {
			return err
		}
	}
	if _, _, err := vm.Scratch(ctx, scratchSize); err != nil {
		return err
	}
	names, named, err := vm.Text(ctx, abi.ExportPolicies)
	if names = strings.TrimSpace(names); named && names != "" { // as in the proxy
		t.lines = strings.Split(names, "\n")
	}
	if err == nil {
		t.needs, t.each, err = readNeeds(ctx, vm)
	}
	if err == nil {
		all := t.needs
		for _, n := range t.each {
			all |= n.Needs
		}
		t.headers, err = readHeaders(ctx, vm, all)
	}
	t.vm = vm
	return err
}

// readNeeds returns the needs of a module for all its policies, and those of
// single policies in addition.
func readNeeds(ctx context.Context, vm *host.VM) (abi.Needs, []abi.PolicyNeeds, error) {
	all, _, err := vm.Value(ctx, abi.ExportNeeds)
	if err != nil {
		return 0, nil, err
	}
	list, _, err := vm.Text(ctx, abi.ExportPolicyNeeds)
	if err != nil {
		return 0, nil, err
	}
	each, err := abi.ParsePolicyNeeds(list)
	return abi.Needs(all), each, err
}

// readHeaders returns the names of the request headers that a module with these needs
// declares.
func readHeaders(ctx context.Context, vm *host.VM, needs abi.Needs) ([]string, error) {
	text, _, err := vm.Text(ctx, abi.ExportHeaders)
	if err != nil {
		return nil, err
	}
	names, err := abi.ParseHeaders(text)
	if err == nil && len(names) == 0 && needs&abi.NeedHeaders != 0 {
		err = errors.New("read headers: a policy needs headers, but " + abi.ExportHeaders + " declares none")
	}
	return names, err
}

// needsOf returns all needs of the policy.
func (t *hookTrial) needsOf(hook abi.Hook, policy string) abi.Needs {
	needs := t.needs
	for _, n := range t.each {
		if n.Hook == hook && n.Name == policy {
			needs |= n.Needs
		}
	}
	return needs
}

// index finds a policy among those of its hook. It returns the policy's index and
// name.
func (t *hookTrial) index(f *Frame) (uint32, string, error) {
	if t.lines == nil {
		if f.Policy != "" {
			return 0, "", fmt.Errorf("policy: the module does not name its policies, so %q cannot be found", f.Policy)
		}
		return 0, "", nil
	}
	var names []string
	for _, line := range t.lines {
		if hook, name, _ := strings.Cut(strings.TrimSpace(line), " "); hook == f.hook.String() {
			names = append(names, name)
		}
	}
	if f.Policy == "" && len(names) == 1 {
		return 0, names[0], nil
	}
	for i, name := range names {
		if name == f.Policy {
			return uint32(i), name, nil
		}
	}
	return 0, "", fmt.Errorf("policy: %q is not one of the module's for %s: %s", f.Policy, f.hook, strings.Join(names, ", "))
}

// frame calls the hook, and reads the answer of its last call. The next frame
// replaces a guest that failed.
func (t *hookTrial) frame(ctx context.Context, f *Frame, r *Result) (err error) {
	defer func() {
		r.Notes = t.notes.Take()
		if t.vm != nil && t.vm.Err() != nil {
			t.vm = nil
		}
	}()
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
	var policy string
	if header.Policy, policy, err = t.index(f); err != nil {
		return err
	}
	header.Layout = abi.LayoutFor(t.needsOf(f.hook, policy), t.headers)
	if err := f.undeclared(header.Headers); err != nil {
		return err
	}
	frame := f.encode(&header)
	var spent time.Duration
	var answer int64
	for range t.options.Repeat {
		if answer, err = t.call(ctx, hook, frame, &spent); err != nil {
			return err
		}
	}
	r.US = float64(spent.Nanoseconds()) / 1000 / float64(t.options.Repeat)
	view, _, err := t.vm.Scratch(ctx, uint32(max(scratchSize, len(frame))))
	if err != nil {
		return err
	}
	r.Decision, err = f.decision(uint64(answer), view, len(frame), &header)
	return err
}

// call writes the frame and calls the hook once.
func (t *hookTrial) call(ctx context.Context, hook *host.Hook, frame []byte, spent *time.Duration) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, t.options.Timeout)
	defer cancel()
	view, at, err := t.vm.Scratch(ctx, uint32(max(scratchSize, len(frame))))
	if err != nil {
		return 0, err
	}
	copy(view, frame)
	t.notes.Take() // drop the notes of an earlier call: the last call's are shown
	began := time.Now()
	answer, err := hook.Call(ctx, at, uint32(len(frame)))
	*spent += time.Since(began)
	return answer, err
}
