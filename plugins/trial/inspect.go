package trial

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
)

// Inspection describes a module that was loaded and started once.
type Inspection struct {
	ABI       string   `json:"abi"`      // version of proxy-wasm, "" for a module that only has hooks
	Contract  int      `json:"contract"` // version of the policy contract, 0 for a module without hooks
	Hooks     []string `json:"hooks"`    // exports that are called
	Policies  []string `json:"policies"` // "hook name" each; empty when hooks are not named
	Callbacks []string `json:"callbacks"`
	Imports   []string `json:"imports"`
	Needs     []string `json:"needs"`
	Headers   []string `json:"headers"` // request headers that the module declares
	SizeBytes int      `json:"size_bytes"`
	// These are the times of the first run on a machine with empty caches.
	CompileMS     float64 `json:"compile_ms"`
	InstantiateUS float64 `json:"instantiate_us"`
	MemoryBytes   uint32  `json:"memory_bytes"` // of one instance after its start
}

// Inspect loads a module, guarded, and starts one VM without a configuration.
// log receives the guest's log.
func Inspect(ctx context.Context, wasm []byte, log *slog.Logger) (_ *Inspection, err error) {
	module, err := host.Load(ctx, wasm, host.LoadOptions{Guarded: true, CompileWorkers: 2})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, module.Close(ctx)) }()
	notes, world := newNotebook(log, "")
	defer world.Close()
	limited, cancel := context.WithTimeout(ctx, host.StartBudget)
	defer cancel()
	began := time.Now()
	vm, err := module.NewVM(limited, notes)
	if err != nil {
		return nil, err
	}
	defer vm.Close(ctx)
	info, started := module.Info(), time.Since(began)
	i := &Inspection{
		ABI:           info.ABIVersion,
		Hooks:         append([]string{}, info.Hooks...),
		Policies:      []string{},
		Callbacks:     append([]string{}, info.Callbacks...),
		Imports:       append([]string{}, info.Imports...),
		SizeBytes:     info.SizeBytes,
		CompileMS:     float64(info.CompileTime.Microseconds()) / 1000,
		InstantiateUS: float64(started.Nanoseconds()) / 1000,
		MemoryBytes:   vm.MemorySize(),
	}
	return i, i.ask(limited, vm)
}

// ask reads the guest's list of its policies.
func (i *Inspection) ask(ctx context.Context, vm *host.VM) error {
	all, each, err := readNeeds(ctx, vm)
	if err != nil {
		return err
	}
	for _, n := range each {
		all |= n.Needs
	}
	i.Needs = append([]string{}, all.Names()...)
	headers, err := readHeaders(ctx, vm, all)
	if err != nil {
		return err
	}
	i.Headers = append([]string{}, headers...)
	if len(i.Hooks) > 0 {
		i.Contract = int(all.Version())
	}
	names, named, err := vm.Text(ctx, abi.ExportPolicies)
	if err != nil || !named || strings.TrimSpace(names) == "" { // hooks without names are called directly
		return err
	}
	for line := range strings.Lines(names) {
		if line = strings.TrimSpace(line); line != "" {
			i.Policies = append(i.Policies, line)
		}
	}
	// An SDK exports all hooks. Those without a policy are not called.
	i.Hooks = slices.DeleteFunc(i.Hooks, func(export string) bool {
		return !slices.ContainsFunc(i.Policies, func(line string) bool {
			word, _, _ := strings.Cut(line, " ")
			hook, ok := abi.ParseHook(word)
			return ok && hook.Export() == export
		})
	})
	return nil
}
