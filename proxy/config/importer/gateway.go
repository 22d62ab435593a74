package importer

import (
	"maps"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// vllm-router began as a copy of SGLang's model gateway: most flags exist in both, with
// the same meaning.

// gateway reads the flags of one of the two routers into doc.
type gateway struct {
	*flags
	doc *document
	// name is the router's name in the comments of doc.
	name string
	// defaults holds the defaults that differ between the two routers.
	defaults gatewayDefaults
	// connector is the connector of the prefill and decode engines.
	connector string
	// disaggregated reports that prefill and decode run on separate engines.
	disaggregated bool
	seen          map[string]bool // addresses of engines that were already added
}

type gatewayDefaults struct {
	host    string
	metrics string // host of the Prometheus listener
	// concurrent is --max-concurrent-requests; 0: no limit.
	concurrent int
	// grace is --shutdown-grace-period-secs; 0: none.
	grace int
	// headers and fields name the headers and the body members that identify a
	// conversation.
	headers, fields []string
}

// maxSeconds is the largest duration that a flag may have.
const maxSeconds = 1_000_000_000

// sharedFlags are the flags of both routers.
func sharedFlags() map[string]flagSpec {
	specs := map[string]flagSpec{}
	for _, name := range []string{"host", "port", "policy", "prefill-policy", "decode-policy", "cache-threshold",
		"balance-abs-threshold", "balance-rel-threshold", "api-key", "service-discovery-port", "service-discovery-namespace",
		"prometheus-port", "prometheus-host", "request-timeout-secs", "max-payload-size", "max-concurrent-requests",
		"queue-size", "queue-timeout-secs", "retry-max-retries", "cb-failure-threshold", "cb-timeout-duration-secs",
		"health-failure-threshold", "health-success-threshold", "health-check-timeout-secs", "health-check-interval-secs",
		"health-check-endpoint", "backend", "decode"} {
		specs[name] = flagSpec{arity: takesOne}
	}
	for _, name := range []string{"disable-retries", "disable-circuit-breaker", "service-discovery"} {
		specs[name] = flagSpec{}
	}
	specs["worker-urls"] = flagSpec{arity: takesMany}
	specs["prefill"] = flagSpec{arity: takesURL}

	const startup = "pdproxy does not wait for engines at its start: an engine that does not answer yet gets no requests"
	const tree = "these keys limit the index: [kv_index] text_tokens and max_entries"
	const backoff = "a retry goes to another engine at once"
	maps.Copy(specs, map[string]flagSpec{
		"worker-startup-timeout-secs":   {arity: takesOne, note: startup},
		"worker-startup-check-interval": {arity: takesOne, note: startup},
		"eviction-interval":             {arity: takesOne, note: tree},
		"eviction-interval-secs":        {arity: takesOne, note: tree},
		"max-tree-size":                 {arity: takesOne, note: tree},
		"retry-initial-backoff-ms":      {arity: takesOne, note: backoff},
		"retry-max-backoff-ms":          {arity: takesOne, note: backoff},
		"retry-backoff-multiplier":      {arity: takesOne, note: backoff},
		"retry-jitter-factor":           {arity: takesOne, note: backoff},
		"cb-success-threshold":          {arity: takesOne, note: "one successful request closes a circuit"},
		"cb-window-duration-secs":       {arity: takesOne, note: "has no effect in the router either: it counts consecutive failures, as pdproxy does"},
		"selector":                      {arity: takesMany},
		"prefill-selector":              {arity: takesMany},
		"decode-selector":               {arity: takesMany},
		"log-dir":                       {arity: takesOne, note: "logs go to standard error"},
		"log-level":                     {arity: takesOne, note: "is a flag of pdproxy run: --log-level debug, info, warn or error"},
		"request-id-headers":            {arity: takesMany, note: "pdproxy reads x-request-id and adds it to every answer"},
		"rate-limit-tokens-per-second":  {arity: takesOne, lost: true, note: "pdproxy limits the rate of each client's key (rpm= in server.auth.keys_file), not the rate of all requests"},
		"cors-allowed-origins":          {arity: takesMany},
		"enable-igw":                    {note: "always on: pdproxy serves several models with one list of engines"},
		"mini-lb":                       {note: "pdproxy has one data path"},
		"history-backend":               {arity: takesOne, note: "pdproxy stores no conversations and responses"},
		"enable-trace":                  {note: "set OTEL_EXPORTER_OTLP_ENDPOINT in the environment of pdproxy"},
		"otlp-traces-endpoint": {arity: takesOne, note: "set OTEL_EXPORTER_OTLP_ENDPOINT in the environment of pdproxy",
			trap: "pdproxy sends spans over HTTP (port 4318 of most collectors), the other proxy over gRPC (4317)"},
	})
	return specs
}

// common reads the settings of both routers, after the engines.
func (g *gateway) common() {
	g.listeners()
	g.limits()
	g.care()
	g.kubernetes()
	g.dropped(g.doc)
	if g.doc.engines() == 0 && !g.on("service-discovery") && !g.on("vllm-discovery-address") && len(g.problems) == 0 {
		g.warn(g.file, 0, "", "the input names no engine")
	}
}

// address returns host and port from two flags, or their defaults.
func (g *gateway) address(hostFlag, defaultHost, portFlag string, defaultPort int) (host, port string) {
	host, ok := g.text(hostFlag)
	if !ok {
		host = defaultHost
	}
	n, ok := g.integer(portFlag, 1, 65535)
	if !ok {
		n = defaultPort
	}
	return strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"), strconv.Itoa(n)
}

func (g *gateway) listeners() {
	host, port := g.address("host", g.defaults.host, "port", 30000)
	g.doc.set("server", "listen", text(net.JoinHostPort(host, port)), "--host, --port")
	if n, ok := g.integer("max-payload-size", 1, 1<<50); ok {
		g.doc.set("server", "max_body", text(config.ByteSize(n).String()), "--max-payload-size")
	} else {
		g.doc.set("server", "max_body", text("512MiB"), "the default of --max-payload-size")
	}
	if origins := g.items("cors-allowed-origins"); len(origins) > 0 {
		g.doc.set("server", "cors_origins", list(texts(origins)), "--cors-allowed-origins")
	}
	host, port = g.address("prometheus-host", g.defaults.metrics, "prometheus-port", 29000)
	comment := "--prometheus-host, --prometheus-port"
	if !loopback(host) {
		g.warn(g.file, max(g.line("prometheus-host"), g.line("prometheus-port")), "--prometheus-host",
			"the router serves metrics on %s; pdproxy's admin address also takes commands, so the result has 127.0.0.1; for another host set admin.token_file", text(host))
		host, comment = "127.0.0.1", "--prometheus-port; any other host needs token_file"
	}
	g.doc.set("admin", "listen", text(net.JoinHostPort(host, port)), comment)
}

// loopback reports whether only this machine reaches host.
func loopback(host string) bool {
	return host == "localhost" || net.ParseIP(host).IsLoopback()
}

func (g *gateway) limits() {
	timeout, ok := g.integer("request-timeout-secs", 1, maxSeconds)
	comment := "--request-timeout-secs"
	if !ok {
		timeout, comment = 1800, "the default of "+comment
	}
	g.doc.set("timeouts", "prefill", seconds(float64(timeout)), comment)
	g.doc.set("timeouts", "first_byte", seconds(float64(timeout)), comment+"; the other proxy cuts longer streams, pdproxy does not")

	if secs, ok := g.integer("shutdown-grace-period-secs", 0, maxSeconds); ok {
		g.doc.set("server", "drain_timeout", seconds(float64(secs)), "--shutdown-grace-period-secs")
	} else if g.defaults.grace > 0 {
		g.doc.set("server", "drain_timeout", seconds(float64(g.defaults.grace)), "the default of --shutdown-grace-period-secs")
	}

	most, ok := g.integer("max-concurrent-requests", -1, 1<<30)
	comment = "--max-concurrent-requests; a hard limit in pdproxy, a token bucket in the router"
	if !ok {
		most, comment = g.defaults.concurrent, "the default of --max-concurrent-requests"
	}
	queue, queued := g.integer("queue-size", 0, 1<<30)
	wait, waits := g.integer("queue-timeout-secs", 1, maxSeconds)
	if most <= 0 {
		g.doc.note(g.line("max-concurrent-requests"), "--max-concurrent-requests", "the router has no limit; in pdproxy at most limits.max_exchanges (10000) requests run and limits.queue wait")
		return
	}
	g.doc.set("limits", "max_exchanges", number(most), comment)
	queueComment, waitComment := "--queue-size", "--queue-timeout-secs"
	if !queued {
		queue, queueComment = 100, "the default of --queue-size"
	}
	if !waits {
		wait, waitComment = 60, "the default of --queue-timeout-secs"
	}
	g.doc.set("limits", "queue", number(queue), queueComment)
	g.doc.set("limits", "queue_timeout", seconds(float64(wait)), waitComment)
}

// care reads the settings of retries, circuits and probes.
func (g *gateway) care() {
	attempts, ok := g.integer("retry-max-retries", 1, 1000)
	comment := "--retry-max-retries, which counts the first try"
	if !ok {
		attempts, comment = 5, "the default of --retry-max-retries, which counts the first try"
	}
	if g.on("disable-retries") {
		attempts, comment = 1, "--disable-retries"
	}
	g.doc.set("retry", "attempts", number(attempts), comment)
	g.doc.note(0, "retries", "pdproxy retries at most retry.budget (0.2) of recent exchanges; the router has no such limit")

	if n, ok := g.integer("cb-failure-threshold", 1, 1<<30); ok && !g.on("disable-circuit-breaker") {
		g.doc.set("circuit", "failures", number(n), "--cb-failure-threshold")
	}
	if g.on("disable-circuit-breaker") {
		g.doc.set("circuit", "failures", number(1<<30), "--disable-circuit-breaker: practically never")
	}
	if n, ok := g.integer("cb-timeout-duration-secs", 1, maxSeconds); ok {
		g.doc.set("circuit", "open_for", seconds(float64(n)), "--cb-timeout-duration-secs")
	}
	if n, ok := g.integer("health-check-interval-secs", 1, maxSeconds); ok {
		g.doc.set("health", "interval", seconds(float64(n)), "--health-check-interval-secs")
	}
	if n, ok := g.integer("health-check-timeout-secs", 1, maxSeconds); ok {
		g.doc.set("health", "timeout", seconds(float64(n)), "--health-check-timeout-secs")
	}
	if n, ok := g.integer("health-failure-threshold", 1, 1<<30); ok {
		g.doc.set("health", "unhealthy_after", number(n), "--health-failure-threshold")
	}
	if n, ok := g.integer("health-success-threshold", 1, 1<<30); ok {
		g.doc.set("health", "healthy_after", number(n), "--health-success-threshold")
	}
}

// kubernetes reads the settings of the discovery of pods, which both routers search by labels.
func (g *gateway) kubernetes() {
	port, _ := g.integer("service-discovery-port", 1, 65535)
	namespace, _ := g.text("service-discovery-namespace")
	if !g.on("service-discovery") {
		return
	}
	g.doc.kubernetes(namespace, "")
	add := func(flag, name, role, connector string) {
		selector := strings.Join(texts(g.all(flag)), ",")
		g.doc.pattern(pattern{name: name, service: name, namespace: namespace, port: port, role: role, connector: connector,
			comment: "a Service whose selector is that of --" + flag + ": " + selector})
	}
	if g.disaggregated {
		add("prefill-selector", "prefill", config.RolePrefill, g.connector)
		add("decode-selector", "decode", config.RoleDecode, g.connector)
	} else {
		add("selector", "engines", config.RoleBoth, config.ConnectorNone)
	}
	g.warn(g.file, g.line("service-discovery"), "--service-discovery", samplePods)
}

// gatewayEngine is one engine that the flags name.
type gatewayEngine struct {
	flag      string
	at        word
	name      string
	role      string
	connector string
	// bootstrap is the port of the bootstrap server; 0: none is given.
	bootstrap int
	ranks     int
}

// addEngine writes one engine.
func (g *gateway) addEngine(e gatewayEngine) {
	address, ok := g.engineURL(e.flag, e.at)
	if !ok {
		return
	}
	if g.seen[address] {
		g.warn(g.file, e.at.line, "--"+e.flag, "%s is given twice: the result has one engine", text(address))
		return
	}
	g.seen[address] = true
	out := g.doc.engine()
	out.set("name", text(e.name), "")
	out.set("url", text(address), "--"+e.flag)
	out.set("role", text(e.role), "")
	out.set("connector", text(e.connector), "")
	if e.bootstrap > 0 {
		out.set("bootstrap_port", number(e.bootstrap), "--"+e.flag)
	}
	if e.ranks > 1 {
		out.set("ranks", number(e.ranks), "--intra-node-data-parallel-size")
	}
	if path, ok := g.text("health-check-endpoint"); ok && path != "/health" {
		out.set("health_path", text("/"+strings.TrimPrefix(path, "/")), "--health-check-endpoint")
	}
	if cas := g.all("ca-cert-paths"); len(cas) > 0 && strings.HasPrefix(address, "https:") {
		out.set("ca", text(cas[0].text), "--ca-cert-paths")
	}
	if g.on("api-key") {
		out.sampleKey("api_key_file", text("engine.key"), "--api-key: put the key into a file of one line and write the path of the file")
	}
}

// engineURL checks an engine's URL. Its messages never contain the URL, which may
// contain a password.
func (g *gateway) engineURL(flag string, at word) (string, bool) {
	u, err := url.Parse(at.text)
	switch {
	case err != nil || u.Host == "" || u.Hostname() == "":
		g.problem(g.file, at.line, "--"+flag, "want a URL as http://host:port")
	case u.User != nil:
		g.problem(g.file, at.line, "--"+flag, "the URL of an engine must not contain a user or password")
	case u.Scheme == "grpc" || u.Scheme == "grpcs":
		g.lose(g.doc, g.file, at.line, "--"+flag, "pdproxy calls engines over HTTP, not over gRPC: the result lacks the engine %s", text(u.Host))
		return "", false
	case u.Scheme != "http" && u.Scheme != "https":
		g.problem(g.file, at.line, "--"+flag, "want a URL as http://host:port or https://host:port")
	case u.RawQuery != "" || u.Fragment != "":
		g.problem(g.file, at.line, "--"+flag, "the URL of an engine must not contain a query or fragment")
	default:
		return u.Scheme + "://" + u.Host + strings.TrimRight(u.EscapedPath(), "/"), true
	}
	return "", false
}

// workers adds the engines that serve whole requests.
func (g *gateway) workers(ranks int) {
	for i, w := range g.all("worker-urls") {
		g.addEngine(gatewayEngine{flag: "worker-urls", at: w, name: "e" + strconv.Itoa(i),
			role: config.RoleBoth, connector: config.ConnectorNone, ranks: ranks})
	}
}

// pairs adds the prefill and decode engines. useBootstrap: the connector has bootstrap
// servers.
func (g *gateway) pairs(connector string, useBootstrap bool, ranks int) {
	g.connector = connector
	for i, u := range g.uses["prefill"] {
		e := gatewayEngine{flag: "prefill", at: u.values[0], name: "p" + strconv.Itoa(i),
			role: config.RolePrefill, connector: connector, ranks: ranks}
		if len(u.values) == 2 && !strings.EqualFold(u.values[1].text, "none") {
			port, err := strconv.Atoi(u.values[1].text)
			if err != nil || port < 1 || port > 65535 {
				g.problem(g.file, u.values[1].line, "--prefill", "want a bootstrap port from 1 to 65535, or none, after the URL")
			}
			if useBootstrap {
				e.bootstrap = port
			}
		}
		g.addEngine(e)
	}
	for i, w := range g.all("decode") {
		g.addEngine(gatewayEngine{flag: "decode", at: w, name: "d" + strconv.Itoa(i),
			role: config.RoleDecode, connector: connector, ranks: ranks})
	}
}

// pairsWanted reports whether prefill and decode run on separate engines: the flag is
// set, or the input has prefill or decode engines and no --worker-urls.
func (g *gateway) pairsWanted(flag string) bool {
	named := g.on("prefill") || g.on("decode")
	switch {
	case g.on(flag):
		if len(g.all("worker-urls")) > 0 {
			g.warn(g.file, g.line("worker-urls"), "--worker-urls", "the router ignores it with --%s", flag)
		}
		return true
	case named && len(g.all("worker-urls")) > 0:
		g.warn(g.file, max(g.line("prefill"), g.line("decode")), "--prefill, --decode", "the router ignores them without --%s, and reads --worker-urls", flag)
	case named:
		g.warn(g.file, max(g.line("prefill"), g.line("decode")), "--prefill, --decode", "the router ignores them without --%s; pdproxy import uses them", flag)
		return true
	}
	return false
}

// sharedWarnings adds warnings about keys and engines.
func (g *gateway) sharedWarnings() {
	if g.on("api-key") {
		g.warn(g.file, g.line("api-key"), "--api-key", "pdproxy import writes no keys: put the key into a file and name the file in engine.api_key_file")
	}
	if path, ok := g.text("health-check-endpoint"); ok && strings.Contains(path, "generate") {
		g.warn(g.file, g.line("health-check-endpoint"), "--health-check-endpoint", "each probe generates a token; pdproxy probes every 2 s, or every health.interval")
	}
}
