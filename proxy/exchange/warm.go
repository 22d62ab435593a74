package exchange

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// warmRest is how long a round without work is followed by none.
const warmRest = time.Second

// The outcomes of a warm-up.
const (
	warmOK     = "ok"
	warmFailed = "failed"
	warmBusy   = "busy" // an engine had been given a request meanwhile
)

// Warm sends a request of one token through each pair that is new, where
// the configuration asks for that, until ctx ends, and returns when none is
// under way. The engines make their connection then, and not for the first user.
// At most one begins each pairs.warm_up_interval, none for an engine that has
// anything else to do.
func (run *Runner) Warm(ctx context.Context) {
	var (
		running sync.WaitGroup
		mu      sync.Mutex
		taken   = make(map[*engine.Instance]bool) // by a warm-up; guarded by mu
	)
	defer running.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		cfg := run.Config()
		local, all := run.localEngine()
		if !cfg.Pairs.WarmUp || local == nil && !all {
			timer.Reset(warmRest)
			continue
		}
		now := time.Now()
		model, p, d, ok := run.Registry.ClaimFresh(now, local, func(i *engine.Instance) bool {
			mu.Lock()
			defer mu.Unlock()
			return !taken[i] && i.Free(now)
		})
		if !ok {
			timer.Reset(max(warmRest, time.Duration(cfg.Pairs.WarmUpInterval)))
			continue
		}
		take := func(yes bool) {
			mu.Lock()
			defer mu.Unlock()
			for _, t := range [...]engine.Target{p, d} {
				if taken[t.Instance] = yes; !yes {
					delete(taken, t.Instance)
				}
			}
		}
		take(true)
		running.Go(func() {
			defer take(false)
			run.warmPair(ctx, model, p, d)
		})
		timer.Reset(time.Duration(cfg.Pairs.WarmUpInterval))
	}
}

// localEngine returns the engine beside the proxy, nil while it is being replaced. All is
// set on a proxy that is no sidecar: it may pair any two engines.
func (run *Runner) localEngine() (i *engine.Instance, all bool) {
	sc := run.Sidecar()
	if sc == nil {
		return nil, true
	}
	return sc.Local(), false
}

// warmPair sends the request through the pair of p and d. Like a client's it has
// a lease, an id, limits and a clean-up; it is not counted among the exchanges.
func (run *Runner) warmPair(ctx context.Context, model string, p, d engine.Target) {
	outcome, err := warmOK, run.warmUp(ctx, model, p, d)
	switch {
	case ctx.Err() != nil:
		return
	case errors.Is(err, errWarmBusy):
		outcome = warmBusy
	case err != nil:
		outcome = warmFailed
		run.Log.Warn("pair could not be warmed up", "prefill", p.Name(), "prefill_rank", p.Rank,
			"decode", d.Name(), "decode_rank", d.Rank, "error", err)
	default:
		run.Log.Info("pair is warm", "prefill", p.Name(), "prefill_rank", p.Rank, "decode", d.Name(), "decode_rank", d.Rank)
	}
	run.Metrics.WarmUp(outcome)
}

var (
	errNothingCame = errors.New("warm pair: decode answered, but no KV came over")
	errWarmBusy    = errors.New("warm pair: an engine is not free for it")
)

func (run *Runner) warmUp(ctx context.Context, model string, p, d engine.Target) (err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, openai.Completions.Path(), bytes.NewReader(appendWarmUp(nil, model, run.services.LegID())))
	if err != nil {
		return err
	}
	x := run.open(nowhere{make(http.Header)}, r)
	x.env.WarmUp, x.env.Hooks = true, nil
	x.journal.WarmUp()
	defer x.close()
	defer func() {
		if v := recover(); v != nil {
			x.journal.Panic(v)
			err = attempt.ErrPanicked
		}
	}()
	cfg := *x.env.Config // every wait of a warm-up is one for the handshake
	limit := cfg.Timeouts.Handshake
	cfg.Timeouts.Prefill, cfg.Timeouts.FirstByte = min(cfg.Timeouts.Prefill, limit), min(cfg.Timeouts.FirstByte, limit)
	cfg.Retry.Attempts, cfg.Server.TrustPDFields = 1, false
	x.env.Config = &cfg

	if err = x.client.ReadBody(""); err != nil {
		return errors.Join(errWarmBusy, err)
	}
	if err := openai.ParseRequest(openai.Completions, x.client.Body(), &x.req); err != nil {
		return err
	}
	x.ask.Model = model
	x.journal.Described(&x.req)
	x.ask.Request = abi.RequestFacts{PromptTokens: x.req.PromptTokens, MaxTokens: 1, N: 1}
	x.ask.Only = coordinator.Pair{Prefill: p, Decode: d}
	placement, err := run.Coordinator.Place(ctx, &x.ask)
	if err != nil {
		return errors.Join(errWarmBusy, err)
	}
	x.held = placement.Lease
	if _, err := attempt.Run(&x.env, placement); err != nil {
		return err
	}
	if run.Registry.PairState(p, d) != abi.PairReady {
		return errNothingCame
	}
	return nil
}

// appendWarmUp appends the body of a warm-up. Its prompt begins with an id of its
// own, so that no engine finds it in its cache: nothing would be transferred.
func appendWarmUp(b []byte, model, id string) []byte {
	b = openai.AppendQuoted(append(b, `{"model":`...), model)
	b = openai.AppendQuoted(append(b, `,"prompt":`...), id+" is to bring two engines together.")
	return append(b, `,"max_tokens":1,"stream":false}`...)
}

// nowhere is the answer of a request that no client made.
type nowhere struct{ header http.Header }

func (n nowhere) Header() http.Header         { return n.header }
func (n nowhere) WriteHeader(int)             {}
func (n nowhere) Write(b []byte) (int, error) { return len(b), nil }
