package config

import (
	"net"
	"net/netip"
	"slices"
	"time"
)

// Server is the public side of the proxy.
type Server struct {
	// Listen is the TCP address, host:port, of the public API: HTTP/1.1 and
	// h2c, or with TLS HTTP/1.1 and h2 over TLS only. Default
	// "127.0.0.1:8080"; port 0 lets the system choose; never empty.
	Listen string `toml:"listen"`
	// HTTP1 is the server of HTTP/1.1: "own", or "nethttp", that of Go's library, which is
	// deprecated: 0.2.0 removes it. Default "own".
	HTTP1 string `toml:"http1"`
	// HTTP3 is the UDP address, host:port, of HTTP/3, which needs TLS and adds
	// Alt-Svc to the answers of Listen. Default "": no HTTP/3.
	HTTP3 string `toml:"http3"`
	// DrainTimeout is how long open exchanges may still run after the first signal.
	// Default 30s; 0 ends them at once.
	DrainTimeout Duration `toml:"drain_timeout"`
	// TakeoverTimeout is how long a process whose sockets a successor has taken over
	// may continue with its connections. Default 1h; 0 closes them at once.
	TakeoverTimeout Duration `toml:"takeover_timeout"`
	// MaxBody is the largest request body in bytes. Default 16MiB; never 0.
	MaxBody ByteSize `toml:"max_body"`
	// MaxHeader is the largest request head in bytes. Default 64KiB; never 0.
	MaxHeader ByteSize `toml:"max_header"`
	// ReadHeaderTimeout is how long a client may take to send a request head.
	// Default 10s; never 0.
	ReadHeaderTimeout Duration `toml:"read_header_timeout"`
	// ReadTimeout is how long a client may take to send a whole request, body
	// included. Default 60s; 0 sets no limit.
	ReadTimeout Duration `toml:"read_timeout"`
	// MinBodyRate is the average number of bytes of a request body that a client must
	// send per second of the proxy's waiting, after the first 5 s. Default 1KiB; 0:
	// only ReadTimeout applies.
	MinBodyRate ByteSize `toml:"min_body_rate"`
	// IdleTimeout is how long a client's connection may stay open between
	// requests. Default 120s; never 0.
	IdleTimeout Duration `toml:"idle_timeout"`
	// WriteTimeout is how long a client may block one write of an answer; its
	// connection or stream is closed then. It does not bound the time of a whole
	// stream. A stream of events over HTTP/2 or HTTP/3 has at least
	// timeouts.stream_idle. Default 60s; never 0.
	WriteTimeout Duration `toml:"write_timeout"`
	// ExposePlacement adds x-pdproxy-prefill, -decode and -flow to answers.
	// Default false.
	ExposePlacement bool `toml:"expose_placement"`
	// TrustPDFields passes the client's own PD fields (kv_transfer_params,
	// disaggregated_params, bootstrap_*, rank and rid) on to the engines.
	// Default false: they are removed.
	TrustPDFields bool `toml:"trust_pd_fields"`
	// TrustEngineFields passes the fields of clients on that change an engine or run code in
	// it: custom_logit_processor and session_params of SGLang, logits_processors of vLLM. A
	// client with a list of models may then also use lora_request of TensorRT-LLM, which names
	// a file of the engine's host. Default false: such requests get 400.
	TrustEngineFields bool `toml:"trust_engine_fields"`
	// AccessLog is the file to which each request that has ended adds one line, or "stderr", at
	// the latest after 100 ms. A process that is killed loses the lines of that time. The lines
	// contain no prompts; docs/reference/access-log.md lists the fields. A reload opens the file
	// again. Default "": no access log.
	AccessLog string `toml:"access_log"`
	// AccessLogFormat is the form of the lines: "json", or "common", the common log format of
	// web servers, which has only client, time, request line, status and bytes. Default "json".
	AccessLogFormat string `toml:"access_log_format"`
	// TrustedProxies are the addresses and networks (10.0.0.0/8) of the proxies in front of
	// this one. Behind them, the client of limits.per_client, of the limit of memory and of the
	// access log is the address that their X-Forwarded-For names. Default empty: it is the
	// address of the connection.
	TrustedProxies []string `toml:"trusted_proxies"`
	// CORSOrigins are the origins (https://chat.example.org) whose web pages may use the
	// public API from a browser; "*" allows each page of any origin. The proxy then answers
	// preflight requests, before keys and filters. Without API keys, requests of other pages
	// than these and those with the proxy's own address get 403. Default empty: no page of
	// another origin.
	CORSOrigins []string `toml:"cors_origins"`
	// EngineRoutes are further paths of engines (/generative_scoring) that clients may use.
	// One engine of the model answers such a POST alone. Its body is a JSON object or a form,
	// without PD fields. Routes by which engines are managed are errors. Default empty: none.
	EngineRoutes []string `toml:"engine_routes"`
	// TLS is the certificate of Listen and HTTP3.
	TLS TLS `toml:"tls"`
	// ACME obtains the certificates of Listen and HTTP3 from an ACME server.
	ACME ACME `toml:"acme"`
	// Auth configures the API keys.
	Auth Auth `toml:"auth"`
}

// Values of Server.HTTP1.
const (
	HTTP1Own     = "own"
	HTTP1NetHTTP = "nethttp"
)

// Values of Server.AccessLogFormat.
const (
	AccessLogJSON   = "json"
	AccessLogCommon = "common"
)

// ProxyNetworks returns TrustedProxies as networks. Entries that are neither an address nor
// a network, which Validate rejects, are left out.
func (s *Server) ProxyNetworks() []netip.Prefix {
	var networks []netip.Prefix
	for _, text := range s.TrustedProxies {
		if n, err := parseNetwork(text); err == nil {
			networks = append(networks, n)
		}
	}
	return networks
}

// TLS is the certificate of the public side. TLS is on when Cert and Key are
// set or SelfSigned is true.
type TLS struct {
	// Cert is the file of the certificate chain (PEM), read again when it
	// changes. Default "": none; set together with Key.
	Cert string `toml:"cert"`
	// Key is the file of the private key (PEM), read again when it changes.
	// Default "": none; set together with Cert.
	Key string `toml:"key"`
	// SelfSigned generates a certificate at start, for tests; not together with Cert.
	// Default false.
	SelfSigned bool `toml:"self_signed"`
	// ClientCA is a file of CA certificates (PEM): clients must present a certificate
	// of one of them. Default "": no client certificate is required.
	ClientCA string `toml:"client_ca"`
}

// Enabled reports whether the public side uses TLS.
func (t TLS) Enabled() bool { return t.SelfSigned || t.Cert != "" }

// Complete reports whether the table has the keys that need each other.
func (t TLS) Complete() bool { return (t.Cert != "") == (t.Key != "") }

// Auth configures the API keys of the public side.
type Auth struct {
	// KeysFile is a file of lines "name sha256hex", one an API key. Attributes of the
	// key's tenant may follow: tenant=, class=, models=, rpm=, tpm= and max=. Default "": no
	// key is needed, unless there is a [[jwt]].
	KeysFile string `toml:"keys_file"`
}

// Admin is the operators' side of the proxy.
type Admin struct {
	// Listen is the TCP address, host:port. Default "127.0.0.1:9090"; never
	// empty.
	Listen string `toml:"listen"`
	// TokenFile is a file with the bearer token that every request must have, except
	// those for /healthz and /readyz; required if Listen is not loopback. Default "":
	// read-only requests need no token. Other requests need the token that the proxy
	// generates at its start and stores in a file that only its owner can read.
	TokenFile string `toml:"token_file"`
	// AllowedHosts are host names, without a port, that requests without a token
	// may have in their Host line at the internal addresses: Listen, metrics.listen,
	// fleet.listen and discovery.trtllm.cluster_uri. localhost, IP addresses, the names in
	// these keys and, beyond loopback, the machine's own name need no entry.
	// Default empty.
	AllowedHosts []string `toml:"allowed_hosts"`
	// TrustAddedEngines allows POST /v1/engines to set the keys that name local files
	// (api_key_file, ca) or widen trust (insecure_skip_verify, kv_hosts for most of the
	// address space). Default false: they are rejected.
	TrustAddedEngines bool `toml:"trust_added_engines"`
}

// Metrics is an address for Prometheus.
type Metrics struct {
	// Listen is a TCP address, host:port, that serves GET /metrics and nothing else,
	// without a token. Use it to let Prometheus scrape a proxy without the token of the
	// admin address. In a fleet the coordinator serves it for all workers. Default "":
	// only the admin address serves /metrics.
	Listen string `toml:"listen"`
	// Names are further names by which the metrics appear: "inference_extension" for those of
	// the endpoint picker of the Gateway API Inference Extension (inference_objective_*,
	// inference_pool_*, inference_extension_*), and "llm_d" for llm-d's (llm_d_epp_*). Default
	// []: only pdproxy_*.
	Names []string `toml:"names"`
}

// Values of Metrics.Names.
const (
	MetricNamesExtension = "inference_extension"
	MetricNamesLLMD      = "llm_d"
)

// InternalHosts returns the host names with which requests without a token may call an
// internal address: the hosts of the configured addresses, host:port, that lead to it,
// and AllowedHosts.
func (a Admin) InternalHosts(addresses ...string) []string {
	names := slices.Clone(a.AllowedHosts)
	for _, address := range addresses {
		if host, _, err := net.SplitHostPort(address); err == nil && host != "" {
			names = append(names, host)
		}
	}
	return names
}

// Timeouts bounds each wait of an exchange. None may be 0.
type Timeouts struct {
	// Prefill is how long the prefill leg of one attempt may take until its
	// whole answer. Default 120s.
	Prefill Duration `toml:"prefill"`
	// FirstByte is how long the leg that answers the client may take, per attempt,
	// until the first event of a stream, or until the whole answer if it is not a
	// stream. Default 300s.
	FirstByte Duration `toml:"first_byte"`
	// StreamIdle is the maximum time between two events of a stream, and the maximum
	// time for one event to arrive. Default 60s.
	StreamIdle Duration `toml:"stream_idle"`
	// Handshake is the additional time, beyond Transfer, for the first transfer of a
	// pair, while its engines connect; it also bounds a whole warm-up. Default 30s.
	Handshake Duration `toml:"handshake"`
	// Transfer bounds the time from prefill's answer to the begin of decode's stream, in
	// which decode gets the KV of the prompt. FirstByte applies as well. An answer that
	// is not a stream has only the limit FirstByte. Default 120s.
	Transfer Duration `toml:"transfer"`
	// DeferredWrite is added to Transfer if prefill may answer before decode has
	// registered the blocks into which prefill writes. Default 60s.
	DeferredWrite Duration `toml:"deferred_write"`
	// Policy is the time budget of one policy callback. Default 5ms.
	Policy Duration `toml:"policy"`
	// Dial is how long connecting to an engine may take, TLS included.
	// Default 5s.
	Dial Duration `toml:"dial"`
	// Cleanup bounds one clean-up call that frees KV blocks of a failed exchange.
	// Default 5s.
	Cleanup Duration `toml:"cleanup"`
}

// Limits bounds how many exchanges run and wait.
type Limits struct {
	// MaxExchanges is how many exchanges may run at a time. Default 10000; at
	// least 1.
	MaxExchanges int `toml:"max_exchanges"`
	// Queue is the number of further exchanges that may wait for a slot; beyond it
	// clients get 429, those of lower priority classes first. Default 1000; 0: none
	// may wait.
	Queue int `toml:"queue"`
	// QueueTimeout is how long one may wait. Default 10s; 0 only together with
	// Queue = 0.
	QueueTimeout Duration `toml:"queue_timeout"`
	// NoEngineTimeout is how long a request waits while no engine can take it, for
	// example because the engines are scaled to zero. Only requests for known models
	// wait: models of the configuration, also of discovery, and models that an engine has
	// served since the proxy started. A waiting request keeps its place in MaxExchanges
	// and PerClient. Default 0: none waits, clients get 503 at once.
	NoEngineTimeout Duration `toml:"no_engine_timeout"`
	// MaxReading is the maximum number of requests that are sending their bodies; a
	// further one replaces the slowest. Default 0: as MaxExchanges.
	MaxReading int `toml:"max_reading"`
	// PerClient is the maximum number of exchanges of one API key, including waiting
	// ones, and of bodies that it is sending. Without keys it applies to each client
	// address; an IPv6 client is a network of 64 bits. Default: half of MaxExchanges,
	// and half of MaxReading and of Queue, each at least 64; 0: no limit.
	PerClient int `toml:"per_client"`
	// MaxConnections is the maximum number of open client connections, TCP and QUIC
	// together, in each process. At the limit, the connection that has had no request
	// for the longest time is closed, of the client address with the most connections
	// without a request; if all are busy, the new one is rejected. Default 0: half of
	// the soft limit of descriptors, less 48 and those of the admin address, at most
	// 65536.
	MaxConnections int `toml:"max_connections"`
	// MaxConnectionsPerAddress is the maximum for one client address, for IPv6 one /64.
	// Default 0: three quarters of MaxConnections; -1: no limit.
	MaxConnectionsPerAddress int `toml:"max_connections_per_address"`
	// BufferMemory is the maximum number of bytes of requests and answers that the
	// proxy holds. Default 0: a quarter of the memory that the process may use.
	BufferMemory ByteSize `toml:"buffer_memory"`
	// PriorityHeader is the header line in which a request names its [[priority_class]]. A
	// client may choose only classes that are not more urgent than its own. Engines never get
	// the line. Default "": none.
	PriorityHeader string `toml:"priority_header"`
	// DeadlineHeader is the header line in which a request says in how many milliseconds
	// from its arrival its first token is due, such as x-llm-d-slo-ttft-ms. A request that
	// still waits for a place or an engine then gets 503. Policies learn the remaining time.
	// Engines never get the line. Default "": none.
	DeadlineHeader string `toml:"deadline_header"`
	// TokenTimeHeader is the header line in which a request names its limit for the mean time between
	// two tokens of its answer, in milliseconds, such as x-llm-d-slo-tpot-ms. Policies learn the
	// limit, and pdproxy_token_time_requests_total counts whether it held. Engines never get the line.
	// Default "": none.
	TokenTimeHeader string `toml:"token_time_header"`
	// FairnessHeader is the header line that names the flow of a request, such as
	// x-llm-d-inference-fairness-id. Flows then share the free places in the place of
	// addresses. Requests with an API key or a token have the share of their tenant. The
	// proxy trusts the line: a gateway must set it. Engines never get the line. Default "":
	// none.
	FairnessHeader string `toml:"fairness_header"`
	// SaturationQueueDepth is the number of requests that wait in an engine from which on the
	// engine is saturated. While the mean of the engines of a model is saturated, the requests
	// of the model wait in the queue, or get 503 if the wait would be too long. Default 0: the
	// load of engines holds no request back.
	SaturationQueueDepth int `toml:"saturation_queue_depth"`
	// SaturationKVUsage is the share of KV memory in use from which on an engine that runs
	// decode is saturated, 0 to 1. It needs SaturationQueueDepth. Default 0: KV memory does
	// not count.
	SaturationKVUsage float64 `toml:"saturation_kv_usage"`
	// TrustPriority: a client may choose each class in PriorityHeader. Default false.
	TrustPriority bool `toml:"trust_priority"`

	// The default of PerClient; PerClient has this value if it is omitted or set to it.
	clientHalf int
}

// Reading returns the maximum number of bodies that are read at a time.
func (l Limits) Reading() int {
	if l.MaxReading > 0 {
		return l.MaxReading
	}
	return l.MaxExchanges
}

// ReadingShare returns the maximum number of bodies of one client that are read at a
// time; 0: no limit.
func (l Limits) ReadingShare() int { return l.clientShare(l.Reading()) }

// QueueShare returns the maximum number of waiting exchanges of one client; 0: no
// limit.
func (l Limits) QueueShare() int { return l.clientShare(l.Queue) }

func (l Limits) clientShare(of int) int {
	if l.halves() {
		return half(of)
	}
	return l.PerClient
}

func (l Limits) halves() bool { return l.clientHalf > 0 && l.PerClient == l.clientHalf }

// Share returns the limits for one of n processes; bufferMemory is its part of
// BufferMemory. Limits for one client are not divided, but one that is a half of
// another limit remains so.
func (l Limits) Share(n int, bufferMemory ByteSize) Limits {
	halves := l.halves()
	l.MaxExchanges, l.MaxReading, l.Queue = Divide(l.MaxExchanges, n), Divide(l.MaxReading, n), Divide(l.Queue, n)
	l.BufferMemory = bufferMemory
	if halves {
		l.clientHalf = half(l.MaxExchanges)
		l.PerClient = l.clientHalf
	}
	return l
}

// Divide returns n divided by by (at least 1), rounded up, so that a limit above zero
// stays above zero.
func Divide(n, by int) int {
	by = max(1, by)
	return (n + by - 1) / by
}

// defaultClient sets PerClient if the file does not.
func (l *Limits) defaultClient(set bool) {
	l.clientHalf = half(l.MaxExchanges)
	if !set {
		l.PerClient = l.clientHalf
	}
}

// minHalf is the minimum half of a limit: a small limit is not divided, so that a
// single client can use it fully.
const minHalf = 64

// half returns half of n, and at least minHalf.
func half(n int) int { return max(minHalf, n/2) }

func defaultServer() Server {
	return Server{
		Listen:            "127.0.0.1:8080",
		DrainTimeout:      seconds(30),
		TakeoverTimeout:   seconds(3600),
		MaxBody:           16 << 20,
		MaxHeader:         64 << 10,
		HTTP1:             HTTP1Own,
		AccessLogFormat:   AccessLogJSON,
		ReadHeaderTimeout: seconds(10),
		ReadTimeout:       seconds(60),
		MinBodyRate:       1 << 10,
		IdleTimeout:       seconds(120),
		WriteTimeout:      seconds(60),
		TrustedProxies:    []string{},
		CORSOrigins:       []string{},
		EngineRoutes:      []string{},
		ACME:              ACME{Domains: []string{}, Directory: LetsEncrypt},
	}
}

func defaultAdmin() Admin { return Admin{Listen: "127.0.0.1:9090", AllowedHosts: []string{}} }

func defaultTimeouts() Timeouts {
	return Timeouts{
		Prefill:       seconds(120),
		FirstByte:     seconds(300),
		StreamIdle:    seconds(60),
		Handshake:     seconds(30),
		Transfer:      seconds(120),
		DeferredWrite: seconds(60),
		Policy:        Duration(5 * time.Millisecond),
		Dial:          seconds(5),
		Cleanup:       seconds(5),
	}
}

func defaultLimits() Limits {
	return Limits{MaxExchanges: 10000, Queue: 1000, QueueTimeout: seconds(10), PerClient: 5000, clientHalf: 5000}
}

// seconds returns n seconds.
func seconds(n int) Duration { return Duration(time.Duration(n) * time.Second) }
