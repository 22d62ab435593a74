package moriio

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine/registrations"
	"github.com/pdproxy/pdproxy/proxy/lograte"
)

// maxEngines bounds the number of registered engines.
const maxEngines = 4096

// Limits of the log of refused registrations. refusalEvery is the time in which one reason causes
// one line; in this time at most refusedTexts reasons do. maxLogged bounds a reason, in bytes.
const (
	refusalEvery = 10 * time.Minute
	refusedTexts = 100
	maxLogged    = 300
)

// book holds the registered engines. One goroutine owns it.
type book struct {
	log     *slog.Logger
	ownHost bool                    // an engine may register only its own host
	entries map[string]*entry       // by URL
	refused lograte.Limiter[string] // decides which problems are logged, by their text
	changed lograte.Limiter[string] // decides which changes of an engine are logged, by its name
}

type entry struct {
	engine config.Engine
	last   time.Time // time of its last registration
	said   message   // a registration with its present values
}

func newBook(log *slog.Logger, ownHost bool) *book {
	return &book{
		log: log, ownHost: ownHost, entries: make(map[string]*entry),
		refused: lograte.Limiter[string]{Every: refusalEvery, Most: refusedTexts},
		changed: lograte.Limiter[string]{Every: time.Second},
	}
}

// register applies a message that arrived at now, and reports whether the engines
// changed. An engine is identified by its address: with other ports, sizes or another
// role it replaces the old entry.
func (b *book) register(m message, now time.Time) bool {
	e, ok := b.read(m)
	if !ok {
		return false
	}
	old := b.entries[e.URL]
	switch {
	case old == nil && len(b.entries) >= maxEngines:
		b.refuse(fmt.Errorf("more than %d engines are registered", maxEngines))
		return false
	case old != nil && old.engine == e:
		old.last = now
		return false
	}
	b.entries[e.URL] = &entry{engine: e, last: now, said: m}
	if b.changed.Allow(e.Name) {
		b.log.Info("engine registered", "engine", e.Name, "connector", e.Connector, "ranks", e.Ranks, "kv_address", e.KVAddress, "again", old != nil)
	}
	return true
}

// read converts a message to an engine; false if the engine may not register.
func (b *book) read(m message) (e config.Engine, ok bool) {
	reg, err := readRegistration(m.text)
	if err == nil && !reg.notARegister {
		e, err = reg.engine()
	}
	if m.refused != nil {
		err = fmt.Errorf("%w, from %s", m.refused, m.from)
	}
	if err == nil && !reg.notARegister && b.ownHost && !isOwn(e, m.from) {
		err = fmt.Errorf("%q was registered from %s: discovery.moriio.own_host lets an engine register its own address alone", e.Name, m.from)
	}
	if err != nil {
		b.refuse(err)
	}
	return e, err == nil && !reg.notARegister
}

// restore replaces the engines by entries that another book exported at now or before.
func (b *book) restore(entries []registrations.Entry, now time.Time) {
	clear(b.entries)
	for _, r := range entries {
		m := message{from: r.Peer, text: r.Value}
		if e, ok := b.read(m); ok && len(b.entries) < maxEngines {
			b.entries[e.URL] = &entry{engine: e, last: now.Add(min(r.Left(now), Expiry) - Expiry), said: m}
		}
	}
}

// export returns the engines in the form that restore reads.
func (b *book) export(now time.Time) []registrations.Entry {
	list := make([]registrations.Entry, 0, len(b.entries))
	for _, e := range b.entries {
		r := registrations.Entry{Value: e.said.text, Peer: e.said.from}
		r.End(now, Expiry, e.last.Add(Expiry).Sub(now))
		list = append(list, r)
	}
	return list
}

// isOwn reports whether both addresses of an engine, of its API and of its KV transfer,
// are on the host from. Names are not resolved.
func isOwn(e config.Engine, from string) bool {
	u, err := url.Parse(e.URL)
	kv, err2 := config.ParseKVAddress(e.KVAddress)
	peer, err3 := netip.ParseAddr(from)
	if errors.Join(err, err2, err3) != nil {
		return false
	}
	for _, host := range []string{u.Hostname(), kv.Host} {
		if ip, err := netip.ParseAddr(strings.Trim(host, "[]")); err != nil || ip.Unmap().WithZone("") != peer.Unmap().WithZone("") {
			return false
		}
	}
	return true
}

// refuse logs why a registration is rejected, once for each reason in refusalEvery, because
// registrations repeat every few seconds. Peers determine the texts.
func (b *book) refuse(err error) {
	text := err.Error()
	if len(text) > maxLogged {
		text = text[:maxLogged] + "..."
	}
	if b.refused.Allow(text) {
		b.log.Warn("a registration was refused", "error", text)
	}
}

// expire removes the engines that have not registered for Expiry, and reports whether
// there were any.
func (b *book) expire(now time.Time) bool {
	gone := false
	for url, e := range b.entries {
		if silent := now.Sub(e.last); silent > Expiry {
			delete(b.entries, url)
			b.log.Warn("engine has stopped registering", "engine", e.engine.Name, "silent_for", silent)
			gone = true
		}
	}
	return gone
}

// engines lists the registered engines, sorted by name.
func (b *book) engines() []config.Engine {
	list := make([]config.Engine, 0, len(b.entries))
	for _, e := range b.entries {
		list = append(list, e.engine)
	}
	slices.SortFunc(list, func(a, b config.Engine) int { return strings.Compare(a.Name, b.Name) })
	return list
}
