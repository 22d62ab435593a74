package doctor

import (
	"bytes"
	"context"
	"net/http"
	"net/url"

	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/engine/kvevents"
	"github.com/pdproxy/pdproxy/proxy/engine/loads"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// maxModels bounds the models of one engine in a report.
const maxModels = 64

func newEngine(i *engine.Instance) *Engine {
	e := &Engine{
		Name: i.Spec.Name, URL: i.Spec.URL, Source: i.Source, Role: i.Spec.Role, Connector: i.Spec.Connector,
		Models: []string{}, Ranks: i.Spec.Ranks, Events: "off", APIs: []string{}, i: i,
	}
	if u, err := url.Parse(e.URL); err == nil { // it may have a password
		u.User = nil
		e.URL = u.String()
	}
	return e
}

// examine probes the engine and asks for all that it offers.
func (e *Engine) examine(ctx context.Context, r *engine.Registry) {
	if e.failure = r.Examine(ctx, e.i); e.failure != nil {
		e.Error = e.failure.Error()
		e.identify(ctx)
		return
	}
	e.Reachable, e.Ready = true, true
	f := e.i.Facts()
	e.Kind, _ = connector.Owner(f, e.Connector)
	e.Version, e.DPSize, e.KVCacheType, e.Transfer = f.Version, f.DPSize, f.KVCacheType, f.Transfer
	e.Models = append(e.Models, f.Models[:min(len(f.Models), maxModels)]...)
	e.inspect(ctx)
	e.Load, e.Asleep, e.loadless = loads.Examine(ctx, e.i)
	e.listen(ctx)
	e.routes(ctx)
	e.BlockTokens = e.i.BlockTokens()
}

// identify finds out about an engine whose probe failed: whether it answers at all, and which
// program it is.
func (e *Engine) identify(ctx context.Context) {
	status, body, err := e.get(ctx, connector.ModelsPath)
	if err != nil {
		return
	}
	e.Reachable = true
	var f engine.Facts
	if status == http.StatusOK && connector.ReadModels(&f, body) == nil {
		e.Kind, _ = connector.Owner(&f, e.Connector)
		e.Models = append(e.Models, f.Models[:min(len(f.Models), maxModels)]...)
	}
	e.inspect(ctx)
}

// inspect reads the statements that only explain a wrong configuration.
func (e *Engine) inspect(ctx context.Context) {
	path := connector.InspectPath(e.Connector)
	if path == "" {
		return
	}
	status, body, err := e.get(ctx, path)
	if err != nil || status != http.StatusOK {
		return
	}
	i := connector.Inspect(path, body)
	e.Mode, e.Caching, e.hash = i.Mode, i.Caching, i.Hash
	if i.Transfer != "" {
		e.Transfer = i.Transfer
	}
}

// listen connects to the publishers of the engine's KV events.
func (e *Engine) listen(ctx context.Context) {
	switch {
	case e.i.Spec.KVEvents == "poll":
		e.Events = "poll"
		return
	case e.i.Spec.KVEvents != "":
		e.Events = "configured"
	case e.i.Publishes():
		e.Events = "announced"
	default:
		return
	}
	var list []engine.KVEndpoints
	list, e.foreign = e.i.KVSources()
	for _, at := range list {
		e.Publishers = append(e.Publishers, At(at))
		events, replay := kvevents.Check(ctx, at)
		if events != nil {
			e.unheard = append(e.unheard, events)
		}
		if replay != nil {
			e.unplayed = append(e.unplayed, replay)
		}
		var pushed error
		if at.Loads != "" {
			if pushed = loads.CheckPushed(ctx, at.Loads); pushed != nil {
				e.unpushed = append(e.unpushed, pushed)
			}
		}
		if events != nil || replay != nil || pushed != nil { // the other ranks' sockets would cost as much time
			return
		}
	}
}

// apis are the routes that a report shows.
var apis = [...]openai.API{
	openai.Completions, openai.Chat, openai.Responses, openai.Messages, openai.Generate, openai.VLLMGenerate,
	openai.Embeddings, openai.Tokenize, openai.Detokenize,
}

// routes finds out which routes exist. Each takes only POST, so an engine answers 405 to GET and
// generates nothing.
func (e *Engine) routes(ctx context.Context) {
	for _, api := range apis {
		if status, _, err := e.get(ctx, api.Path()); err != nil {
			return
		} else if status == http.StatusMethodNotAllowed {
			e.APIs = append(e.APIs, api.Path())
		}
	}
	if e.Kind == "vllm" {
		status, _, err := e.get(ctx, "/is_sleeping")
		e.DevMode = err == nil && status == http.StatusOK
	}
}

// get makes one GET within the time-out of a probe.
func (e *Engine) get(ctx context.Context, path string) (status int, body []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, e.timeout)
	defer cancel()
	var buf bytes.Buffer
	status, err = e.i.Get(ctx, path, &buf)
	return status, buf.Bytes(), err
}
