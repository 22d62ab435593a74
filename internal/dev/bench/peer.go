package main

import (
	"strings"
)

// Works of a proxy: how it and its engines share a request.
const (
	workPass   = "pass"   // each request goes to one engine
	workVLLM   = "vllm"   // prefill and decode of vLLM: prefill's answer goes into decode's request
	workSGLang = "sglang" // prefill and decode of SGLang: both legs at once, joined by a room
	workDynamo = "dynamo" // prefill and decode of Dynamo, whose engines speak its own protocol
)

// A peer is one row of the comparison: a program with its settings and one work.
type peer struct {
	Name     string   `json:"name"`
	Software string   `json:"software"` // of softwares; "" is this program
	Work     string   `json:"work"`
	Flags    string   `json:"flags"`            // settings that are not defaults, as the page shows them
	Cannot   []string `json:"cannot,omitempty"` // of what the page measures
	// Routes: the proxy chooses among several engines by their cached prefixes.
	Routes bool `json:"routes,omitempty"`

	start func(*shelf, *scene) ([]program, error)
	// header is a header line that its requests need.
	header func(*scene) string
}

// A scene is the surroundings of a started peer.
type scene struct {
	listen  string   // address that the peer serves
	engines []string // of workPass; decode engines of the other works
	prefill []string // prefill engines
	boot    []int    // bootstrap ports of SGLang's prefill engines
	model   string
	cores   int    // that the peer may use
	dir     string // for its files
}

// A program is one process of a peer. The first of a peer serves the clients.
type program struct {
	name string
	argv []string
	// ready is the address that accepts connections when the program is ready.
	ready string
	// path is asked until it answers 200; "": a connection is enough.
	path string
	// engine: the program is an engine of the peer, whose cost does not count.
	engine bool
}

const (
	noProxy    = "no proxy"
	roundRobin = "vllm-router round_robin"
)

// peers are all rows in the order of a round. Those that are compared most
// closely are neighbours, so that the same disturbance affects them.
var peers = []peer{
	{Name: noProxy, Work: workPass},
	{Name: "pdproxy", Software: pdproxy, Work: workPass, Flags: `defaults`, start: startPdproxy("none", "")},
	{Name: "Envoy", Software: "envoy", Work: workPass, Flags: "peers/envoy.yaml: one cluster, raised circuit breakers, --concurrency N",
		Cannot: []string{"no prefill and decode, no view of engines' caches or queues (needs an endpoint picker)"}, start: startEnvoy},
	{Name: "nginx", Software: nginx, Work: workPass, Flags: "peers/nginx.conf: N workers, no buffering, kept connections",
		Cannot: []string{"no prefill and decode, no view of engines"}, start: startNginx},
	{Name: "HAProxy", Software: "haproxy", Work: workPass, Flags: "peers/haproxy.cfg: http-no-delay, nbthread N",
		Cannot: []string{"no prefill and decode, no view of engines"}, start: startHAProxy},
	{Name: "Go ReverseProxy", Work: workPass, Flags: "httputil.ReverseProxy: large idle pool, flush after each read",
		Cannot: []string{"no prefill and decode, one engine"}, start: startReverse},
	{Name: "vllm-router", Software: "vllm-router", Work: workPass, Flags: "--worker-urls (default policy: cache_aware)", Routes: true, start: startVLLMRouter("")},
	{Name: roundRobin, Software: "vllm-router", Work: workPass, Flags: "--worker-urls --policy round_robin", start: startVLLMRouter("round_robin")},
	{Name: "sglang-router", Software: "sglang-router", Work: workPass, Flags: "--worker-urls (default policy: cache_aware)", Routes: true, start: startSGLangRouter("sglang-router")},
	{Name: "SMG", Software: "smg", Work: workPass, Flags: "--worker-urls (default policy: cache_aware)", Routes: true, start: startSGLangRouter("smg")},
	{Name: "llm-d", Software: "llm-d", Work: workPass, Flags: "EPP with file discovery and the scorers of its examples, behind Envoy (ext_proc)", Routes: true, start: startLLMD},

	{Name: "pdproxy, vLLM PD", Software: pdproxy, Work: workVLLM, Flags: `connector = "vllm-nixl"`, start: startPdproxy("vllm-nixl", "")},
	{Name: "vllm-router, PD", Software: "vllm-router", Work: workVLLM, Flags: "--vllm-pd-disaggregation", start: startVLLMRouter("")},
	{Name: "vllm-router round_robin, PD", Software: "vllm-router", Work: workVLLM, Flags: "--vllm-pd-disaggregation --policy round_robin", start: startVLLMRouter("round_robin")},
	{Name: "llm-d sidecar", Software: "llm-d", Work: workVLLM, Flags: "--kv-connector=nixlv2 --secure-proxy=false; the load names the prefill engine",
		Cannot: []string{"a choice of engines (a header line names prefill; one sidecar for each decode engine)"},
		start:  startLLMDSidecar, header: func(s *scene) string { return "x-prefiller-host-port: " + s.prefill[0] }},

	{Name: "pdproxy, SGLang PD", Software: pdproxy, Work: workSGLang, Flags: `connector = "sglang"`, start: startPdproxy("sglang", "")},
	{Name: "sglang-router, PD", Software: "sglang-router", Work: workSGLang, Flags: "--pd-disaggregation", start: startSGLangRouter("sglang-router")},
	{Name: "SMG, PD", Software: "smg", Work: workSGLang, Flags: "--pd-disaggregation",
		Cannot: []string{"vLLM's prefill and decode with static workers (no kv_transfer_params without a Kubernetes annotation)"},
		start:  startSGLangRouter("smg")},

	{Name: "Dynamo", Software: "ai-dynamo", Work: workDynamo, Flags: "dynamo.frontend --router-mode kv, discovery by files, TCP requests, ZMQ events; its mocker as the engines",
		Cannot: []string{"engines over HTTP (its workers have their own protocol)", "the fault table (its mocker does not tell what is pinned)"}, start: startDynamo},
}

// kvAware is pdproxy with the policy that is compared with the cache-aware
// routers. It gets no KV events, so that all routers know only the requests.
var kvAware = peer{Name: "pdproxy kv_aware", Software: pdproxy, Work: workPass, Flags: `place = "kv_aware", without KV events`, Routes: true, start: startPdproxy("none", "kv_aware")}

// isRouter reports whether p is a row of the tables of routers. All of them choose by cached prefixes,
// except the one with which they are compared.
func (p *peer) isRouter() bool { return p.Routes || p.Name == roundRobin }

// bare returns a name of a file for a peer.
func (p *peer) bare() string {
	return strings.Map(func(r rune) rune {
		if 'a' <= r && r <= 'z' || '0' <= r && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(p.Name))
}

// urls returns the addresses as URLs.
func urls(addrs []string) []string {
	all := make([]string, len(addrs))
	for i, a := range addrs {
		all[i] = "http://" + a
	}
	return all
}

// port returns the port of an address.
func port(addr string) string { return addr[strings.LastIndexByte(addr, ':')+1:] }

func freePort() (string, error) {
	addr, err := freeAddr()
	if err != nil {
		return "", err
	}
	return port(addr), nil
}

func freePorts(n int) ([]string, error) {
	all := make([]string, n)
	for i := range all {
		var err error
		if all[i], err = freePort(); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// legs says which works send two requests to engines for one of a client.
func legs(work string) bool { return work != workPass }
