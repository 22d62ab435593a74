package exchange

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// The limits of the search for a stored response.
const (
	maxStored    = 4096 // responses whose engine a process remembers
	maxQuestions = 16   // engines that one search asks at the same time
	// answerWithin is the time for the answer of one engine. An engine has its responses in
	// memory.
	answerWithin = 5 * time.Second
)

// storing remembers which engines store responses. Only an engine knows the responses
// that it stores. So a process that does not know the engine, after a restart or in a fleet,
// asks the engines. Safe for concurrent use. The zero value knows none.
type storing struct {
	mu   sync.Mutex
	of   map[string]*engine.Instance // by response id; guarded by mu
	ring [maxStored]string           // the ids of the map, the oldest at next; guarded by mu
	next int                         // guarded by mu
}

// get returns the instance that stored a response; nil if none is known.
func (h *storing) get(id string) *engine.Instance {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i := h.of[id]; i != nil && !i.Gone() {
		return i
	}
	return nil
}

// put remembers the engine of a response, and forgets the oldest.
func (h *storing) put(id string, i *engine.Instance) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.of == nil {
		h.of = make(map[string]*engine.Instance)
	}
	if _, known := h.of[id]; !known {
		delete(h.of, h.ring[h.next])
		h.ring[h.next] = id
		h.next = (h.next + 1) % maxStored
	}
	h.of[id] = i
}

// stored is a response that an engine stores.
type stored struct {
	engine *engine.Instance
	answer *buffer.Buffer     // the answer to GET; the owner frees it
	head   *upstream.Response // the head of the answer
}

// find returns the engine that stores the response of that id. It asks the engine that stored the
// response before, then all engines that could store it. The error is the answer for the client.
func (x *exchange) find(id string, fields []upstream.Field) (stored, error) {
	if i := x.run.storing.get(id); i != nil && x.mayUse(i) {
		if s, err := x.question(x.env.Context, i, id, fields); err == nil && s.engine != nil {
			return s, nil
		}
	}
	ctx, stop := context.WithCancel(x.env.Context)
	defer stop()
	var (
		slots  = make(chan struct{}, maxQuestions)
		asked  sync.WaitGroup
		mu     sync.Mutex
		found  stored // guarded by mu
		silent error  // of an engine that did not answer; guarded by mu
	)
	for _, i := range x.run.Registry.Snapshot().Instances {
		if !x.mayStore(i) || !x.mayUse(i) {
			continue
		}
		slots <- struct{}{}
		asked.Go(func() {
			defer func() { <-slots }()
			s, err := x.question(ctx, i, id, fields)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case s.engine == nil:
				if err != nil && ctx.Err() == nil {
					silent = err
				}
			case found.engine != nil:
				s.answer.Free()
			default:
				found = s
				stop()
			}
		})
	}
	asked.Wait()
	switch {
	case found.engine != nil:
		x.run.storing.put(id, found.engine)
		return found, nil
	case x.env.Context.Err() != nil:
		return stored{}, context.Cause(x.env.Context)
	case silent != nil:
		return stored{}, openai.NewError(openai.CodeLegFailed, "an engine that may hold the response does not answer")
	}
	return stored{}, errNotStored("response_id")
}

func errNotStored(field string) error {
	return openai.NewFieldError(openai.CodeResponseNotFound, field, "no engine holds a response of this id")
}

// mayStore reports whether an instance may store responses, as it does not for prefill legs.
// An instance that has never answered stores none. A remote gets no requests about responses.
func (x *exchange) mayStore(i *engine.Instance) bool {
	return (i.Role == abi.RoleDecode || i.Role == abi.RoleBoth) && i.State() != engine.Down && !i.IsRemote()
}

// mayUse reports whether the tenant may use a model of the instance. Other instances are not asked
// for its responses.
func (x *exchange) mayUse(i *engine.Instance) bool {
	return !x.restricted() || x.mayUseAny(i.Models())
}

// restricted reports whether the tenant may not use every model.
func (x *exchange) restricted() bool {
	t := x.account.tenant
	return t != nil && t.Models != nil
}

// mayUseAny reports whether the tenant may use one of the models of engines, also by a name of
// [[model]].
func (x *exchange) mayUseAny(models []string) bool {
	return slices.ContainsFunc(x.account.tenant.Models, func(name string) bool {
		return slices.Contains(models, name) || x.run.Models().Route(name).LeadsTo(models)
	})
}

// maySee reports whether the tenant may see a stored response of the instance: it may use the
// model that the response names, or each model of the instance if the response names none. To
// other tenants the response does not exist. vLLM names its first name of the model, so that all
// names for one model count as one.
func (x *exchange) maySee(i *engine.Instance, answer []byte) bool {
	if !x.restricted() {
		return true
	}
	value, named, err := openai.Lookup(answer, "model")
	if err == nil && !named {
		return !slices.ContainsFunc(i.Models(), func(model string) bool { return !x.mayUseAny(i.SameModel(model)) })
	}
	model, ok := openai.String(value)
	return err == nil && ok && x.mayUseAny(i.SameModel(model))
}

// question asks one engine for a response. Without an engine in the result, the engine does not store it; err
// then reports that the engine did not answer.
func (x *exchange) question(ctx context.Context, i *engine.Instance, id string, fields []upstream.Field) (stored, error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	resp, err := i.Client.Do(ctx, &upstream.Request{
		Path: i.Prefix + openai.Responses.Path() + "/" + id, Header: attempt.WithKey(fields, i), HeadTimeout: answerWithin, IdleTimeout: answerWithin,
	})
	if err != nil {
		return stored{}, err
	}
	defer resp.Close()
	if resp.Status/100 == 5 && resp.Status != 501 {
		return stored{}, &upstream.Error{Op: upstream.OpHead}
	}
	if resp.Status != 200 {
		return stored{}, nil
	}
	b, err := x.run.Memory.ReadAll(resp, resp.ContentLength, buffer.MaxAnswer, time.Now().Add(answerWithin))
	if err != nil || !x.maySee(i, b.B) {
		b.Free()
		return stored{}, err
	}
	return stored{i, b, resp}, nil
}
