package cmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/cmd/supervisor"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy/config"
)

type demoFlags struct {
	listen, admin, connector, place string
	prefill, decode, enginePort     int
	traffic, chaos                  bool
}

func (a *app) demoCommand() *cobra.Command {
	var d demoFlags
	c := &cobra.Command{
		Use:   "demo",
		Short: "Run simulated engines, the proxy and the built-in policies in one process",
		Example: `  pdproxy demo
  pdproxy demo --traffic                               # and watch it on the page that it prints
  pdproxy demo --chaos                                 # kills decode engines under long streams
  pdproxy demo --connector sglang --prefill 3 --decode 1
  pdproxy demo --place kv_aware --engine-port 8100     # engines on 8100, 8101, ...`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if d.chaos && !c.Flags().Changed("log-level") && !c.Root().PersistentFlags().Changed("log-level") {
				a.logLevel = "error" // each kill would write many lines between those of the demo
			}
			log, err := a.logger()
			if err != nil {
				return err
			}
			return a.demo(d, log)
		},
	}
	f := c.Flags()
	f.StringVar(&d.listen, "listen", "127.0.0.1:8080", "public address")
	f.StringVar(&d.admin, "admin", "127.0.0.1:9090", "admin address")
	f.StringVar(&d.connector, "connector", enginesim.ConnectorVLLMNixl, "connector of the engines: %s")
	f.IntVar(&d.prefill, "prefill", 2, "prefill engines")
	f.IntVar(&d.decode, "decode", 2, "decode engines")
	f.StringVar(&d.place, "place", config.Default().Policy.Place, "built-in place policy: %s")
	f.IntVar(&d.enginePort, "engine-port", 0, "port of the first engine; the others use the next ports, and the engine to compare with the last one; 0: any free ports")
	f.BoolVar(&d.traffic, "traffic", false, "send the requests of a few simulated users, to have something to watch")
	f.BoolVar(&d.chaos, "chaos", false, "kill and restart decode engines under long streams, which other engines continue, until Ctrl-C; the log has errors only, unless --log-level is given")
	chooseOf(c, "connector", demoConnectors()...)
	chooseOf(c, "place", policies.PlaceNames()...)
	return a.addJSON(a.addLog(c))
}

// demoConnectors are the connectors that move KV between two simulated engines without a shared
// folder.
func demoConnectors() []string {
	return slices.DeleteFunc(slices.Clone(enginesim.Connectors), func(name string) bool {
		return name == enginesim.ConnectorNone || name == enginesim.ConnectorVLLMStore
	})
}

// demo starts the engines, then serves until a signal.
func (a *app) demo(d demoFlags, log *slog.Logger) error {
	if d.prefill < 1 || d.decode < 1 {
		return errors.New("--prefill and --decode: at least 1")
	}
	if last := d.enginePort + d.prefill + d.decode; d.enginePort < 0 || last > 65535 {
		return errors.New("--engine-port: the ports of all engines must be from 1 to 65535")
	}
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen = d.listen, d.admin
	cfg.Server.ExposePlacement = true
	cfg.Policy.Place = d.place
	if d.chaos {
		configureChaos(&cfg)
	}
	engines, err := startDemoEngines(&cfg, d)
	defer func() {
		for _, e := range engines {
			e.Close()
		}
	}()
	if err != nil {
		return err
	}
	if problems := cfg.Validate(); len(problems) > 0 {
		return demoProblems(problems)
	}
	alone, err := enginesim.New(d.engine(enginesim.RoleBoth, d.prefill+d.decode))
	if err != nil {
		return err
	}
	if err := d.start(alone); err != nil {
		return err
	}
	defer alone.Close()
	var n *node.Node
	keys, restore := a.demoKeys(d)
	if restore != nil {
		defer restore()
	}
	o := node.Options{Version: Version, OnReady: func() { a.printDemo(n, d, alone.URL(), keys != nil) }}
	if o.Sockets.Public, err = net.Listen("tcp", d.listen); err != nil {
		return portError("--listen", d.listen, err)
	}
	if o.Sockets.Admin, err = net.Listen("tcp", d.admin); err != nil {
		o.CloseSockets()
		return portError("--admin", d.admin, err)
	}
	if n, err = node.New(&cfg, log, o); err != nil {
		o.CloseSockets()
		return err
	}
	if d.traffic {
		ctx, cancel := context.WithCancel(context.Background())
		var traffic sync.WaitGroup
		traffic.Go(func() { driveTraffic(ctx, n.URL()) })
		defer traffic.Wait()
		defer cancel()
	}
	if keys != nil {
		ctx, cancel := context.WithCancel(context.Background())
		var pressing sync.WaitGroup
		pressing.Go(func() { a.pressDemoKeys(ctx, keys, engines) })
		defer pressing.Wait()
		defer cancel()
	}
	serve := func() error {
		return supervisor.ServeUntilSignal(n, log, func() error { return errors.New("the demo has no configuration file") })
	}
	if d.chaos {
		return newChaos(a, d.connector, engines, n.URL(), n.AdminURL(), alone.URL()).run(serve)
	}
	return serve()
}

// demoProblems returns the problems of a demo's configuration, which has no file: the
// flags are named instead of the keys. Engines of one flag have one problem.
func demoProblems(problems config.Problems) error {
	flags := map[string]string{"server.listen": "--listen", "admin.listen": "--admin", "policy.place": "--place"}
	var lines []string
	for _, p := range problems {
		name := cmp.Or(flags[p.Key], p.Key)
		if strings.HasSuffix(p.Key, "].connector") {
			name = "--connector"
		}
		if line := name + ": " + p.Message; !slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, name+": ") }) {
			lines = append(lines, line)
		}
	}
	return errors.New(strings.Join(lines, "\n"))
}

// start starts an engine. An error names the flag of its port.
func (d demoFlags) start(e *enginesim.Engine) error {
	err := e.Start()
	switch {
	case err == nil || d.enginePort == 0:
		return exit.Failed(err)
	case errors.Is(err, syscall.EADDRINUSE):
		err = fmt.Errorf("%w; without the flag the engines use free ports", err)
	}
	return exit.Failed(fmt.Errorf("--engine-port: %w", err))
}

// portError describes an address that a flag names, and on which the demo cannot listen.
func portError(flag, address string, err error) error {
	if host, _, e := net.SplitHostPort(address); e == nil && errors.Is(err, syscall.EADDRINUSE) {
		err = fmt.Errorf("%w; %s %s uses a free port", err, flag, net.JoinHostPort(host, "0"))
	}
	return exit.Failed(fmt.Errorf("%s: %w", flag, err))
}

// demoEngine is an engine of the demo.
type demoEngine struct {
	*enginesim.Engine        // the present process
	name              string // in the proxy's configuration
	dead              bool   // a key has killed it
}

// startDemoEngines starts the engines and adds them to cfg.
func startDemoEngines(cfg *config.Config, d demoFlags) ([]*demoEngine, error) {
	var engines []*demoEngine
	start := func(role, name string) error {
		e, err := enginesim.New(d.engine(role, len(engines)))
		if err != nil {
			return err
		}
		if err := d.start(e); err != nil {
			return err
		}
		engines = append(engines, &demoEngine{Engine: e, name: name})
		spec := config.DefaultEngine()
		spec.Name, spec.URL, spec.Role, spec.Connector = name, e.URL(), role, d.connector
		spec.KVAddress, spec.BootstrapPort = e.KVAddress(), e.BootstrapPort()
		if spec.SideChannelled() {
			spec.SideChannel = e.SideAddress()
		}
		if spec.Pushes() {
			spec.EngineID = e.EngineID()
		}
		spec.KVEvents, spec.KVReplay = e.KVEventsEndpoint(), e.KVEventsReplay()
		if d.connector == enginesim.ConnectorTRTLLM {
			spec.KVEvents = "poll"
		}
		cfg.Engines = append(cfg.Engines, spec)
		return nil
	}
	for i := range d.prefill {
		if err := start(enginesim.RolePrefill, fmt.Sprintf("p%d", i)); err != nil {
			return engines, err
		}
	}
	for i := range d.decode {
		if err := start(enginesim.RoleDecode, fmt.Sprintf("d%d", i)); err != nil {
			return engines, err
		}
	}
	return engines, nil
}

// engine returns engine number n, from 0, which streams slowly enough to watch, and which
// reports its KV blocks.
func (d demoFlags) engine(role string, n int) enginesim.Config {
	c := enginesim.Config{Connector: d.connector, Role: role, PrefillUsPerToken: 200, DecodeUsPerToken: 20000}
	if d.enginePort > 0 {
		c.Listen = fmt.Sprintf("127.0.0.1:%d", d.enginePort+n)
	}
	if d.connector != enginesim.ConnectorTRTLLM { // whose events are always enabled
		c.KVEvents.Endpoint, c.KVEvents.Replay = "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"
	}
	return c
}

const demoBody = `{"model":"sim","stream":true,"max_tokens":24,"messages":[{"role":"user","content":"Tell me of the sea."}]}`

// printDemo prints commands to try. The second command sends the request to one engine
// alone. Both answers have the same text, which proves that the right KV blocks arrived.
func (a *app) printDemo(n *node.Node, d demoFlags, alone string, keys bool) {
	if a.json {
		_ = a.printJSON(map[string]string{"url": n.URL(), "admin": n.AdminURL(), "engine_alone": alone})
		return
	}
	if d.chaos {
		a.printChaos(n, d)
		return
	}
	admin, program := strings.TrimPrefix(n.AdminURL(), "http://"), programName()
	help := "Press Ctrl-C to stop the demo."
	if keys {
		help = "Press k to kill an engine as kill -9 does, r to restart it, and Ctrl-C to stop the demo."
	}
	fmt.Fprintf(a.out, `pdproxy serves %s with %d prefill and %d decode engines (%s, simulated).

What happens, as a page for the browser:
  %s/

A stream through two engines:
  curl -sN %s/v1/chat/completions -H 'Content-Type: application/json' -d '%s'

The same request to one engine alone gives the same text:
  curl -sN %s/v1/chat/completions -H 'Content-Type: application/json' -d '%s'

From Python (pip install openai):
  python3 -c 'from openai import OpenAI; client = OpenAI(base_url="%s/v1", api_key="none"); print(client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "Tell me of the sea."}]).choices[0].message.content)'

The reasons for the placement of a request (curl -i prints its x-request-id), and the state of the engines:
  %s explain REQUEST_ID --admin %s
  %s status --admin %s
A request that changes something needs the admin token:
  curl -s -X POST -H "Authorization: Bearer $(%s admin-token --admin %s)" %s/v1/policies/auto/reload

%s
`, n.URL(), d.prefill, d.decode, d.connector, n.AdminURL(), n.URL(), demoBody, alone, demoBody, n.URL(), program, admin, program, admin, program, admin, n.AdminURL(), help)
}
