package engine

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

func TestKVEndpoint(t *testing.T) {
	for text, want := range map[string]bool{
		"tcp://10.0.0.1:5557": true, "tcp://engine-a:5557": true, "tcp://[fd00::1]:5557": true, "tcp://*:5557": true, "tcp://:5557": true,
		"tcp://[::]:65535": true, "tcp://[fe80::1%eth0]:1": true,
		"tcp://a:0": false, "tcp://a:65536": false, "tcp://a": false, "tcp://fd00::1:5557": false, "ipc:///run/kv": false, "inproc://kv": false,
		"a:5557": false, "": false, "tcp://a b:1": false, "tcp://a\x1b[2J:1": false, "tcp://u@a:1": false, "tcp://é:1": false,
		"tcp://" + strings.Repeat("a", 300) + ":1": false,
	} {
		if got := KVEndpoint(text); (got == text && text != "") != want || got != "" && !want {
			t.Errorf("KVEndpoint(%q) = %q", text, got)
		}
	}
}

// TestKVSources: the addresses to which the proxy connects, for a configuration and an announcement.
func TestKVSources(t *testing.T) {
	for _, tt := range []struct {
		name      string
		url       string
		source    string
		spec      func(*config.Engine)
		announced []KVEndpoints
		addresses []string
		want      []KVEndpoints
		wantErr   string
	}{
		{name: "nothing", url: "http://10.0.0.1:80", want: []KVEndpoints{{}, {}}},
		{name: "configured", url: "http://10.0.0.1:80", spec: func(e *config.Engine) { e.KVEvents, e.KVReplay = "tcp://e:1", "tcp://[fd00::1]:9" },
			want: []KVEndpoints{{Events: "tcp://e:1", Replay: "tcp://[fd00::1]:9"}, {Events: "tcp://e:2", Replay: "tcp://[fd00::1]:10"}}},
		{name: "configured events win", url: "http://10.0.0.1:80", spec: func(e *config.Engine) { e.KVEvents = "tcp://e:1" },
			announced: []KVEndpoints{{Events: "tcp://*:5", Replay: "tcp://*:6"}},
			want:      []KVEndpoints{{Events: "tcp://e:1"}, {Events: "tcp://e:2"}}},
		{name: "configured replays win", url: "http://10.0.0.1:80", spec: func(e *config.Engine) { e.KVReplay = "tcp://e:1" },
			announced: []KVEndpoints{{Events: "tcp://*:5", Replay: "tcp://*:6"}, {Events: "tcp://*:7"}},
			want:      []KVEndpoints{{Events: "tcp://10.0.0.1:5", Replay: "tcp://e:1"}, {Events: "tcp://10.0.0.1:7", Replay: "tcp://e:2"}}},
		{name: "no port for the rank", url: "http://10.0.0.1:80", spec: func(e *config.Engine) { e.KVEvents = "tcp://e:65535" },
			want: []KVEndpoints{{Events: "tcp://e:65535"}, {}}, wantErr: "rank 1"},
		{name: "wildcards", url: "http://engine-a:80", source: "dns", announced: []KVEndpoints{{Events: "tcp://0.0.0.0:6", Replay: "tcp://[::]:7"}},
			want: []KVEndpoints{{Events: "tcp://engine-a:6", Replay: "tcp://engine-a:7"}, {}}},
		{name: "loads", url: "http://10.0.0.1:80", spec: func(e *config.Engine) { e.KVEvents = "tcp://e:1" },
			announced: []KVEndpoints{{Events: "tcp://*:5", Loads: "tcp://*:8"}, {Events: "tcp://*:6", Loads: "tcp://*:9"}},
			want:      []KVEndpoints{{Events: "tcp://e:1", Loads: "tcp://10.0.0.1:8"}, {Events: "tcp://e:2", Loads: "tcp://10.0.0.1:9"}}},
		{name: "loads of a foreign host", url: "http://10.0.0.1:80", source: "dns", announced: []KVEndpoints{{Loads: "tcp://169.254.169.254:80"}},
			want: []KVEndpoints{{}, {}}, wantErr: "169.254.169.254"},
		{name: "a wildcard over IPv6", url: "http://[fd00::1]:80", source: "dns", announced: []KVEndpoints{{Events: "tcp://*:5"}, {Events: "tcp://*:9"}, {Events: "tcp://*:1"}},
			want: []KVEndpoints{{Events: "tcp://[fd00::1]:5"}, {Events: "tcp://[fd00::1]:9"}}},
		{name: "a foreign host of a configured engine", url: "http://10.0.0.1:80", announced: []KVEndpoints{{Events: "tcp://10.9.9.9:5"}},
			want: []KVEndpoints{{Events: "tcp://10.9.9.9:5"}, {}}},
		{name: "a foreign host with kv_hosts", url: "http://10.0.0.1:80", spec: func(e *config.Engine) { e.KVHosts = "10.1.1.1" },
			announced: []KVEndpoints{{Events: "tcp://10.9.9.9:5"}, {Events: "tcp://10.1.1.1:5"}},
			want:      []KVEndpoints{{}, {Events: "tcp://10.1.1.1:5"}}, wantErr: "10.9.9.9"},
		{name: "a foreign host of a found engine", url: "http://10.0.0.1:80", source: "dns", announced: []KVEndpoints{{Events: "tcp://169.254.169.254:80"}},
			want: []KVEndpoints{{}, {}}, wantErr: "set kv_events, or list the host in kv_hosts"},
		{name: "an address of a found engine", url: "http://engine-a:80", source: "dns", addresses: []string{"10.0.0.1"},
			announced: []KVEndpoints{{Events: "tcp://10.0.0.1:5"}}, want: []KVEndpoints{{Events: "tcp://10.0.0.1:5"}, {}}},
		{name: "the proxy's own host", url: "http://10.0.0.1:80", announced: []KVEndpoints{{Events: "tcp://127.0.0.1:5", Replay: "tcp://localhost:6"}},
			want: []KVEndpoints{{}, {}}, wantErr: "not known to be the engine's"},
		{name: "an engine beside the proxy", url: "http://127.0.0.1:80", source: "dns", announced: []KVEndpoints{{Events: "tcp://127.0.0.1:5", Replay: "tcp://[::1]:6"}},
			want: []KVEndpoints{{Events: "tcp://127.0.0.1:5", Replay: "tcp://[::1]:6"}, {}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFleet(t)
			spec := f.spec("a", "both", "fake")
			spec.URL, spec.Ranks = tt.url, 2
			if tt.spec != nil {
				tt.spec(&spec)
			}
			source := tt.source
			if source == "" {
				source = SourceStatic
			}
			f.must(t, f.Apply(source, []config.Engine{spec}, 0))
			i := f.get(t, "a")
			facts := &Facts{KVEvents: KVPublisher{Ranks: tt.announced}}
			for _, a := range tt.addresses {
				facts.Addresses = append(facts.Addresses, netip.MustParseAddr(a))
			}
			i.facts.Store(facts)
			got, err := i.KVSources()
			if !slices.Equal(got, tt.want) {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
			if (err != nil) != (tt.wantErr != "") || err != nil && !strings.Contains(err.Error(), tt.wantErr) {
				t.Errorf("got error %v, want %q", err, tt.wantErr)
			}
		})
	}
}

// TestMovedPublisher: a ready engine that announces another address is another process. Its blocks
// are dropped.
func TestMovedPublisher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.engines.facts["a:80"] = "model m\nevents tcp://*:5557\n"
		f.must(t, f.Add(f.spec("a", "both", "fake")))
		f.start(t)
		if n := f.get(t, "a").Restarts(); n != 0 {
			t.Errorf("%d restarts at the start", n)
		}
		for want, facts := range []string{
			"model m\nevents tcp://*:5557\n", "model m\nevents tcp://*:5999\n", "model m\nevents tcp://*:5999\nevents tcp://*:6000\n", "model m\n", "model m\nevents tcp://*:5557\n",
		} {
			f.engines.set(func() { f.engines.facts["a:80"] = facts })
			time.Sleep(3 * relearnEvery * time.Second)
			if n := f.get(t, "a").Restarts(); n != uint32(min(want, 1)) {
				t.Errorf("%q: %d restarts", facts, n)
			}
		}
	})
}

// TestAbsentFacts: an engine is asked once for a path that it does not have, and again after a
// failure, because another process may answer then.
func TestAbsentFacts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		delete(f.engines.facts, "a:80")
		f.engines.set(func() { f.engines.code["a:80/facts"] = 404 })
		spec := f.spec("a", "both", "fake")
		spec.Model = "m"
		f.must(t, f.Add(spec))
		f.start(t)
		asked := func() (n int) {
			f.engines.set(func() { n = f.engines.calls["a:80/facts"] })
			return n
		}
		time.Sleep(10 * relearnEvery * time.Second)
		if n := asked(); n != 1 {
			t.Errorf("asked %d times for a path that the engine does not have", n)
		}
		f.engines.set(func() { f.engines.down["a:80"] = true })
		time.Sleep(10 * time.Second)
		f.engines.set(func() { f.engines.down["a:80"], f.engines.code["a:80/facts"] = false, 0 })
		time.Sleep(10 * relearnEvery * time.Second)
		if n := asked(); n < 3 {
			t.Errorf("asked %d times, want more after the engine was away", n)
		}
	})
}
