package quickstart

import (
	"cmp"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
)

// shapes are deployments that each test makes with each quickstart.
var shapes = map[string]Options{
	"default":      {},
	"one host":     {Prefill: 3, Decode: 2, TP: 2, Model: "org/model with spaces and 'quotes'"},
	"two hosts":    {Prefill: 2, Decode: 3, Hosts: []string{"10.0.0.5", "10.0.0.6"}},
	"largest":      {Prefill: MaxEngines, Decode: MaxEngines, TP: MaxTP},
	"encoders":     {Encode: 2},
	"encoders far": {Encode: MaxEngines, Prefill: MaxEngines, Decode: MaxEngines, TP: MaxTP, Hosts: []string{"10.0.0.5", "10.0.0.6", "10.0.0.7"}},
}

// filled returns o with the defaults in place of its zero values.
func filled(o Options) Options {
	d := Defaults()
	o.Prefill, o.Decode, o.TP = cmp.Or(o.Prefill, d.Prefill), cmp.Or(o.Decode, d.Decode), cmp.Or(o.TP, d.TP)
	if o.Hosts == nil {
		o.Hosts = d.Hosts
	}
	return o
}

// each calls f with each quickstart in each shape that it supports.
func each(t *testing.T, f func(*testing.T, *Plan, Options)) {
	for _, g := range guides {
		for shape, o := range shapes {
			if o.Encode > 0 && !g.encoders || shape == "largest" && g.encoders {
				continue // "encoders far" is larger
			}
			t.Run(g.name+"/"+shape, func(t *testing.T) {
				o := filled(o)
				p, err := Make(g.name, o)
				if err != nil {
					t.Fatal(err)
				}
				f(t, p, o)
			})
		}
	}
}

func TestConfigurationIsValid(t *testing.T) {
	each(t, func(t *testing.T, p *Plan, o Options) {
		c, err := config.Parse([]byte(p.Config))
		if err != nil {
			t.Fatalf("%v\n%s", err, p.Config)
		}
		if w := c.Warnings(); len(w) > 0 {
			t.Errorf("warnings: %v", w)
		}
		if len(c.Engines) != len(p.Engines) || len(c.Engines) != o.Prefill+o.Decode+o.Encode {
			t.Fatalf("%d engines in the configuration, %d in the plan", len(c.Engines), len(p.Engines))
		}
		for i, e := range c.Engines {
			want := p.Engines[i]
			if e.Name != want.Name || e.Role != want.Role || e.URL != "http://"+want.address(want.Port) {
				t.Errorf("engine %q, role %q, at %s; the plan has %+v", e.Name, e.Role, e.URL, want)
			}
		}
	})
}

// TestEveryConnector compares the table with the connectors of the proxy.
func TestEveryConnector(t *testing.T) {
	var missing []string
	for _, c := range connector.All() {
		i := slices.IndexFunc(guides, func(g *guide) bool { return g.connector == c.Name() })
		if i < 0 {
			missing = append(missing, c.Name())
			continue
		}
		if g := guides[i]; g.flow != c.Flow().String() {
			t.Errorf("%s: flow %s, the connector's is %s", g.name, g.flow, c.Flow())
		}
	}
	if !slices.Equal(missing, []string{config.ConnectorNone}) {
		t.Errorf("connectors without a quickstart: %v, want only %q", missing, config.ConnectorNone)
	}
}

var port = regexp.MustCompile(`(?:^|[^0-9.])([0-9]{4,5})(?:[^0-9.]|$)`)

// TestDistinctPorts requires that no two processes bind the same port, and that each
// address in the configuration is one that the engine of this name binds.
func TestDistinctPorts(t *testing.T) {
	each(t, func(t *testing.T, p *Plan, _ Options) {
		owner := map[int]string{proxyPort: "the proxy", 9090: "the admin address"}
		claim := func(name string, first, count int) {
			for n := first; n < first+count; n++ {
				if other := owner[n]; other != "" && other != name {
					t.Errorf("port %d of %s belongs to %s", n, name, other)
				}
				owner[n] = name
			}
		}
		for _, s := range p.Services {
			claim(s.Name, lmcachePort, 1)
		}
		for i := range p.Engines {
			e := &p.Engines[i]
			claim(e.Name, e.Port, 1)
			for _, first := range enginePorts(t, e) {
				count := 1
				if perRank(first) {
					count = p.tp
				}
				claim(e.Name, first, count)
			}
			for _, key := range e.keys {
				for _, m := range port.FindAllStringSubmatch(key, -1) {
					if n, _ := strconv.Atoi(m[1]); owner[n] != e.Name && !strings.HasPrefix(key, "tp_size") {
						t.Errorf("%s: %s: the engine does not bind port %d", e.Name, key, n)
					}
				}
			}
		}
	})
}

// perRank reports whether each rank of an engine binds a port from the first on.
func perRank(first int) bool {
	for _, from := range []int{handshakePort, notifyPort} {
		if first >= from && first < from+3*MaxEngines*MaxTP {
			return true
		}
	}
	return false
}

// enginePorts returns the first port of each range that e binds beside its API: all
// numbers of four or five digits in its environment and its JSON arguments, except sizes.
func enginePorts(t *testing.T, e *Engine) []int {
	t.Helper()
	var all []int
	for _, text := range slices.Concat(e.Env, e.Command[1:]) {
		for _, m := range port.FindAllStringSubmatch(text, -1) {
			n, err := strconv.Atoi(m[1])
			if err != nil {
				t.Fatal(err)
			}
			if n != e.Port && n < 1<<16 {
				all = append(all, n)
			}
		}
	}
	return all
}

// TestGPUs requires that engines of one host share no GPU.
func TestGPUs(t *testing.T) {
	each(t, func(t *testing.T, p *Plan, o Options) {
		used := map[string]bool{}
		for _, e := range p.Engines {
			list := strings.Split(strings.TrimPrefix(e.Env[0], "CUDA_VISIBLE_DEVICES="), ",")
			if len(list) != o.TP {
				t.Errorf("%s has GPUs %v, want %d", e.Name, list, o.TP)
			}
			for _, gpu := range list {
				if key := e.Host + "/" + gpu; used[key] {
					t.Errorf("%s: GPU %s is taken", e.Name, key)
				} else {
					used[key] = true
				}
			}
		}
		for _, h := range p.hosts {
			if !slices.ContainsFunc(p.Engines, func(e Engine) bool { return e.Host == h }) {
				t.Errorf("host %s has no engine", h)
			}
		}
	})
}

// TestShell lets bash read all that a user runs.
func TestShell(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Fatal(err)
	}
	var script strings.Builder
	each(t, func(t *testing.T, p *Plan, _ Options) {
		if len(p.Engines) > 10 {
			return // the same commands with other numbers
		}
		script.WriteString(p.Text())
		for _, f := range p.Output() {
			if strings.HasSuffix(f.Name, ".sh") {
				script.WriteString(f.Text)
			}
		}
	})
	check := exec.Command(bash, "-n")
	check.Stdin = strings.NewReader(script.String())
	if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("bash -n: %v: %s", err, out)
	}
}

// TestWords compares the words that a shell makes of a command with its arguments.
func TestWords(t *testing.T) {
	p, err := Make("vllm-p2p-tier", filled(Options{Model: `a 'b' "c" $d \e`}))
	if err != nil {
		t.Fatal(err)
	}
	e := &p.Engines[0]
	out, err := exec.Command("bash", "-c", e.shell(`printf '%s\n' `, ` "$@"`), "bash", "--more").Output()
	if want := strings.Join(append(e.Command, "--more"), "\n") + "\n"; err != nil || string(out) != want {
		t.Errorf("%v: %q, want %q", err, out, want)
	}
}

func TestProblems(t *testing.T) {
	for _, tt := range []struct {
		name string
		o    Options
		want string
	}{
		{"nixl", Options{}, `no quickstart "nixl"`},
		{"vllm-nixl", Options{Prefill: MaxEngines + 1}, "--prefill: want 1 to 32"},
		{"vllm-nixl", Options{Decode: -1}, "--decode: want 1 to 32"},
		{"vllm-nixl", Options{Encode: -1}, "--encode: want 0 to 32"},
		{"vllm-nixl", Options{TP: 9}, "--tp: want 1 to 8"},
		{"vllm-nixl", Options{Hosts: []string{}}, "--host: no host"},
		{"sglang", Options{Encode: 1}, "--encode: sglang has no encoders"},
		{"vllm-nixl", Options{Model: "--port"}, "--model"},
		{"vllm-nixl", Options{Model: "a\nb"}, "--model"},
		{"vllm-nixl", Options{Hosts: []string{"gpu1"}}, `--host: want IPv4 addresses, separated by commas, found "gpu1"`},
		{"vllm-nixl", Options{Hosts: []string{"fd00::5"}}, `found "fd00::5"`},
		{"vllm-nixl", Options{Hosts: []string{"0.0.0.0"}}, "--host"},
		{"vllm-nixl", Options{Hosts: []string{"10.0.0.5", "10.0.0.5"}}, "twice"},
		{"vllm-nixl", Options{Hosts: []string{"10.0.0.5", "127.0.0.1"}}, "loopback"},
		{"vllm-nixl", Options{Hosts: []string{"10.0.0.5", "10.0.0.6", "10.0.0.7"}}, "more hosts"},
	} {
		t.Run(fmt.Sprint(tt.want), func(t *testing.T) {
			if p, err := Make(tt.name, filled(tt.o)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, error %v, want %q", p, err, tt.want)
			}
		})
	}
}
