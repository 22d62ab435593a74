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

// warmRest is the shortest pause after a round that found no pair to warm up.
const warmRest = time.Second

// Outcomes of a warm-up, labels of the metric.
const (
	warmOK     = "ok"
	warmFailed = "failed"
	warmBusy   = "busy" // an engine got another request in the meantime
)

// Warm sends a request of one token through each new pair, if warm-ups are configured. The two
// engines then connect before the first client's request needs the pair. At most one warm-up begins
// in each pairs.warm_up_interval, and only if both engines are idle. When ctx ends, Warm waits for
// the running warm-ups and returns.
func (run *Runner) Warm(ctx context.Context) {
	var (
		running sync.WaitGroup
		mu      sync.Mutex
		taken   = make(map[*engine.Instance]bool) // engines of running warm-ups; guarded by mu
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

// localEngine returns the local engine of a sidecar, or nil while that engine is being
// replaced. all is true on a proxy that is no sidecar: such a proxy may pair any two engines.
func (run *Runner) localEngine() (i *engine.Instance, all bool) {
	sc := run.Sidecar()
	if sc == nil {
		return nil, true
	}
	return sc.Local(), false
}

// warmPair warms up the pair of p and d, and records the outcome. The request has a lease, a
// disagg id, time limits and a clean-up, as a client's request has. The metrics of requests do
// not count it.
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
	errNothingCame = errors.New("warm up pair: decode answered, but no KV was transferred")
	errWarmBusy    = errors.New("warm up pair: an engine is busy")
)

func (run *Runner) warmUp(ctx context.Context, model string, p, d engine.Target) (err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, openai.Completions.Path(), bytes.NewReader(appendWarmUp(nil, model, run.services.LegID())))
	if err != nil {
		return err
	}
	x := run.open(discardWriter{make(http.Header)}, r)
	x.env.WarmUp, x.env.Hooks = true, nil
	x.journal.WarmUp()
	defer x.close()
	defer func() {
		if v := recover(); v != nil {
			x.journal.Panic(v)
			err = attempt.ErrPanicked
		}
	}()
	cfg := *x.env.Config // in a warm-up every wait includes the handshake of the pair
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
	// vLLM refuses a body without a type (entrypoints/serve/utils/api_utils.py, validate_json_request).
	x.env.Fields = x.client.AppendFields(x.env.Fields[:0], x.req.ContentType(), false, false)
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

// appendWarmUp appends the body of a warm-up request. The prompt begins with a unique id, so
// that no engine has it in its cache. For a cached prompt the engines transfer no KV.
func appendWarmUp(b []byte, model, id string) []byte {
	b = openai.AppendQuoted(append(b, `{"model":`...), model)
	b = openai.AppendQuoted(append(b, `,"prompt":`...), id+" is to bring two engines together.")
	return append(b, `,"max_tokens":1,"stream":false}`...)
}

// discardWriter is the http.ResponseWriter of a request that no client made. It drops the answer.
type discardWriter struct{ header http.Header }

func (w discardWriter) Header() http.Header         { return w.header }
func (w discardWriter) WriteHeader(int)             {}
func (w discardWriter) Write(b []byte) (int, error) { return len(b), nil }
