package importer

import (
	"cmp"
	"maps"
	"net"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// sidecar reads the flags of llm-d's pd-sidecar into doc. The names and defaults are those
// of pkg/sidecar/proxy/options.go in llm-d-router. The keys of its configuration file are
// the names of the flags.
type sidecar struct {
	*flags
	doc *document
}

func sidecarFlags() map[string]flagSpec {
	specs := map[string]flagSpec{}
	for _, name := range []string{"port", "model-server-port", "vllm-port", "data-parallel-size", "kv-connector", "ec-connector",
		"mooncake-bootstrap-port", "p2p-connector-port", "cert-path", "prefill-max-retries", "metrics-port",
		"moriio-decode-notify-port", "moriio-local-pod-ip", "moriio-decode-handshake-port", "moriio-tp-size", "inference-pool"} {
		specs[name] = flagSpec{arity: takesOne}
	}
	for _, name := range []string{"secure-serving", "secure-proxy", "moriio-write-mode"} {
		specs[name] = flagSpec{arity: takesSwitch}
	}
	for _, name := range []string{"enable-tls", "tls-insecure-skip-verify"} {
		specs[name] = flagSpec{arity: takesMany}
	}
	const log = "--log-level and --log-format of pdproxy run replace it"
	const hosts = "the proxy reads the data-parallel ranks from the engines"
	maps.Copy(specs, map[string]flagSpec{
		"configuration":      {arity: takesOne, lost: true, note: "the inline configuration is not read: give its keys as flags, or give the file itself to pdproxy import"},
		"configuration-file": {arity: takesOne, lost: true, note: "the file is not read: run pdproxy import llm-d with that file"},
		"pool-group":         {arity: takesOne, note: "engines come from [[engine]] or [[discovery.kubernetes.pool]]"},
		"enable-ssrf-protection": {arity: takesSwitch,
			note: "is always on: the proxy calls only the engines of its configuration and its discovery"},
		"enable-prefiller-sampling":  {arity: takesSwitch, note: "the place policy chooses if the header names several engines"},
		"enable-speculative-prefill": {arity: takesSwitch, note: "the proxy sends no requests of its own to warm the cache for a next turn"},
		"enable-p2p-pull":            {arity: takesSwitch, lost: true, note: "an engine has one connector; vllm-p2p-tier is the connector of the OffloadingConnector's P2P tier"},
		"max-idle-conns-per-host":    {arity: takesOne, note: "the proxy keeps as many idle connections as it needed; engine.max_conns bounds the open ones"},
		"prefill-retry-backoff":      {arity: takesOne, note: "a retry goes to another engine at once"},
		"decode-chunk-size":          {arity: takesOne, off: []string{"0"}, note: "a decode leg is one request to the engine"},
		"tracing":                    {arity: takesSwitch, note: "set OTEL_EXPORTER_OTLP_ENDPOINT in the environment of pdproxy"},
		"metrics-cert-dir":           {arity: takesOne, note: "the admin address has no TLS; keep it on loopback or behind a proxy"},
		"tls-min-version":            {arity: takesOne, note: "TLS 1.2 and 1.3 are accepted"},
		"tls-cipher-suites":          {arity: takesMany, note: "the cipher suites are those of Go's crypto/tls"},

		"moriio-parallel-dispatch":            {arity: takesSwitch, note: "vllm-moriio always sends both legs at the same time"},
		"moriio-parallel-decode-wait-timeout": {arity: takesOne, note: "timeouts.prefill and timeouts.first_byte bound the legs"},
		"moriio-prefill-handshake-port":       {arity: takesOne, note: "the kv_address of each prefill engine holds its ports"},
		"moriio-prefill-notify-port":          {arity: takesOne, note: "the kv_address of each prefill engine holds its ports"},
		"moriio-dp-size":                      {arity: takesOne, note: hosts},
		"moriio-dp-size-local":                {arity: takesOne, note: hosts},
		"moriio-remote-hosts":                 {arity: takesMany, note: hosts},
		"moriio-decode-hosts":                 {arity: takesMany, note: hosts},
		"zap-devel":                           {arity: takesSwitch, note: log},
		"zap-encoder":                         {arity: takesOne, note: log},
		"zap-log-level":                       {arity: takesOne, note: log},
		"zap-stacktrace-level":                {arity: takesOne, note: log},
		"zap-time-encoding":                   {arity: takesOne, note: log},
		"v":                                   {arity: takesOne, note: log},
	})
	return specs
}

// read reads all flags.
func (s *sidecar) read() {
	s.listen()
	connector := s.connector()
	s.local(connector)
	s.prefill()
	if name, ok := s.text("ec-connector"); ok && name != "" {
		if name != "ec-example" && name != "ec-nixl" {
			s.problem(s.file, s.line("ec-connector"), "--ec-connector", "want ec-example or ec-nixl")
		}
		s.doc.note(s.line("ec-connector"), "--ec-connector", "add the encoders as engines of role encode; encoder_header names them for a request")
	}
	s.dropped(s.doc)
	s.doc.kubernetes("", "")
	pool, _ := s.text("inference-pool")
	s.doc.pattern(pattern{pool: true, name: "pool", service: cmp.Or(pool[strings.LastIndexByte(pool, '/')+1:], "llm-d"), role: config.RoleBoth, connector: connector,
		comment: "the InferencePool of the engines; the label llm-d.ai/role of a pod is its role"})
	s.warn(s.file, s.line("inference-pool"), "", "the result has no remote engine: add each prefill engine as [[engine]], or the pool as [[discovery.kubernetes.pool]]; the proxy refuses a header that names another host")
}

// listen reads the addresses and certificates of the sidecar.
func (s *sidecar) listen() {
	port, ok := s.integer("port", 1, 65535)
	if !ok {
		port = 8000
	}
	s.doc.set("server", "listen", text(net.JoinHostPort("0.0.0.0", strconv.Itoa(port))), "--port")
	dir, _ := s.text("cert-path")
	switch secure := s.enabled("secure-serving", s.enabled("secure-proxy", true)); {
	case !secure:
	case dir != "":
		s.doc.set("server.tls", "cert", text(path.Join(dir, "tls.crt")), "--cert-path")
		s.doc.set("server.tls", "key", text(path.Join(dir, "tls.key")), "--cert-path")
	default:
		s.doc.set("server.tls", "self_signed", value("true"), "as in llm-d without --cert-path: for trials only")
	}
	if port, ok := s.integer("metrics-port", 0, 65535); ok && port > 0 {
		s.doc.set("admin", "listen", text(net.JoinHostPort("127.0.0.1", strconv.Itoa(port))), "--metrics-port; any other host needs token_file, because this address also takes commands")
	}
}

// connector returns the connector of the engines.
func (s *sidecar) connector() string {
	kind, ok := s.text("kv-connector")
	if !ok {
		kind = "nixlv2"
	}
	connectors := sidecarConnectors()
	connector := connectors[kind]
	if connector == "" {
		s.problem(s.file, s.line("kv-connector"), "--kv-connector", "want %s", strings.Join(slices.Sorted(maps.Keys(connectors)), ", "))
	}
	if s.enabled("moriio-write-mode", false) {
		if kind != "nixlv2" {
			s.problem(s.file, s.line("moriio-write-mode"), "--moriio-write-mode", "needs --kv-connector=nixlv2")
		}
		connector = config.ConnectorVLLMMoRIIO
	}
	return connector
}

// sidecarConnectors are the values of --kv-connector.
func sidecarConnectors() map[string]string {
	return map[string]string{
		"nixlv2": config.ConnectorVLLMNixl, "shared-storage": config.ConnectorVLLMStore, "sglang": config.ConnectorSGLang,
		"mooncake": config.ConnectorVLLMMooncake, "offloading": config.ConnectorVLLMP2PTier,
	}
}

// local writes the engine beside the sidecar.
func (s *sidecar) local(connector string) {
	flag := "model-server-port"
	if s.on("vllm-port") && !s.on(flag) {
		flag = "vllm-port"
	}
	port, ok := s.integer(flag, 1, 65535)
	if !ok {
		port = 8200
	}
	scheme := "http"
	if s.stage("enable-tls", "decoder") {
		scheme = "https"
	}
	address := scheme + "://" + net.JoinHostPort("localhost", strconv.Itoa(port))
	s.doc.set("sidecar", "local", text(address), "--"+flag)
	s.doc.set("sidecar", "role", text(config.RoleDecode), "")
	s.doc.set("sidecar", "connector", text(connector), "--kv-connector")

	e := section{name: "engine", array: true, above: "The local engine: the same url as sidecar.local."}
	e.set("name", text("local"), "")
	e.set("url", text(address), "--"+flag)
	e.set("role", text(config.RoleDecode), "")
	e.set("connector", text(connector), "")
	own := len(e.lines)
	if n, ok := s.integer("data-parallel-size", 1, 1<<16); ok && n > 1 {
		e.set("ranks", number(n), "--data-parallel-size")
	}
	if s.stage("tls-insecure-skip-verify", "decoder") {
		e.set("insecure_skip_verify", value("true"), "--tls-insecure-skip-verify")
	}
	if connector == config.ConnectorVLLMMoRIIO {
		s.moriio(&e)
	}
	if len(e.lines) > own {
		s.doc.sections = append(s.doc.sections, &e)
	}
}

// moriio adds the address at which MoRI-IO of the local engine waits.
func (s *sidecar) moriio(e *section) {
	host, ok := s.text("moriio-local-pod-ip")
	if !ok || host == "" {
		s.problem(s.file, s.line("moriio-write-mode"), "--moriio-local-pod-ip", "is required with --moriio-write-mode: write the address, the environment variable POD_IP is not known here")
		return
	}
	handshake, ok := s.integer("moriio-decode-handshake-port", 1, 65535)
	if !ok {
		handshake = 6301
	}
	notify, ok := s.integer("moriio-decode-notify-port", 1, 65535)
	if !ok {
		notify = 61005
	}
	e.set("kv_address", text("host:"+host+",handshake:"+strconv.Itoa(handshake)+",notify:"+strconv.Itoa(notify)), "--moriio-local-pod-ip, --moriio-decode-handshake-port, --moriio-decode-notify-port")
	if n, ok := s.integer("moriio-tp-size", 1, 1<<16); ok {
		e.set("tp_size", number(n), "--moriio-tp-size")
	}
}

// prefill reads the settings of the prefill engines, which the flags do not name.
func (s *sidecar) prefill() {
	n, ok := s.integer("prefill-max-retries", 0, 999)
	comment := "--prefill-max-retries and the first try"
	if !ok {
		n, comment = 0, "the default of "+comment
	}
	s.doc.set("retry", "attempts", number(n+1), comment+"; then the local engine computes the prompt, as in llm-d")
	if s.stage("enable-tls", "prefiller") || s.stage("enable-tls", "encoder") {
		s.doc.note(s.line("enable-tls"), "--enable-tls", "the url of each remote engine begins with https://")
	}
	if s.stage("tls-insecure-skip-verify", "prefiller") || s.stage("tls-insecure-skip-verify", "encoder") {
		s.doc.note(s.line("tls-insecure-skip-verify"), "--tls-insecure-skip-verify", "insecure_skip_verify = true in each remote engine")
	}
	if port, ok := s.integer("mooncake-bootstrap-port", 1, 65535); ok {
		s.doc.note(s.line("mooncake-bootstrap-port"), "--mooncake-bootstrap-port", "bootstrap_port = %d in each prefill engine", port)
	}
	if port, ok := s.integer("p2p-connector-port", 1, 65535); ok {
		s.doc.note(s.line("p2p-connector-port"), "--p2p-connector-port", "side_channel = \"HOST:%d\" in each prefill engine", port)
	}
	if pool, ok := s.text("inference-pool"); ok {
		s.doc.note(s.line("inference-pool"), "--inference-pool", "%s: its pods are engines through [[discovery.kubernetes.pool]]", pool)
	}
}

// stage reports whether a list of stages contains one: prefiller, decoder or encoder.
func (s *sidecar) stage(flag, name string) bool {
	found := false
	for _, w := range s.items(flag) {
		if !slices.Contains([]string{"prefiller", "decoder", "encoder"}, w.text) {
			s.problem(s.file, w.line, "--"+flag, "want prefiller, decoder or encoder")
		}
		found = found || w.text == name
	}
	return found
}
