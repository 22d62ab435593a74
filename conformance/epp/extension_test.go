package epp

import (
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"text/template"
)

// endpoint is one port of a pod: a simulated engine of both roles.
type endpoint struct {
	Host string
	Port int
}

func (e endpoint) String() string { return net.JoinHostPort(e.Host, strconv.Itoa(e.Port)) }

// requests returns how many requests the engine has served, by its own count.
func (e endpoint) requests(t *testing.T) int {
	t.Helper()
	_, text := get("http://" + e.String() + "/sim/state")
	var state struct{ Requests int }
	if err := json.Unmarshal([]byte(text), &state); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return state.Requests
}

// pool is an InferencePool with its picker.
type pool struct {
	Name      string
	Open      bool // failureMode FailOpen
	Picker    int
	Second    int // another picker of the same pool; 0: none
	Endpoints []endpoint
	H2C       bool // appProtocol kubernetes.io/h2c
	process   *process
	admin     string
	probes    []endpoint // where the picker probes Endpoints; nil: there
	lines     string     // of the picker's configuration, before its tables
}

// Pickers returns the ports of the pickers.
func (p *pool) Pickers() []int {
	if p.Second != 0 {
		return []int{p.Picker, p.Second}
	}
	return []int{p.Picker}
}

// hosts returns the addresses of the pods.
func (p *pool) hosts() (hosts []string) {
	for _, e := range p.Endpoints {
		if !slices.Contains(hosts, e.Host) {
			hosts = append(hosts, e.Host)
		}
	}
	return hosts
}

// counts returns the requests of each endpoint.
func (p *pool) counts(t *testing.T) map[endpoint]int {
	counts := map[endpoint]int{}
	for _, e := range p.Endpoints {
		counts[e] = e.requests(t)
	}
	return counts
}

// extension is a gateway with three pools, as the conformance suite of the extension has
// them: primary (three pods), secondary (three pods, fail open) and dp (three pods with three
// ports each).
type extension struct {
	gateway *gateway
	second  *gateway // has the pool secondary only
	pools   map[string]*pool
}

func newExtension(t *testing.T) *extension {
	x := &extension{pools: map[string]*pool{}}
	var list []*pool
	for i, p := range []*pool{{Name: "primary"}, {Name: "secondary", Open: true}, {Name: "dp"}} {
		ports := []int{portOf(free(t))}
		if p.Name == "dp" {
			ports = append(ports, portOf(free(t)), portOf(free(t)))
		}
		for pod := range 3 {
			for _, port := range ports {
				p.Endpoints = append(p.Endpoints, endpoint{fmt.Sprintf("127.0.%d.%d", i+1, pod+1), port})
			}
		}
		x.pools[p.Name] = p
		list = append(list, p)
	}
	for _, p := range list {
		for _, e := range p.Endpoints {
			start(t, "pod-"+e.String(), pdproxy(t), "sim", "--connector", "none", "--role", "both", "--listen", e.String())
		}
	}
	for _, p := range list {
		p.start(t)
	}
	x.gateway = &gateway{Name: "gateway", Pools: list, Weighted: true}
	x.second = &gateway{Name: "second", Pools: list[1:2]}
	startGateways(t, list, x.gateway, x.second)
	return x
}

// start starts the picker of the pool.
func (p *pool) start(t *testing.T) {
	t.Helper()
	config := ""
	for i, e := range p.Endpoints {
		probed := e
		if p.probes != nil {
			probed = p.probes[i]
		}
		config += fmt.Sprintf("[[engine]]\nname = %q\nurl = \"http://%s\"\nendpoint = %q\nrole = \"both\"\nconnector = \"none\"\n", e, probed, e)
	}
	listen, admin := free(t), free(t)
	p.Picker, p.admin = portOf(listen), "http://"+admin
	p.process = run(t, "picker-"+p.Name, fmt.Sprintf("server.listen = %q\nadmin.listen = %q\npolicy.place = \"round_robin\"\nepp.listen = %q\n%s%s", free(t), admin, listen, p.lines, config))
	until(t, "the picker of "+p.Name+" has all engines", func() bool {
		_, text := get(p.admin + "/v1/engines")
		return strings.Count(text, `"state":"ready"`) == len(p.Endpoints)
	})
}

// gateway is one listener of Envoy, with a host for each of its pools.
type gateway struct {
	Name     string
	Port     int
	Pools    []*pool
	Log      string // path of the access log; "": none
	Limits   int    // port of a service that counts tokens; 0: none
	Streamed bool   // response_body_mode is STREAMED; false: FULL_DUPLEX_STREAMED
	Weighted bool   // it also has the host "weighted": 70 % primary, 30 % secondary
}

func (g *gateway) url() string { return "http://127.0.0.1:" + strconv.Itoa(g.Port) }

// startGateways starts an Envoy with gateways and all their pools.
func startGateways(t testing.TB, pools []*pool, gateways ...*gateway) {
	t.Helper()
	text, err := template.ParseFiles("extension.yaml.in")
	if err != nil {
		t.Fatal(err)
	}
	admin := free(t)
	for _, g := range gateways {
		g.Port = portOf(free(t))
	}
	path := filepath.Join(t.TempDir(), "envoy.yaml")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := text.Execute(f, map[string]any{"Admin": portOf(admin), "Gateways": gateways, "Pools": pools}); err != nil {
		t.Fatal(err)
	}
	start(t, "envoy", envoyPath(t), "-c", path, "--disable-hot-restart", "--file-flush-interval-msec", "100", "--concurrency", "2", "-l", "warning")
	untilEnvoy(t, admin)
}

// ask sends a request for a host of the gateway and returns the endpoint that Envoy reports.
// selection is the list of the endpoints from which the picker may choose; "" is all of them.
func (x *extension) ask(t *testing.T, host, selection string) (served string, err error) {
	return x.gateway.ask(t, host, selection)
}

func (g *gateway) ask(t *testing.T, host, selection string) (served string, err error) {
	r, err := http.NewRequestWithContext(t.Context(), "POST", g.url()+"/v1/completions",
		strings.NewReader(`{"model":"sim","prompt":"Write as if you were a critic: San Francisco","max_tokens":2}`))
	if err != nil {
		return "", err
	}
	r.Host = host
	r.Header.Set("Content-Type", "application/json")
	if selection != "" {
		r.Header.Set("test-epp-endpoint-selection", selection)
	}
	resp, err := clients["H1"].Do(r)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var answer struct{ Choices []any }
	if err := json.NewDecoder(resp.Body).Decode(&answer); resp.StatusCode != 200 || err != nil || len(answer.Choices) != 1 {
		return "", fmt.Errorf("status %d, %v", resp.StatusCode, err)
	}
	return resp.Header.Get("X-Served-Endpoint"), nil
}

// askMany sends 100 requests, ten at a time.
func (x *extension) askMany(t *testing.T, host, selection string) {
	t.Helper()
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			for range 10 {
				if _, err := x.ask(t, host, selection); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// only sends 100 requests and checks that the allowed endpoints alone, and each allowed pod,
// have served them, by the engines' own counts. An address allows each port of its pod.
func (x *extension) only(t *testing.T, p *pool, allowed ...string) {
	t.Helper()
	before := p.counts(t)
	x.askMany(t, p.Name, strings.Join(allowed, ","))
	byPod, sum := map[string]int{}, 0
	for e, n := range p.counts(t) {
		n -= before[e]
		if n > 0 && !slices.Contains(allowed, e.Host) && !slices.Contains(allowed, e.String()) {
			t.Errorf("%s, which is not allowed, served %d requests", e, n)
		}
		byPod[e.Host] += n
		sum += n
	}
	for _, a := range allowed {
		host, _, err := net.SplitHostPort(a)
		if err != nil {
			host = a
		}
		if byPod[host] == 0 {
			t.Errorf("%s served nothing", host)
		}
	}
	if sum != 100 {
		t.Errorf("the pods served %d requests, want 100", sum)
	}
}

// TestExtension has the conformance cases of the Gateway API Inference Extension v1.6.0
// (conformance/tests) that concern the traffic between gateway and picker, under their names.
// The gateway is an Envoy without Kubernetes. docs/howto/gateway.md lists the other cases.
func TestExtension(t *testing.T) {
	x := newExtension(t)
	primary, secondary, dp := x.pools["primary"], x.pools["secondary"], x.pools["dp"]
	t.Run("GatewayFollowingEPPRouting", func(t *testing.T) {
		h := primary.hosts()
		t.Run("single designated pod", func(t *testing.T) { x.only(t, primary, h[2]) })
		t.Run("two designated pods", func(t *testing.T) { x.only(t, primary, h[0], h[1]) })
		t.Run("all available pods", func(t *testing.T) { x.only(t, primary, h...) })
	})
	t.Run("GatewayFollowingEPPRoutingWithDataParallelism", func(t *testing.T) {
		h, ports := dp.hosts(), []string{}
		for _, e := range dp.Endpoints[:3] {
			ports = append(ports, strconv.Itoa(e.Port))
		}
		t.Run("one designated pod, any rank", func(t *testing.T) { x.only(t, dp, h[1]) })
		t.Run("two designated pods; one has a fixed rank", func(t *testing.T) { x.only(t, dp, h[0], net.JoinHostPort(h[2], ports[1])) })
		t.Run("all pods; one restricted to two ranks", func(t *testing.T) {
			x.only(t, dp, h[0], net.JoinHostPort(h[1], ports[0]), net.JoinHostPort(h[1], ports[2]), h[2])
		})
	})
	t.Run("GatewayDestinationEndpointServed", func(t *testing.T) {
		for _, e := range primary.Endpoints {
			if served, err := x.ask(t, "primary", e.Host); err != nil || served != e.String() {
				t.Errorf("Envoy reports %q, %v, want %s", served, err, e)
			}
		}
		if _, text := get(primary.admin + "/metrics"); strings.Contains(text, "other_endpoint") {
			t.Error("the picker counted a request that another endpoint served")
		}
	})
	t.Run("HTTPRouteMultipleRulesDifferentPools", func(t *testing.T) {
		x.only(t, primary, primary.hosts()...)
		x.only(t, secondary, secondary.hosts()...)
	})
	t.Run("HTTPRouteMultipleGatewaysDifferentPools", func(t *testing.T) {
		for g, p := range map[*gateway]*pool{x.gateway: primary, x.second: secondary} {
			if served, err := g.ask(t, p.Name, ""); err != nil || !slices.ContainsFunc(p.Endpoints, func(e endpoint) bool { return e.String() == served }) {
				t.Errorf("%s: %q, %v", g.Name, served, err)
			}
		}
		if _, err := x.second.ask(t, "primary", ""); err == nil {
			t.Error("the second gateway serves a pool of the first")
		}
	})
	t.Run("GatewayWeightedAcrossTwoInferencePools", func(t *testing.T) {
		before := primary.counts(t)
		other := secondary.counts(t)
		for range 3 {
			x.askMany(t, "weighted", "")
		}
		first, second := 0, 0
		for e, n := range primary.counts(t) {
			first += n - before[e]
		}
		for e, n := range secondary.counts(t) {
			second += n - other[e]
		}
		// 210 of 300 are expected; six standard deviations are 48.
		if first+second != 300 || math.Abs(float64(first-210)) > 48 {
			t.Errorf("the pools served %d and %d requests, want 70 %% and 30 %%", first, second)
		}
	})
	t.Run("EppUnAvailableFailOpen", func(t *testing.T) {
		x.only(t, secondary, secondary.hosts()[0]) // while the picker serves
		secondary.process.stop(t, syscall.SIGKILL)
		until(t, "the gateway notices that the picker has gone", func() bool {
			_, err := x.ask(t, "secondary", secondary.hosts()[0])
			return err == nil
		})
		before := secondary.counts(t)
		x.askMany(t, "secondary", secondary.hosts()[0])
		sum := 0
		for e, n := range secondary.counts(t) {
			sum += n - before[e]
		}
		if sum != 100 {
			t.Errorf("the pods served %d requests, want 100", sum)
		}
	})
}

// TestInferencePoolAppProtocol is the case InferencePoolAppProtocol: the gateway speaks the
// protocol of the pool to the chosen pod.
func TestInferencePoolAppProtocol(t *testing.T) {
	x := &extension{}
	var list []*pool
	seen := map[string]chan string{}
	for i, p := range []*pool{{Name: "explicit-h2c", H2C: true}, {Name: "omitted"}} {
		for pod := range 2 {
			p.Endpoints = append(p.Endpoints, endpoint{fmt.Sprintf("127.0.%d.%d", i+5, pod+1), portOf(free(t))})
		}
		for _, e := range p.Endpoints {
			seen[e.String()] = protocolPod(t, e)
		}
		p.start(t)
		list = append(list, p)
	}
	x.gateway = &gateway{Name: "gateway", Pools: list}
	startGateways(t, list, x.gateway)
	for _, p := range list {
		for _, e := range p.Endpoints {
			want := map[bool]string{true: "HTTP/2.0", false: "HTTP/1.1"}[p.H2C]
			if served, err := x.ask(t, p.Name, e.String()); err != nil || served != e.String() {
				t.Errorf("%s: Envoy reports %q, %v, want %s", p.Name, served, err, e)
			} else if got := <-seen[e.String()]; got != want {
				t.Errorf("%s: the pod got %s, want %s", p.Name, got, want)
			}
		}
	}
}

// protocolPod starts a pod that serves HTTP/1.1 and cleartext HTTP/2. The channel gets the
// protocol of each completion.
func protocolPod(t *testing.T, e endpoint) chan string {
	seen := make(chan string, 10)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) {
		seen <- r.Proto
		fmt.Fprint(w, `{"object":"text_completion","choices":[{"index":0,"text":"critic"}]}`)
	})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"data":[{"id":"sim"}]}`) })
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	l, err := net.Listen("tcp", e.String())
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: mux, Protocols: new(http.Protocols)}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan struct{})
	go func() { // ends with Close
		defer close(done)
		_ = s.Serve(l) // http.ErrServerClosed
	}()
	t.Cleanup(func() {
		s.Close()
		<-done
	})
	return seen
}
