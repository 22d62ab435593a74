// Package quickstart prints a first deployment for each connector: the start command and
// the environment of each engine, the files that the engines read, and the configuration
// of the proxy; as commands, as scripts, and for Docker Compose and Kubernetes. One table, the guides of vllm.go, sglang.go and trtllm.go, is the source
// of the command `pdproxy quickstart` and of the pages in docs/quickstart.
package quickstart

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Limits of the counts. The port ranges of layout.go do not overlap up to these counts.
const (
	MaxEngines = 32 // engines of each role
	MaxTP      = 8  // GPUs of each engine
)

// Options describes the wanted deployment. Defaults returns the smallest one.
type Options struct {
	// Prefill and Decode are the numbers of engines, 1 to MaxEngines.
	Prefill, Decode int
	// Encode is the number of vLLM encoders, 0 to MaxEngines.
	Encode int
	// TP is the tensor-parallel size: the number of GPUs of each engine, 1 to MaxTP.
	TP int
	// Hosts are the IPv4 addresses of the hosts of the engines, at least one and at most
	// as many as engines. The engines are spread over the hosts in their order: prefill,
	// decode, encode.
	Hosts []string
	// Model is the name or path of the model for the engines. "" stands for a small
	// model.
	Model string
	// Proxy is the release of pdproxy for the files for containers.
	Proxy string
}

// Defaults returns the options of one prefill engine and one decode engine with one GPU
// each on this host.
func Defaults() Options { return Options{Prefill: 1, Decode: 1, TP: 1, Hosts: []string{"127.0.0.1"}} }

// Engine is one engine process.
type Engine struct {
	Name string `json:"name"` // such as prefill-0: its name in the configuration and of its script
	Role string `json:"role"` // prefill, decode or encode
	Host string `json:"host"` // IPv4 address
	Port int    `json:"port"` // port of its API
	// Env holds the environment variables of the engine, as NAME=VALUE.
	Env []string `json:"env"`
	// Command is the program with its arguments.
	Command []string `json:"command"`

	first int      // the number of the engine among all engines; ports count from it
	bind  string   // the address that its servers listen on
	gpus  string   // numbers of its GPUs, separated by commas
	keys  []string // further lines of its table in the configuration
}

// Service is a process beside the engines, such as a cache server.
type Service struct {
	Name    string   `json:"name"`
	Host    string   `json:"host"`
	Command []string `json:"command"`
}

// File is a file that engines read from their working directory.
type File struct {
	Name string `json:"name"`
	Text string `json:"text"`
}

// Plan is a complete deployment.
type Plan struct {
	Name     string    `json:"name"` // of the quickstart
	Title    string    `json:"title"`
	Model    string    `json:"model"`
	Release  string    `json:"release"` // the engine's release that the flags were checked against
	Install  []string  `json:"install"` // shell commands, for each host
	Services []Service `json:"services"`
	Engines  []Engine  `json:"engines"`
	Files    []File    `json:"files"`
	Config   string    `json:"config"` // the proxy's configuration, TOML
	// Flow is the value of the answer's header x-pdproxy-flow for a request in two legs.
	Flow string `json:"flow"`
	// SmokeTest and Evidence are shell commands: a request, and the engine's own count of
	// moved KV, which this request raises.
	SmokeTest string `json:"smoke_test"`
	Evidence  string `json:"evidence"`

	guide   *guide
	options Options
	tp      int
	hosts   []string
	encode  bool
	proxy   string   // release of pdproxy
	top     []string // lines of the configuration between [policy] and the engines
}

// guide is one row of the table.
type guide struct {
	name      string // as the user types it: the connector, with a suffix for a variant
	connector string // the value of the key connector
	title     string
	flow      string // the value of x-pdproxy-flow for a request in two legs
	summary   string // what the engines do, one or two sentences
	release   string // the checked release of the engine
	sources   []string
	install   []string
	model     string // default model
	encoders  bool   // --encode is possible
	amd       bool   // the engines need AMD's GPUs, the others NVIDIA's
	generate  bool   // POST /inference/v1/generate runs in two legs
	setUp     func(*Plan, *Engine)
	extra     func(*Plan) // files and services
	evidence  evidence
	notes     []string
	mistakes  []mistake
	example   string // flags that a user may add to an engine
	ran       string // which real engines ran the commands
}

// evidence is the way in which an engine shows that KV has moved.
type evidence struct {
	role   string // of the engine to ask
	path   string
	metric string
	text   string
}

// mistake is a mistake that people often make, and its effect.
type mistake struct{ title, text string }

// Summary names one quickstart.
type Summary struct {
	Name      string `json:"name"`
	Connector string `json:"connector"`
	Title     string `json:"title"`
}

// List returns all quickstarts, in the order of the table.
func List() []Summary {
	var all []Summary
	for _, g := range guides {
		all = append(all, Summary{g.name, g.connector, g.title})
	}
	return all
}

// guides is the table.
var guides = slices.Concat(vllmGuides(), []*guide{sglangGuide(), trtllmGuide(), generationFirstGuide()})

// Make returns the deployment of the quickstart called name. An error names the option
// that is wrong.
func Make(name string, o Options) (*Plan, error) {
	i := slices.IndexFunc(guides, func(g *guide) bool { return g.name == name })
	if i < 0 {
		return nil, fmt.Errorf("there is no quickstart %q", name)
	}
	g := guides[i]
	if err := o.complete(g); err != nil {
		return nil, err
	}
	return build(g, o, nil), nil
}

// build returns the deployment with complete options. move, if not nil, changes where each engine
// runs.
func build(g *guide, o Options, move func(*Engine)) *Plan {
	p := &Plan{
		Name: g.name, Title: g.title, Model: o.Model, Release: g.release, Install: g.install,
		Services: []Service{}, Files: []File{},
		Flow: g.flow, guide: g, options: o, tp: o.TP, hosts: o.Hosts, encode: o.Encode > 0, proxy: cmp.Or(o.Proxy, "latest"),
	}
	p.place(o)
	for i := range p.Engines {
		if move != nil {
			move(&p.Engines[i])
		}
		g.setUp(p, &p.Engines[i])
	}
	if g.extra != nil {
		g.extra(p)
	}
	p.Config, p.SmokeTest, p.Evidence = p.config(), p.smokeTest(), p.evidence()
	return p
}

// complete fills in the model and checks o.
func (o *Options) complete(g *guide) error {
	if o.Model == "" {
		o.Model = g.model
		if o.Encode > 0 {
			o.Model = visionModel
		}
	}
	switch {
	case len(o.Hosts) == 0:
		return errors.New("--host: no host")
	case o.Prefill < 1 || o.Prefill > MaxEngines:
		return fmt.Errorf("--prefill: want 1 to %d engines, found %d", MaxEngines, o.Prefill)
	case o.Decode < 1 || o.Decode > MaxEngines:
		return fmt.Errorf("--decode: want 1 to %d engines, found %d", MaxEngines, o.Decode)
	case o.Encode < 0 || o.Encode > MaxEngines:
		return fmt.Errorf("--encode: want 0 to %d engines, found %d", MaxEngines, o.Encode)
	case o.TP < 1 || o.TP > MaxTP:
		return fmt.Errorf("--tp: want 1 to %d GPUs, found %d", MaxTP, o.TP)
	case o.Encode > 0 && !g.encoders:
		return fmt.Errorf("--encode: %s has no encoders in pdproxy", g.name)
	case strings.HasPrefix(o.Model, "-") || strings.ContainsFunc(o.Model, notPrintable):
		return fmt.Errorf("--model: %q is not the name or path of a model", o.Model)
	}
	if n := o.Prefill + o.Decode + o.Encode; n < len(o.Hosts) {
		return fmt.Errorf("--host: more hosts (%d) than engines (%d)", len(o.Hosts), n)
	}
	return checkHosts(o.Hosts)
}

// checkHosts requires addresses, because engines bind these addresses and send them to
// each other, and a name may stand for the loopback address on its own host. The addresses
// are IPv4, because engines bind the endpoint tcp://*:PORT of their KV events on IPv4 only.
func checkHosts(hosts []string) error {
	seen := map[netip.Addr]bool{}
	for _, h := range hosts {
		a, err := netip.ParseAddr(h)
		switch {
		case err != nil || !a.Is4():
			return fmt.Errorf("--host: want IPv4 addresses, separated by commas, found %q: engines bind these addresses and send them to each other", h)
		case a.IsUnspecified() || a.IsMulticast():
			return fmt.Errorf("--host: %s is not the address of a host", h)
		case seen[a]:
			return fmt.Errorf("--host: %s is given twice", h)
		case a.IsLoopback() && len(hosts) > 1:
			return fmt.Errorf("--host: other hosts cannot reach the loopback address %s", h)
		}
		seen[a] = true
	}
	return nil
}

func notPrintable(r rune) bool { return r < ' ' || r == 0x7f }
