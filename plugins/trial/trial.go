// Package trial runs a module on recorded inputs, outside of a proxy, and
// describes it: `pdproxy plugin test` and `inspect` show the results. Frames of
// hooks go to a VM of the trial's own. The trial calls it as the proxy calls
// policies, but returns the reason why an answer breaks the contract. Frames of
// http go through the proxy's chain of filters.
//
// The decisions behind this package are in docs/design/plugins.md.
package trial

import (
	"context"
	"errors"
	"log/slog"
	"net/url"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
)

// Options are the options of Run.
type Options struct {
	Config    string              // as in [[plugin]] config
	Upstreams map[string]*url.URL // upstreams that a filter may call, by name
	Timeout   time.Duration       // of one call, more than 0
	Repeat    int                 // calls of each frame, at least 1
	Trusted   bool                // runs in the runtime that cannot interrupt loops
	Log       *slog.Logger        // receives the guest's log, from the lowest level that it accepts
}

func (o *Options) load() host.LoadOptions {
	return host.LoadOptions{Guarded: !o.Trusted, CompileWorkers: 2}
}

// Result is the result of one frame.
type Result struct {
	Frame    int      `json:"frame"`
	Name     string   `json:"name"`
	Hook     string   `json:"hook"`
	Policy   string   `json:"policy"`
	Decision any      `json:"decision"` // nil when there is none; a fmt.Stringer if its JSON is long
	US       float64  `json:"us"`       // mean time of its calls in the guest, in µs
	Error    string   `json:"error"`    // "" when the frame passed
	Notes    []string `json:"notes,omitempty"`
	Stack    string   `json:"stack,omitempty"` // of a guest that failed
}

// Run runs all frames in their order. The error reports a module that cannot be
// used at all.
func Run(ctx context.Context, wasm []byte, frames []Frame, o Options) (results []Result, err error) {
	t := &trial{options: &o, wasm: wasm}
	defer func() { err = errors.Join(err, t.close(ctx)) }()
	for i := range frames {
		r, err := t.run(ctx, &frames[i])
		if err != nil {
			return nil, err
		}
		r.Frame = i
		results = append(results, r)
	}
	return results, nil
}

// trial holds the loaded module: a VM for hooks and a filter for http, each
// made when the first frame needs it.
type trial struct {
	options *Options
	wasm    []byte
	hooks   *hookTrial
	streams *streamTrial
}

// run runs one frame.
func (t *trial) run(ctx context.Context, f *Frame) (Result, error) {
	r := Result{Name: f.Name, Hook: f.Hook, Policy: f.Policy}
	if f.http == nil {
		r.Hook = f.hook.String()
	}
	if err := t.load(ctx, f); err != nil {
		return r, err
	}
	var err error
	if f.http != nil {
		err = t.streams.frame(ctx, f.http, t.options.Repeat, &r)
	} else {
		err = t.hooks.frame(ctx, f, &r)
	}
	if err == nil {
		err = meets(f.Expect, r.Decision)
	}
	if err != nil {
		r.Error = err.Error()
	}
	if failure := new(host.Error); errors.As(err, &failure) {
		r.Stack = failure.Stack
	}
	return r, nil
}

// load makes the parts that a frame needs, once.
func (t *trial) load(ctx context.Context, f *Frame) (err error) {
	switch {
	case f.http != nil && t.streams == nil:
		t.streams, err = newStreamTrial(ctx, t.wasm, t.options)
	case f.http == nil && t.hooks == nil:
		t.hooks, err = newHookTrial(ctx, t.wasm, t.options)
	}
	return err
}

func (t *trial) close(ctx context.Context) error {
	var err error
	if t.streams != nil {
		err = t.streams.close()
	}
	if t.hooks != nil {
		err = errors.Join(err, t.hooks.close(ctx))
	}
	return err
}
