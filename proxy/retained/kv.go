// Package retained keeps track of the KV that decode engines retain after a turn of a
// conversation, so that prefill can pull it at the next turn instead of computing the
// prompt again. KV that no turn can use is freed.
//
// The decisions behind this package are in docs/design/attempt.md.
package retained

import (
	"bytes"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/coordinator/turns"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// margin is the time before decode frees retained KV in which no turn uses it any more:
// the request may queue on prefill, which stops 5 s before.
const margin = 30 * time.Second

// KV is the KV that one decode engine retains after one turn. A turn can use it only once,
// because decode frees the KV that prefill has pulled.
type KV struct {
	params []byte
	host   string // host from which prefill would pull the KV; "" if the host may not be the holder's
	holder engine.Target
	since  time.Time // start of the holder's state; another one reports that the holder may have restarted
	free   *cleanup.Job

	decision turns.Decision // of the store that has the KV
	gap      time.Duration  // from the end of the turn to the next turn, which took the KV
}

// New returns the KV that the decode engine of an attempt says it retains: params for
// prefill, and the host that they name. job has the fields of a clean-up of the attempt.
func New(r connector.Retainer, a *connector.Attempt, job cleanup.Job, host string, params []byte) *KV {
	p, d := a.Prefill, a.Decode
	k := &KV{params: bytes.Clone(params), host: host, holder: d, since: d.Since()}
	call := connector.Cleanup{Phase: abi.Decode, How: "engine_timeout"}
	switch {
	case !d.Owns(host, p.Instance) || !connector.Sound(d.Instance, p.Instance, params):
		k.host = ""
	case p.Spec.Bidirectional:
		call = r.FreeRetained(a, params)
	}
	k.free = cleanup.Retained(job, call, p, d)
	return k
}

// Params are the parameters with which prefill pulls the KV.
func (k *KV) Params() []byte { return k.params }

// Holder is the decode engine that retains the KV.
func (k *KV) Holder() engine.Target { return k.holder }

// Decision is the decision of Store.Put; its policy is "" if none is known.
func (k *KV) Decision() turns.Decision { return k.decision }

// Gap is the time between the end of the turn and the next turn, for which Store.Take took the KV; 0:
// not known.
func (k *KV) Gap() time.Duration { return k.gap }

// Foreign reports whether decode named a host that is not known to be its own. The proxy gives
// no engine the address of such a host.
func (k *KV) Foreign() bool { return k.host == "" }

// Unusable returns why prefill cannot pull the KV, as a reason of a fallback; "" if it
// can. same lists the labels whose values two engines share if KV may move between them.
func (k *KV) Unusable(prefill engine.Target, conn connector.Connector, same []string) string {
	d := k.holder
	state := d.State()
	switch {
	case d.Gone() || state != engine.Ready && state != engine.Draining || !d.Since().Equal(k.since):
		return "engine_gone" // perhaps only for a time: the holder may have been unresponsive
	case prefill.BlockTokens() != d.BlockTokens() || conn.Compatible(prefill.Facts(), d.Facts()) != nil:
		return "incompatible"
	case !prefill.Spec.Labels.Same(d.Spec.Labels, same):
		return "other_labels"
	case !connector.Sound(d.Instance, prefill.Instance, k.params):
		return connector.ForeignHost
	}
	return ""
}

// Hold delays the freeing of the KV while t, which may still read the KV, is unresponsive.
func (k *KV) Hold(t engine.Target) { k.free.WaitFor(t) }

// Expires returns the time after which the proxy no longer uses KV that d retains from
// now on.
func Expires(d engine.Target, now time.Time) time.Time { return now.Add(d.Spec.KeepsFor() - margin) }

// Freer frees retained KV. It is safe for concurrent use.
type Freer struct {
	Registry *engine.Registry
	Cleanups *cleanup.Runner
}

// Free makes the holder of k free it, in the background, after delay. The prefill engine of that
// turn makes the call. If that engine is not ready, another prefill engine makes the call.
func (f Freer) Free(k *KV, delay time.Duration) {
	k.free.Free(delay, func() *engine.Instance { return f.via(k) })
	f.Cleanups.Start(k.free)
}

// via finds a prefill engine that can make the holder of k free it; via may return nil.
func (f Freer) via(k *KV) *engine.Instance {
	d := k.holder
	conn := connector.Of(d.Instance)
	for _, p := range f.Registry.Snapshot().Instances {
		if p.Spec.Bidirectional && p.Role == abi.RolePrefill && p.State() == engine.Ready &&
			p.BlockTokens() == d.BlockTokens() && conn.Compatible(p.Facts(), d.Facts()) == nil && d.Owns(k.host, p) && connector.Sound(d.Instance, p, k.params) {
			return p
		}
	}
	return nil
}

// FreeEncoded frees KV that another process of the fleet knew and that no request will
// use, in the background.
func (f Freer) FreeEncoded(t *fleet.RetainedKV) error {
	k, err := f.read(t)
	if err == nil {
		f.Free(k, 0)
	}
	return err
}

// encode returns k for another process of the fleet.
func (k *KV) encode() *fleet.RetainedKV {
	return &fleet.RetainedKV{Holder: k.holder, Since: k.since, Host: k.host, Params: k.params, Forget: k.free.Append(nil)}
}

// read reads KV that another process of the fleet encoded.
func (f Freer) read(t *fleet.RetainedKV) (*KV, error) {
	k := &KV{params: t.Params, host: t.Host, holder: t.Holder, since: t.Since}
	var err error
	k.free, err = cleanup.ReadRetained(t.Forget, f.Registry.Snapshot(), t.Holder, func() *engine.Instance { return f.via(k) })
	if err != nil {
		return nil, err
	}
	return k, nil
}

// Scope returns the facts on which KV depends in addition to the token ids, and the facts that
// separate the caches of clients.
func Scope(r *openai.Request) string {
	return r.Model + "\x00" + r.LoRA() + "\x00" + r.CacheSalt()
}

// IDs returns the ids of the tokens whose KV decode retains, or why they are not known,
// as a reason of a fallback.
func IDs(k *connector.Retained) (ids []uint32, reason string) {
	if k.Unfit != "" {
		return nil, k.Unfit
	}
	ids, err := tokens.AppendIDs(make([]uint32, 0, k.Tokens+1), k.Prompt)
	if err == nil {
		ids, err = tokens.AppendIDs(ids, k.Answer)
	}
	switch {
	case err != nil:
		return nil, "no_token_ids"
	case k.Tokens > len(ids): // decode retains the KV of more tokens than ids are known
		return nil, "kv_ahead"
	}
	return ids[:k.Tokens], ""
}

// TextOnly reports whether the KV of a request's prompt depends only on the token ids. It does
// not for a prompt with images, because all images have the same placeholder ids.
func TextOnly(r *openai.Request) bool {
	for _, key := range [...]string{"prompt_embeds", "features", "content_parts"} {
		if v, _ := r.Get(key); !openai.IsNull(v) {
			return false
		}
	}
	switch r.API {
	case openai.Completions, openai.VLLMGenerate:
		return true
	case openai.Chat:
	default:
		return false
	}
	messages, err := openai.Elements(r.PromptRaw())
	if err != nil {
		return false
	}
	for message := range messages {
		content, _ := openai.Find(message, "content")
		if len(content) == 0 || content[0] != '[' {
			continue
		}
		parts, err := openai.Elements(content)
		if err != nil {
			return false
		}
		for part := range parts {
			if kind, _ := openai.Find(part, "type"); string(kind) != `"text"` {
				return false
			}
		}
	}
	return true
}
