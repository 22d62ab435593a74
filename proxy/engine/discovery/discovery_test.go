package discovery

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// script is a source that passes on the lists of the test.
type script struct{ lists chan []config.Engine }

func (script) Name() string { return "script" }

func (s script) Run(ctx context.Context, found func([]config.Engine)) {
	for {
		select {
		case <-ctx.Done():
			return
		case list := <-s.lists:
			found(list)
		}
	}
}

// running starts a manager with one scripted source. send passes a list to the source and
// waits until the manager has taken it.
func running(t *testing.T, allow ...string) (r *fakeRegistry, l *logs, send func(...config.Engine)) {
	t.Helper()
	r, l = newFakeRegistry(), &logs{}
	s := script{make(chan []config.Engine)}
	o := options(r, l)
	o.More = []Source{s}
	m, err := New(config.Discovery{Allow: allow}, o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { m.Run(ctx); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
	return r, l, func(list ...config.Engine) {
		s.lists <- list
		synctest.Wait()
	}
}

func TestBadEntryHarmsNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, l, send := running(t)
		r.refuse["b"] = "the name is taken"
		send(spec("a", "http://a"), spec("b", "http://b"), spec("c", "http://c"))
		if got := r.names("script"); !slices.Equal(got, []string{"a", "c"}) {
			t.Errorf("engines %v, want a, c", got)
		}
		if text := l.take(); !strings.Contains(text, "engine=b") || !strings.Contains(text, "the name is taken") || strings.Contains(text, "engine=a") {
			t.Errorf("logged: %s", text)
		}
		time.Sleep(10 * time.Second)
		if text := l.take(); text != "" {
			t.Errorf("the refusal was logged again: %s", text)
		}
		r.mu.Lock()
		delete(r.refuse, "b")
		r.mu.Unlock()
		time.Sleep(retryRefused + time.Millisecond)
		synctest.Wait()
		if got := r.names("script"); !slices.Equal(got, []string{"a", "b", "c"}) {
			t.Errorf("once the name is free: %v", got)
		}
		applied := r.applied
		time.Sleep(10 * time.Second)
		if r.applied != applied {
			t.Error("a list without changes was applied again")
		}
	})
}

func TestRefusedChangeKeepsWhatWasTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, send := running(t)
		old, next := spec("a", "http://a"), spec("a", "http://a2")
		old.Model, next.Model = "old", "new"
		send(old)
		r.refuse["a"] = "old" // the registry refuses only that version
		send(next, spec("b", "http://b"))
		if got := r.spec(t, "script", "a"); got != old {
			t.Errorf("got %+v", got)
		}
		if got := r.names("script"); !slices.Equal(got, []string{"a", "b"}) {
			t.Errorf("engines %v, want a, b", got)
		}
		r.refuse["a"] = "neither"
		send(next)
		if got := r.names("script"); len(got) != 0 {
			t.Errorf("engines %v, want none", got)
		}
	})
}

// errRegistry refuses every list without naming an engine.
type errRegistry struct{}

func (errRegistry) Expect(time.Duration) func() { return func() {} }

func (errRegistry) Apply(string, []config.Engine, time.Duration) error { return errors.New("no") }

func TestRegistryFault(t *testing.T) {
	l := &logs{}
	m, err := New(config.Discovery{}, options(errRegistry{}, l))
	if err != nil {
		t.Fatal(err)
	}
	k := &taker{m: m, source: "x", taken: map[string]config.Engine{}, logged: map[string]string{}}
	if !k.take([]config.Engine{spec("a", "http://a")}) || !strings.Contains(l.take(), "nothing changes") {
		t.Error("the refusal was not logged")
	}
}

func TestAllow(t *testing.T) {
	with := func(change func(*config.Engine)) config.Engine {
		e := spec("e", "http://10.1.2.3:8000")
		change(&e)
		return e
	}
	at := func(url string) config.Engine { return spec("e", url) }
	allow := []string{"10.0.0.0/8", "192.168.0.7", "fd00::/8", "engine-1.Lab", ".llm.svc"}
	for name, tt := range map[string]struct {
		engine config.Engine
		key    string // configuration key in the error; "": no error
	}{
		"network":               {at("http://10.1.2.3:8000"), ""},
		"other network":         {at("http://11.1.2.3:8000"), "url"},
		"address":               {at("https://192.168.0.7"), ""},
		"other address":         {at("http://192.168.0.8:80"), "url"},
		"loopback":              {at("http://127.0.0.1:8000"), "url"},
		"IPv6":                  {at("http://[fd00::1]:8000"), ""},
		"other IPv6":            {at("http://[fe80::1]:8000"), "url"},
		"IPv4 in IPv6":          {at("http://[::ffff:10.0.0.1]:8000"), ""},
		"IPv4 in IPv6, outside": {at("http://[::ffff:11.0.0.1]:8000"), "url"},
		"name":                  {at("http://ENGINE-1.lab.:8000"), ""},
		"longer name":           {at("http://x.engine-1.lab:8000"), "url"},
		"name below":            {at("http://p-0.p.llm.svc:8000"), ""},
		"the name itself":       {at("http://llm.svc:8000"), "url"},
		"end of a name":         {at("http://evilllm.svc:8000"), "url"},
		"short address":         {at("http://10.1:8000"), "url"},
		"number":                {at("http://167772161:8000"), "url"},
		"no URL":                {at("%"), "url"},
		"bootstrap":             {with(func(e *config.Engine) { e.BootstrapHost = "[fd00::2]" }), ""},
		"other bootstrap":       {with(func(e *config.Engine) { e.BootstrapHost = "169.254.169.254" }), "bootstrap_host"},
		"events":                {with(func(e *config.Engine) { e.KVEvents, e.KVReplay = "tcp://10.0.0.1:1", "tcp://[fd00::1]:2" }), ""},
		"polled events":         {with(func(e *config.Engine) { e.KVEvents = "poll" }), ""},
		"other events":          {with(func(e *config.Engine) { e.KVEvents = "tcp://h:1" }), "kv_events"},
		"KV hosts":              {with(func(e *config.Engine) { e.KVHosts = "10.0.0.9, engine-1.lab" }), ""},
		"other KV hosts":        {with(func(e *config.Engine) { e.KVHosts = "10.0.0.9,8.8.8.8" }), "kv_hosts"},
		"all KV hosts":          {with(func(e *config.Engine) { e.KVHosts = "*" }), "kv_hosts"},
		"KV network":            {with(func(e *config.Engine) { e.KVHosts = "10.0.0.0/8" }), "kv_hosts"},
		"other replay":          {with(func(e *config.Engine) { e.KVReplay = "tcp://8.8.8.8:1" }), "kv_replay"},
	} {
		t.Run(name, func(t *testing.T) {
			err := newAllowList(allow).check(tt.engine)
			if (err == nil) != (tt.key == "") || err != nil && !strings.Contains(err.Error(), "host of "+tt.key+" ") {
				t.Errorf("got %v, want %q", err, tt.key)
			}
			if err := newAllowList(nil).check(tt.engine); err != nil {
				t.Errorf("no list, and yet: %v", err)
			}
		})
	}
}

func TestNotAllowedIsLeftOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, l, send := running(t, "10.0.0.0/8")
		send(spec("a", "http://10.0.0.1:1"), spec("b", "http://127.0.0.1:9090"))
		if got := r.names("script"); !slices.Equal(got, []string{"a"}) {
			t.Errorf("engines %v, want a", got)
		}
		if text := l.take(); !strings.Contains(text, "engine=b") || !strings.Contains(text, "discovery.allow") {
			t.Errorf("logged: %s", text)
		}
	})
}
