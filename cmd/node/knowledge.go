package node

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/engine/kvevents"
	"github.com/pdproxy/pdproxy/proxy/lograte"
	"github.com/pdproxy/pdproxy/proxy/prompt"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/indexcheck"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// How long the index assumes blocks that no event has confirmed. expectFor is for engines with KV
// events: a prefill with its queue, and the event after it, usually take less than
// 30 s, and requests that meanwhile follow a wrong assumption recompute their prompt. textTTL is for engines without events: a
// conversation rarely pauses for longer than 10 minutes, and kv_index.text_tokens limits what a busy engine is
// assumed to keep.
const (
	expectFor = 30 * time.Second
	textTTL   = 10 * time.Minute
)

// knowledge has a node's data about the engines' KV, and the receivers of the KV events
// that update the data. The registry calls engineChanged, engineRestarted and engineGone.
type knowledge struct {
	state   coordinator.State
	events  *kvevents.Manager
	tokens  *tokens.Tokenizer
	metrics *telemetry.Metrics
	log     *slog.Logger
	full    lograte.Limiter[string] // decides which refused blocks are logged, by the engine's name

	textTokens int // limit of expected blocks of a rank, for engines without events

	mu       sync.Mutex
	followed map[string]followed // by the instance's name; guarded by mu
	byName   sync.Map            // the same instances, for setBlockTokens: setBlockTokens must not take mu, because mu is held during the wait for the end of event hooks
}

// followed is an instance whose KV events are read, and the addresses of the events.
type followed struct {
	instance   *engine.Instance
	model, url string
	publishers []engine.KVEndpoints
	silent     []bool // by rank: no event follows the requests
}

// address returns where the events of a rank come from.
func (f *followed) address(rank int) string {
	if f.url != "" {
		return f.url
	}
	return f.publishers[rank].Events
}

func newKnowledge(cfg *config.Config, metrics *telemetry.Metrics, log *slog.Logger) *knowledge {
	k := &knowledge{metrics: metrics, log: log, full: lograte.Limiter[string]{Every: time.Minute}, followed: make(map[string]followed)}
	k.state = coordinator.State{
		Index: kvindex.New(kvindex.Options{
			MaxEntries: cfg.KVIndex.MaxEntries, GuessTTL: expectFor, Reclaimed: k.reclaimed,
		}),
		Conversations: conversation.New(cfg.Conversation.Capacity),
		Trust:         indexcheck.New(k.trustChanged),
	}
	k.textTokens = cfg.KVIndex.TextTokens
	count := func(kind string) func(string, string) {
		return func(engine, reason string) { metrics.KVEvents(engine, kind, reason, 1) }
	}
	k.events = kvevents.New(kvevents.Options{Index: k.state.Index, Log: log, Hooks: kvevents.Hooks{
		Applied:     func(engine string, blocks int) { metrics.KVEvents(engine, "applied", "", blocks) },
		Refused:     k.refused,
		Gap:         func(engine string) { metrics.KVEvents(engine, "gap", "", 1) },
		Replay:      count("replay"),
		Resync:      count("resync"),
		Malformed:   func(engine string, n int) { metrics.KVEvents(engine, "malformed", "", n) },
		BlockTokens: k.setBlockTokens,
	}})
	return k
}

// run keeps the index up to date until ctx ends.
func (k *knowledge) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { _ = k.events.Run(ctx) }) // ends with ctx alone
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			k.state.Index.Tend(now)
			k.watchEvents(now)
		}
	}
}

// engineChanged starts to follow the KV events of an instance that is ready or has new
// facts.
func (k *knowledge) engineChanged(i *engine.Instance, s engine.State) {
	if s != engine.Ready {
		return
	}
	k.limit(i)
	if !i.Publishes() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.followed[i.Spec.Name].instance == i {
			k.unfollow(i)
		}
		return
	}
	next := followed{instance: i, silent: make([]bool, len(i.KV))}
	if models := i.Models(); len(models) > 0 {
		next.model = models[0]
	}
	source := kvevents.Source{Name: i.Spec.Name, Model: next.model, Targets: i.KV, BlockTokens: i.BlockTokens(), APIKey: i.APIKey}
	var err, foreign error
	if i.Spec.KVEvents == "poll" {
		source.Kind, next.url = kvevents.Poll, i.Spec.URL
		source.Transport, err = newProbe(i.Spec)
	} else {
		next.publishers, foreign = i.KVSources()
	}
	source.URL, source.Publishers = next.url, next.publishers
	k.mu.Lock()
	defer k.mu.Unlock()
	old := k.followed[i.Spec.Name]
	if old.instance == i && old.model == next.model && old.url == next.url && slices.Equal(old.publishers, next.publishers) {
		return
	}
	if foreign != nil {
		k.log.Warn("KV events are not followed", "engine", i.Spec.Name, "error", foreign)
	}
	if old.instance == i {
		k.unfollow(i)
	}
	k.followed[i.Spec.Name] = next
	k.byName.Store(i.Spec.Name, i)
	if err == nil {
		err = k.events.Follow(source)
	}
	if err != nil {
		k.log.Error("KV events are not followed", "engine", i.Spec.Name, "error", err)
	}
}

// unfollow ends the reading of an instance's events, and drops the blocks that they named. Another
// process may publish at an address that the instance no longer announces. k.mu is held.
func (k *knowledge) unfollow(i *engine.Instance) {
	k.events.Forget(i.Spec.Name)
	delete(k.followed, i.Spec.Name)
	k.byName.CompareAndDelete(i.Spec.Name, i)
	for _, slot := range i.KV {
		k.state.Index.Clear(slot)
	}
}

// engineRestarted drops the blocks of the former process of an instance.
func (k *knowledge) engineRestarted(i *engine.Instance) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.followed[i.Spec.Name].instance == i {
		k.events.Restarted(i.Spec.Name)
	}
	k.forget(i)
}

// forget drops the data from requests to an instance and from its answers.
func (k *knowledge) forget(i *engine.Instance) {
	k.tokens.Forget(i.Spec.Name)
	k.state.Trust.Forget(i.Spec.Name)
	k.metrics.Distrust(i.Spec.Name, "")
}

// engineGone drops the data of a removed instance. Nothing uses its index slots
// afterwards.
func (k *knowledge) engineGone(i *engine.Instance) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.followed[i.Spec.Name].instance == i {
		delete(k.followed, i.Spec.Name)
		k.byName.CompareAndDelete(i.Spec.Name, i)
		k.events.Forget(i.Spec.Name)
	}
	k.forget(i)
}

// setBlockTokens stores the number of tokens in an engine's block, as the engine's events
// report it.
func (k *knowledge) setBlockTokens(name string, blockTokens int) {
	if i, ok := k.byName.Load(name); ok {
		i.(*engine.Instance).SetBlockTokens(blockTokens)
		k.limit(i.(*engine.Instance))
	}
}

// limit sets the limits of expected blocks for an instance. An instance without events has the
// blocks of an estimate. So has one whose events do not arrive, until they arrive.
func (k *knowledge) limit(i *engine.Instance) {
	l := kvindex.Limits{TTL: textTTL, Blocks: coordinator.TextBlocks(k.textTokens)}
	if i.Publishes() {
		l.TTL, l.Silent = 0, textTTL
	}
	if i.Events() {
		l.Blocks = k.textTokens / i.BlockTokens()
	}
	for _, slot := range i.KV {
		k.state.Index.Limit(slot, l)
	}
}

// watchEvents logs that the events of a rank do not confirm the blocks of the rank's requests, and that
// they do again.
func (k *knowledge) watchEvents(now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, f := range k.followed {
		for rank, slot := range f.instance.KV {
			switch silent := k.state.Index.Silent(slot, now) > 0; {
			case silent == f.silent[rank]:
			case silent:
				k.metrics.KVEvents(name, "silent", "", 1)
				k.log.Warn("no KV events follow the requests; estimates replace them", "engine", name, "rank", rank, "events", f.address(rank))
				f.silent[rank] = true
			default:
				k.log.Info("KV events follow the requests again", "engine", name, "rank", rank)
				f.silent[rank] = false
			}
		}
	}
}

// refused counts blocks of an engine's events for which the index had no room, and logs the
// first in a minute.
func (k *knowledge) refused(name string, blocks int) {
	k.metrics.KVEvents(name, "refused", "", blocks)
	if k.full.Allow(name) {
		k.log.Warn("the KV index is full: it does not know further blocks of the engine", "engine", name, "key", "kv_index.max_entries")
	}
}

// reclaimed reports that an engine has lost its blocks in the index. It must not block.
func (k *knowledge) reclaimed(t kvindex.Target, blocks int) {
	k.byName.Range(func(name, i any) bool {
		rank := slices.Index(i.(*engine.Instance).KV, t)
		if rank >= 0 {
			k.metrics.KVEvents(name.(string), "resync", kvevents.ResyncShare, 1)
			k.log.Warn("the KV index is full: the blocks of an engine that held more than its share were removed for other engines",
				"engine", name, "rank", rank, "blocks", blocks, "key", "kv_index.max_entries")
		}
		return rank < 0
	})
}

// trustChanged logs and counts that the cached tokens which an engine reports disagree
// with the index, or agree again.
func (k *knowledge) trustChanged(v indexcheck.Verdict) {
	if v.Reason == indexcheck.Agrees {
		k.metrics.Distrust(v.Engine, "")
		k.log.Info("cached tokens agree with the KV index again", "engine", v.Engine)
		return
	}
	k.metrics.Distrust(v.Engine, v.Reason.String())
	k.log.Warn("cached tokens disagree with the KV index", "engine", v.Engine, "rank", v.Rank, "reason", v.Reason.String(),
		"requests", v.Requests, "against", v.Against, "predicted", v.Predicted, "reported", v.Reported)
}

// newTokenizer returns the tokenizer that finds the token ids of prompts. local holds the
// tokenizers of files by model.
func newTokenizer(cfg *config.Config, local map[string]tokens.Encoder, registry *engine.Registry, memory *buffer.Budget) (*tokens.Tokenizer, error) {
	o := tokens.Options{Asker: prompt.Asker{Registry: registry, Memory: memory}, Local: local, Timeout: time.Duration(cfg.Tokens.Timeout)}
	o.Order = []tokens.Source{} // nil would be the default
	for _, name := range cfg.Tokens.Sources {
		s, ok := tokens.ParseSource(name)
		if !ok {
			return nil, fmt.Errorf("unknown source of tokens %q", name)
		}
		o.Order = append(o.Order, s)
	}
	return tokens.New(o), nil
}
