package plugins

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/plugins/policy"
	"github.com/pdproxy/pdproxy/plugins/source"
)

// canary is a new version of a policy plugin. It takes a share of the decisions
// of the version that it will replace, until its trial succeeds or fails.
type canary struct {
	old, fresh *plugin
	until      time.Time
}

// turn returns the policy for this decision: p, or its successor on trial. A table without
// canaries needs no call.
func (t *table) turn(p *policy.Policy) *policy.Policy {
	for i := range t.canaries {
		c := &t.canaries[i]
		if p.Version() != c.old.version || rand.Float64() >= c.old.spec.Canary {
			continue
		}
		if q, ok := c.fresh.version.Find(p.Hook, p.Name); ok {
			return q
		}
	}
	return p
}

// without returns the canaries except that of p.
func (t *table) without(p *plugin) []canary {
	return slices.DeleteFunc(slices.Clone(t.canaries), func(c canary) bool { return c.old == p })
}

// wantsProof reports whether a new version of p must pass a trial.
func (p *plugin) wantsProof() bool {
	return p.version != nil && p.spec.Canary > 0 && !p.failures.Parked()
}

// release gives fresh its share of p's decisions. fresh must have every name in the
// configuration. The caller holds s.mu.
func (s *Set) release(t *table, p, fresh *plugin) error {
	next := *t
	next.canaries = t.without(p)
	if err := next.prove(p, fresh); err != nil {
		return err
	}
	if err := s.resolve(&next); err != nil {
		return err
	}
	p.failed.Store(false)
	s.swap(&next)
	s.sayCanary(canary{old: p, fresh: fresh})
	return nil
}

func (s *Set) sayCanary(c canary) {
	s.deps.Log.Info("a new version takes a share of the decisions", "plugin", c.old.spec.Name, "sha256", c.fresh.digest, "share", c.old.spec.Canary)
}

// prove gives fresh a share of p's decisions, if fresh succeeds on made-up requests. The caller
// must resolve the table.
func (t *table) prove(p, fresh *plugin) error {
	if err := fresh.version.Trial(); err != nil {
		return err
	}
	t.canaries = append(t.canaries, canary{p, fresh, time.Now().Add(p.spec.CrashWindow)})
	return nil
}

// trialOf returns the canary with that digest that will replace p; nil: none.
func (t *table) trialOf(p *plugin, digest string) *canary {
	for i := range t.canaries {
		if c := &t.canaries[i]; c.old == p && c.fresh.digest == digest {
			return c
		}
	}
	return nil
}

// endTrials ends the trials that have failed or lasted long enough.
func (s *Set) endTrials(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.table.Load()
	if s.closed || t == nil {
		return
	}
	for _, c := range t.canaries {
		failed := c.fresh.failures.Parked()
		for _, q := range c.fresh.version.Policies() {
			failed = failed || q.Summary().Failures > 0
		}
		switch t := s.table.Load(); {
		case failed:
			next := *t
			next.canaries = t.without(c.old)
			s.swap(&next)
			_ = s.refuse(c.old, errors.New("it failed while it took a share of the decisions"))
		case !now.Before(c.until):
			next := t.with(c.old, c.fresh)
			if err := s.resolve(next); err != nil { // cannot fail: its policies were resolved before
				_ = s.refuse(c.old, err)
				continue
			}
			s.swap(next)
			s.deps.Log.Info("the new version takes all decisions", "plugin", c.old.spec.Name, "sha256", c.fresh.digest)
		}
	}
}

// with returns a table in which fresh replaces p. The caller must resolve it.
func (t *table) with(p, fresh *plugin) *table {
	next := *t
	next.canaries = t.without(p)
	next.plugins = slices.Clone(t.plugins)
	next.plugins[slices.Index(t.plugins, p)] = fresh
	return &next
}

// all returns every version of a table.
func (t *table) all() []*plugin {
	list := slices.Clone(t.plugins)
	if t.builtin != nil {
		list = append(list, t.builtin)
	}
	for _, c := range t.canaries {
		list = append(list, c.fresh)
	}
	return list
}

// replace puts fresh in place of p at once. The caller holds s.mu.
func (s *Set) replace(t *table, p, fresh *plugin) error {
	next := t.with(p, fresh)
	if err := s.resolve(next); err != nil {
		return err
	}
	s.swap(next)
	s.deps.Log.Info("plugin reloaded", "plugin", p.spec.Name, "sha256", fresh.digest)
	return nil
}

// reload loads p, of table t, again from the result of Source.Read. The caller holds s.mu.
func (s *Set) reload(ctx context.Context, t *table, p *plugin, content source.Content, err error) error {
	if err != nil {
		return s.refuse(p, err)
	}
	// Whatever the result, the same bytes are not tried again.
	s.watches[p.spec.Name] = source.NewWatch(p.spec.Source, content.SHA256)
	fresh, err := s.build(ctx, t.config, p.spec, content)
	if err != nil {
		return s.refuse(p, err)
	}
	if p.wantsProof() {
		err = s.release(t, p, fresh)
	} else {
		err = s.replace(t, p, fresh)
	}
	if err != nil {
		return s.refuse(p, errors.Join(err, fresh.close(ctx)))
	}
	return nil
}
