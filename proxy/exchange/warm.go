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

// warmRest is how often Warm looks for a pair to try.
const warmRest = time.Second

// warmInterval is the least time between the starts of two warm-ups of new pairs. A warm-up costs
// the engines one token; ten a second connect a hundred new pairs in 10 s beside the users' load.
const warmInterval = 100 * time.Millisecond

// Outcomes of a warm-up, labels of the metric.
const (
	warmOK     = "ok"
	warmFailed = "failed"
	warmBusy   = "busy" // an engine got another request in the meantime
)

// Warm sends a request of one token through each broken pair when the pause of its circuit is
// over. So no user's request is the trial of a pair that may still be broken. If warm-ups are
// configured, Warm also sends one through each new pair, so that the two engines connect before
// the first user's request needs the pair. At most one warm-up of a new pair begins in each
// warmInterval, and only if both engines are idle. When ctx ends, Warm waits for the
// running requests and returns.
func (run *Runner) Warm(ctx context.Context) {
	var (
		running sync.WaitGroup
		taken   warmed
		next    time.Time // when the next warm-up of a new pair may begin
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
		now, wait := time.Now(), warmRest
		if local, all := run.localEngine(); local != nil || all {
			cfg := run.Config()
			if model, pair := run.Registry.ClaimTrial(now, local); pair != nil {
				running.Go(func() { run.warmPair(ctx, model, pair, true) })
				wait = min(wait, warmInterval)
			} else if cfg.Pairs.WarmUp && !now.Before(next) {
				if model, pair := run.Registry.ClaimFresh(now, local, func(i *engine.Instance) bool { return !taken.has(i) && i.Free(now) }); pair != nil {
					taken.add(pair)
					running.Go(func() {
						defer taken.remove(pair)
						run.warmPair(ctx, model, pair, false)
					})
					next = now.Add(warmInterval)
				}
			}
			if left := next.Sub(now); left > 0 {
				wait = min(wait, left)
			}
		}
		timer.Reset(wait)
	}
}

// warmed is the set of engines of running warm-ups. An engine is in one of them at most.
type warmed struct{ set sync.Map }

func (w *warmed) has(i *engine.Instance) bool {
	_, yes := w.set.Load(i)
	return yes
}

func (w *warmed) add(p *engine.Pair) {
	w.set.Store(p.Prefill.Instance, nil)
	w.set.Store(p.Decode.Instance, nil)
}

func (w *warmed) remove(p *engine.Pair) {
	w.set.Delete(p.Prefill.Instance)
	w.set.Delete(p.Decode.Instance)
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

// warmPair sends a request of one token through a claimed pair, and records the outcome. The
// request has a lease, a disagg id, time limits and a clean-up, as a client's request has. The
// metrics of requests do not count it. trial: the circuit of the pair is half open.
func (run *Runner) warmPair(ctx context.Context, model string, pair *engine.Pair, trial bool) {
	p, d := pair.Prefill, pair.Decode
	outcome, err := warmOK, run.warmUp(ctx, model, p, d)
	pair.Tried(refused(err))
	good, bad := "pair is warm", "pair could not be warmed up"
	if trial {
		good, bad = "pair works again", "pair is still broken"
	}
	log := run.Log.With("prefill", p.Name(), "prefill_rank", p.Rank, "decode", d.Name(), "decode_rank", d.Rank)
	switch {
	case ctx.Err() != nil:
		return
	case errors.Is(err, errWarmBusy):
		outcome = warmBusy
	case err != nil:
		outcome = warmFailed
		log.Warn(bad, "error", err)
	default:
		log.Info(good)
	}
	run.Metrics.WarmUp(outcome)
}

// refused reports whether err, the outcome of a warm-up, shows only that the engines do not serve
// such a request: for example, they require the keys of clients, or they transfer no KV for such
// a short prompt.
func refused(err error) bool {
	var e *attempt.Error
	return errors.Is(err, errNothingCame) || errors.As(err, &e) && !e.Overloaded && (e.Permanent || e.Reply != nil)
}

var (
	errNothingCame = errors.New("warm up pair: decode answered, but no KV was transferred")
	errWarmBusy    = errors.New("warm up pair: an engine is busy")
)

func (run *Runner) warmUp(ctx context.Context, model string, p, d engine.Target) (err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, openai.Completions.Path(), bytes.NewReader(appendWarmUp(nil, model, run.LegID())))
	if err != nil {
		return err
	}
	x := run.open(discardWriter{make(http.Header)}, r)
	x.env.WarmUp, x.env.Hooks = true, nil
	x.journal.WarmUp = true
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
	x.env.Fields = x.client.AppendFields(x.env.Fields[:0], x.req.ContentType, false, false)
	x.placing.ask.Model = model
	x.journal.Described(&x.req)
	x.placing.ask.Request = abi.RequestFacts{PromptTokens: x.req.PromptTokens, MaxTokens: 1, N: 1}
	x.placing.ask.Only = coordinator.Pair{Prefill: p, Decode: d}
	placement, err := run.Coordinator.Place(ctx, &x.placing.ask)
	if err != nil {
		return errors.Join(errWarmBusy, err)
	}
	x.placing.lease = placement.Lease
	if err := attempt.Run(&x.env, placement).Err; err != nil {
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
