package config

import (
	"net"
	"slices"
	"time"
)

// Server is the public side of the proxy.
type Server struct {
	// Listen is the TCP address, host:port, of the public API: HTTP/1.1 and
	// h2c, or with TLS HTTP/1.1 and h2 over TLS only. Default
	// "127.0.0.1:8080"; port 0 lets the system choose; never empty.
	Listen string `toml:"listen"`
	// HTTP3 is the UDP address, host:port, of HTTP/3, which needs TLS and adds
	// Alt-Svc to the answers of Listen. Default "": no HTTP/3.
	HTTP3 string `toml:"http3"`
	// DrainTimeout is how long open exchanges may still run after the first
	// signal. Default 30s; 0 cuts them at once.
	DrainTimeout Duration `toml:"drain_timeout"`
	// TakeoverTimeout is how long a process whose sockets a successor has taken
	// over may go on with the connections that it has. Default 1h; 0 cuts them
	// at once.
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
	// MinBodyRate is how many bytes of a request body a client must send in each
	// second that the proxy waits for them, on average, after the first 5 s.
	// Default 1KiB; 0 sets no limit but ReadTimeout.
	MinBodyRate ByteSize `toml:"min_body_rate"`
	// IdleTimeout is how long a client's connection may stay open between
	// requests. Default 120s; never 0.
	IdleTimeout Duration `toml:"idle_timeout"`
	// WriteTimeout is how long a client may make one write of an answer wait; its
	// connection or stream is cut then. It does not bound the time of a whole
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
	// TLS is the certificate of Listen and HTTP3.
	TLS TLS `toml:"tls"`
	// Auth is who may call.
	Auth Auth `toml:"auth"`
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
	// SelfSigned makes a certificate at start, for trials; not together with
	// Cert. Default false.
	SelfSigned bool `toml:"self_signed"`
	// ClientCA is a file of CA certificates (PEM): clients must show a
	// certificate of one of them. Default "": none is asked for.
	ClientCA string `toml:"client_ca"`
}

// Enabled reports whether the public side speaks TLS.
func (t TLS) Enabled() bool { return t.SelfSigned || t.Cert != "" }

// Auth is who may call the public side.
type Auth struct {
	// KeysFile is a file of lines "name sha256hex", one an API key. Default
	// "": no key is needed.
	KeysFile string `toml:"keys_file"`
}

// Admin is the operators' side of the proxy.
type Admin struct {
	// Listen is the TCP address, host:port. Default "127.0.0.1:9090"; never
	// empty.
	Listen string `toml:"listen"`
	// TokenFile is a file with the bearer token that every request must bear,
	// except those for /healthz and /readyz; needed when Listen is not loopback.
	// Default "": requests that only read need none, the others need the token
	// that the proxy makes at its start and keeps in a file for its owner.
	TokenFile string `toml:"token_file"`
	// AllowedHosts are host names, without a port, that requests without a token
	// may have in their Host line at the internal addresses: Listen, fleet.listen
	// and discovery.trtllm.cluster_uri. localhost, IP addresses, the names in
	// these keys and, beyond loopback, the machine's own name need no entry.
	// Default empty.
	AllowedHosts []string `toml:"allowed_hosts"`
	// TrustAddedEngines allows POST /v1/engines to set the keys that name local
	// files (api_key_file, ca) or widen trust (insecure_skip_verify, kv_hosts for
	// most of the address space). Default false: they are refused.
	TrustAddedEngines bool `toml:"trust_added_engines"`
}

// InternalHosts returns the names by which requests without a token may call an
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
	// FirstByte is how long the leg that answers the client may take, per
	// attempt, until the first event of a stream, or all of an answer that is no
	// stream. Default 300s.
	FirstByte Duration `toml:"first_byte"`
	// StreamIdle is how long a stream may be silent between two events, and how
	// long one event may take to come. Default 60s.
	StreamIdle Duration `toml:"stream_idle"`
	// Handshake is how much longer than Transfer the first transfer of a pair may
	// take, while its engines connect; a warm-up may take no more in all. Default
	// 30s.
	Handshake Duration `toml:"handshake"`
	// Transfer is how long decode may take to have the KV of a prompt and begin its
	// stream, from when prefill has answered. Within FirstByte, which alone bounds
	// an answer that is no stream. Default 120s.
	Transfer Duration `toml:"transfer"`
	// DeferredWrite is how much longer than Transfer that may take where prefill
	// may answer before decode has said where it is to write. Default 60s.
	DeferredWrite Duration `toml:"deferred_write"`
	// Policy is the time budget of one policy callback. Default 5ms.
	Policy Duration `toml:"policy"`
	// Dial is how long connecting to an engine may take, TLS included.
	// Default 5s.
	Dial Duration `toml:"dial"`
	// Cleanup is how long one clean-up call may take that frees KV blocks of a
	// dead exchange. Default 5s.
	Cleanup Duration `toml:"cleanup"`
}

// Limits bounds how many exchanges run and wait.
type Limits struct {
	// MaxExchanges is how many exchanges may run at a time. Default 10000; at
	// least 1.
	MaxExchanges int `toml:"max_exchanges"`
	// Queue is how many more may wait for a place; beyond it clients get 429.
	// Default 1000; 0 lets none wait.
	Queue int `toml:"queue"`
	// QueueTimeout is how long one may wait. Default 10s; 0 only together with
	// Queue = 0.
	QueueTimeout Duration `toml:"queue_timeout"`
	// MaxReading is how many requests may be sending their bodies at a time; one
	// more takes the place of the slowest. Default 0: as MaxExchanges.
	MaxReading int `toml:"max_reading"`
	// PerClient is how many exchanges one API key may have at a time, those that
	// wait included, and how many bodies it may be sending. Without keys it counts
	// for one client address, an IPv6 one being a network of 64 bits. Default: half
	// of MaxExchanges, and half of MaxReading and of Queue, each at least 64; 0: no
	// cap.
	PerClient int `toml:"per_client"`
	// MaxConnections is how many connections clients may have open at a time, TCP
	// and QUIC together, in each process. At the limit the connection closes that
	// has had no request for the longest time; where all are busy the new one is
	// refused. Default 0: half of the descriptors that are left when 48 and those
	// of the admin address are taken off the soft limit, 65536 at most.
	MaxConnections int `toml:"max_connections"`
	// MaxConnectionsPerAddress is how many of them may have one client address, for
	// IPv6 one /64. Default 0: three quarters of MaxConnections; -1: no cap.
	MaxConnectionsPerAddress int `toml:"max_connections_per_address"`
	// BufferMemory is how many bytes of requests and answers the proxy may hold.
	// Default 0: a quarter of the memory that the process may use.
	BufferMemory ByteSize `toml:"buffer_memory"`

	// The value that PerClient has where it was left out, or says the same.
	clientHalf int
}

// Reading is how many bodies may be read at a time.
func (l Limits) Reading() int {
	if l.MaxReading > 0 {
		return l.MaxReading
	}
	return l.MaxExchanges
}

// ReadingShare is how many bodies of one client may be read at a time, 0: all.
func (l Limits) ReadingShare() int { return l.clientShare(l.Reading()) }

// QueueShare is how many exchanges of one client may wait for a place, 0: all.
func (l Limits) QueueShare() int { return l.clientShare(l.Queue) }

func (l Limits) clientShare(of int) int {
	if l.halves() {
		return half(of)
	}
	return l.PerClient
}

func (l Limits) halves() bool { return l.clientHalf > 0 && l.PerClient == l.clientHalf }

// Share returns l as one of n processes goes by it, whose part of the bytes of
// BufferMemory is given. What is of one client is not divided, but a half stays a
// half.
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

// Divide is n divided by by, at least 1, and rounds up: what is allowed at all is allowed to each.
func Divide(n, by int) int {
	by = max(1, by)
	return (n + by - 1) / by
}

// defaultClient sets PerClient where the file does not.
func (l *Limits) defaultClient(set bool) {
	l.clientHalf = half(l.MaxExchanges)
	if !set {
		l.PerClient = l.clientHalf
	}
}

// leastHalf is the least that a half of a limit is: small limits are for all, so that
// one client alone may use and queue behind them.
const leastHalf = 64

// half is the half of n, and at least leastHalf.
func half(n int) int { return max(leastHalf, n/2) }

func defaultServer() Server {
	return Server{
		Listen:            "127.0.0.1:8080",
		DrainTimeout:      seconds(30),
		TakeoverTimeout:   seconds(3600),
		MaxBody:           16 << 20,
		MaxHeader:         64 << 10,
		ReadHeaderTimeout: seconds(10),
		ReadTimeout:       seconds(60),
		MinBodyRate:       1 << 10,
		IdleTimeout:       seconds(120),
		WriteTimeout:      seconds(60),
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
