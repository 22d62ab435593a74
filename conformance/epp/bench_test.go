package epp

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// arena is an Envoy in front of simulated engines, with one host for each picker.
type arena struct {
	gateway string
	engines []endpoint
	pickers []*pool
}

// newArena starts n engines with that number of KV blocks each, pdproxy as a picker and, if LLMD_EPP
// names the program, llm-d's EPP. The pool "direct" has no picker.
func newArena(b *testing.B, n, blocks int) *arena {
	a := &arena{}
	for range n {
		e := endpoint{"127.0.0.1", portOf(free(b))}
		a.engines = append(a.engines, e)
		start(b, "engine-"+e.String(), pdproxy(b), "sim", "--connector", "none", "--role", "both", "--listen", e.String(), "--kv-blocks", strconv.Itoa(blocks))
	}
	for _, e := range a.engines {
		until(b, e.String(), func() bool { status, _ := get("http://" + e.String() + "/health"); return status == 200 })
	}
	a.pickers = append(a.pickers, a.pdproxy(b, "pdproxy", pdproxy(b)))
	if program := os.Getenv("LLMD_EPP"); program != "" {
		a.pickers = append(a.pickers, a.llmd(b, program))
	}
	return a
}

// newDuel is newArena with further pickers: the two floors if EPP_FLOOR names the program of
// internal/dev/eppfloor, and another build of pdproxy if PDPROXY_BEFORE names it.
func newDuel(b *testing.B, n, blocks int) *arena {
	a := newArena(b, n, blocks)
	if program := os.Getenv("PDPROXY_BEFORE"); program != "" {
		a.pickers = append(a.pickers, a.pdproxy(b, "before", program))
	}
	if program := os.Getenv("EPP_FLOOR"); program != "" {
		a.pickers = append(a.pickers, a.floor(b, "floor", program), a.floor(b, "bytes", program, "-bytes"))
	}
	return a
}

// floor starts the picker that always names the first engine.
func (a *arena) floor(b *testing.B, name, program string, flags ...string) *pool {
	p := &pool{Name: name, Endpoints: a.engines}
	listen := free(b)
	p.Picker = portOf(listen)
	p.process = start(b, name, program, append(flags, "-listen", listen, "-endpoint", a.engines[0].String())...)
	return p
}

// pdproxy starts a build of pdproxy as the picker of all engines.
func (a *arena) pdproxy(b *testing.B, name, program string) *pool {
	config := ""
	for i, e := range a.engines {
		config += fmt.Sprintf("[[engine]]\nname = \"e%d\"\nurl = \"http://%s\"\nrole = \"both\"\nconnector = \"none\"\n", i, e)
	}
	p := &pool{Name: name, Endpoints: a.engines}
	listen, admin := free(b), free(b)
	p.Picker, p.admin = portOf(listen), "http://"+admin
	p.process = runProgram(b, "picker-"+name, program, fmt.Sprintf("server.listen = %q\nadmin.listen = %q\npolicy.place = \"kv_aware\"\nlimits.per_client = 0\n[epp]\nlisten = %q\n%s", free(b), admin, listen, config))
	until(b, "the picker has all engines", func() bool {
		_, text := get(p.admin + "/v1/engines")
		return strings.Count(text, `"state":"ready"`) == len(p.Endpoints)
	})
	return p
}

// llmdConfig is an EndpointPickerConfig with the scorers of llm-d's examples: prefix cache,
// queue and KV cache utilization.
const llmdConfig = `apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {name: files, type: file-discovery, parameters: {path: %q}}
- {type: approx-prefix-cache-producer, parameters: {maxPrefixTokensToMatch: 131072, lruCapacityPerServer: 31250}}
- {type: prefix-cache-scorer}
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: max-score-picker}
- {type: single-profile-handler}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 3}
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: max-score-picker}
dataLayer: {discovery: {pluginRef: files}}
`

// llmd starts llm-d's EPP as the picker of all engines.
func (a *arena) llmd(b *testing.B, program string) *pool {
	list := "endpoints:\n"
	for i, e := range a.engines {
		list += fmt.Sprintf("- {name: e%d, address: %q, port: \"%d\"}\n", i, e.Host, e.Port)
	}
	dir := b.TempDir()
	endpoints, config := filepath.Join(dir, "endpoints.yaml"), filepath.Join(dir, "epp.yaml")
	for path, text := range map[string]string{endpoints: list, config: fmt.Sprintf(llmdConfig, endpoints)} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			b.Fatal(err)
		}
	}
	p := &pool{Name: "llm-d", Endpoints: a.engines, Picker: portOf(free(b))}
	p.process = start(b, "llm-d-epp", program, "--config-file="+config, "--pool-name=pool", "--pool-namespace=default", "--grpc-port="+strconv.Itoa(p.Picker), "--grpc-health-port="+strconv.Itoa(portOf(free(b))),
		"--metrics-port="+strconv.Itoa(portOf(free(b))), "--metrics-endpoint-auth=false", "--secure-serving=false", "--tracing=false", "--health-checking", "--zap-devel=false", "-v=0")
	return p
}

func (a *arena) startEnvoy(b *testing.B) {
	pools := append(slices.Clone(a.pickers), &pool{Name: "direct", Endpoints: a.engines})
	g := &gateway{Name: "gateway", Pools: pools}
	startGateways(b, pools, g)
	a.gateway = g.url()
}

// send sends a completion to a host of the gateway, and returns the time to the first byte of
// the answer.
func (a *arena) send(host, body string) (time.Duration, error) {
	r, err := http.NewRequest("POST", a.gateway+"/v1/completions", strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	r.Host = host
	r.Header.Set("Content-Type", "application/json")
	begin := time.Now()
	resp, err := clients["H1"].Do(r)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	_, err = in.Peek(1)
	took := time.Since(begin)
	if _, rest := in.WriteTo(discard{}); err == nil {
		err = rest
	}
	if err == nil && resp.StatusCode != 200 {
		err = fmt.Errorf("status %d", resp.StatusCode)
	}
	return took, err
}

// discard is io.Discard without ReadFrom.
type discard struct{}

// Write implements io.Writer.
func (discard) Write(p []byte) (int, error) { return len(p), nil }

// load sends requests by n clients and returns their times to the first byte.
func (a *arena) load(b *testing.B, host string, n int, bodies []string) (times []time.Duration) {
	b.Helper()
	var mu sync.Mutex
	var wg sync.WaitGroup
	next := make(chan string)
	var failed error
	for range n {
		wg.Go(func() {
			for body := range next {
				took, err := a.send(host, body)
				mu.Lock()
				times, failed = append(times, took), cmp.Or(failed, err)
				mu.Unlock()
			}
		})
	}
	for _, body := range bodies {
		next <- body
	}
	close(next)
	wg.Wait()
	if failed != nil {
		b.Fatal(host, failed)
	}
	slices.Sort(times)
	return times
}

// cpu returns the CPU time of the process: user and system, of all threads. Source:
// Documentation/scheduler/sched-stats.rst of Linux (the first figure of schedstat, in
// nanoseconds).
func (p *process) cpu(b *testing.B) (sum time.Duration) {
	b.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", p.cmd.Process.Pid))
	if err != nil || len(threads) == 0 {
		b.Fatal(p.name, "has no threads", err)
	}
	for _, path := range threads {
		text, err := os.ReadFile(path)
		if err != nil {
			b.Fatal(err)
		}
		first, _, _ := strings.Cut(string(text), " ")
		n, err := strconv.ParseInt(first, 10, 64)
		if err != nil {
			b.Fatal(path, err)
		}
		sum += time.Duration(n)
	}
	return sum
}

// cpuOf returns the CPU time of the picker while it serves the load, less the idle time, which is the
// CPU time of one second without load. The load begins in a picker that is busy.
func (a *arena) cpuOf(b *testing.B, p *pool, bodies []string, idle time.Duration) (busy time.Duration) {
	b.Helper()
	warm := len(bodies) / 5
	a.load(b, p.Name, 8, bodies[:warm])
	before, begin := p.process.cpu(b), time.Now()
	a.load(b, p.Name, 8, bodies[warm:])
	return p.process.cpu(b) - before - time.Duration(time.Since(begin).Seconds()*float64(idle))
}

// idleOf returns the CPU time of the picker in one second without load.
func idleOf(b *testing.B, p *pool) time.Duration {
	b.Helper()
	const rest = 2 * time.Second
	before := p.process.cpu(b)
	time.Sleep(rest)
	return (p.process.cpu(b) - before) * time.Second / rest
}

// prompts returns the bodies of n requests of a size, no two of which have a common beginning.
func prompts(n, size int) (bodies []string) {
	for range n {
		text := []byte(`{"model":"sim","max_tokens":1,"prompt":"`)
		for len(text) < size-2 {
			text = append(strconv.AppendUint(text, rand.Uint64(), 36), ' ')
		}
		bodies = append(bodies, string(text)+`"}`)
	}
	return bodies
}

// BenchmarkPickers measures the CPU time of a request in each picker behind the same Envoy, and
// the time that the picker adds to the first byte. The pickers take turns, so that a noisy
// machine slows all of them. Idle time, such as that of polls of the engines, is subtracted and
// reported by itself.
func BenchmarkPickers(b *testing.B) {
	rounds := 3
	if text := os.Getenv("ROUNDS"); text != "" {
		rounds, _ = strconv.Atoi(text) // 0 fails below
	}
	for _, engines := range []int{4, 64} {
		b.Run(fmt.Sprint(engines), func(b *testing.B) {
			a := newDuel(b, engines, 800_000/engines)
			a.startEnvoy(b)
			for _, size := range []int{2 << 10, 32 << 10, 256 << 10} {
				b.Run(fmt.Sprintf("%dKB", size>>10), func(b *testing.B) { a.compare(b, size, rounds) })
			}
		})
	}
}

// compare measures the pickers with requests of one size.
func (a *arena) compare(b *testing.B, size, rounds int) {
	n := max(200, min(2000, 40<<20/size))
	for _, p := range a.pickers {
		a.load(b, p.Name, 8, prompts(n/4, size)) // warm
	}
	cpu, idle, ttft, late := map[string][]time.Duration{}, map[string][]time.Duration{}, map[string][]time.Duration{}, map[string][]time.Duration{}
	for range rounds {
		for _, p := range a.pickers {
			rest := idleOf(b, p)
			busy := a.cpuOf(b, p, prompts(n+n/4, size), rest)
			cpu[p.Name], idle[p.Name] = append(cpu[p.Name], busy/time.Duration(n)), append(idle[p.Name], rest)
		}
		for _, host := range a.hosts() {
			times := a.load(b, host, 1, prompts(200, size))
			ttft[host] = append(ttft[host], middle(times))
			late[host] = append(late[host], times[len(times)*99/100])
		}
	}
	for _, p := range a.pickers {
		b.Logf("%2d engines, %3d KB %-8s CPU of a request %4d µs (rounds: %v), idle %.1f ms/s, first byte p50 %4d and p99 %4d µs, without picker %4d and %4d µs",
			len(a.engines), size>>10, p.Name, middle(cpu[p.Name]).Microseconds(), cpu[p.Name], float64(middle(idle[p.Name]).Microseconds())/1000,
			middle(ttft[p.Name]).Microseconds(), middle(late[p.Name]).Microseconds(), middle(ttft["direct"]).Microseconds(), middle(late["direct"]).Microseconds())
	}
}

// hosts are the names of the pickers, and of the pool without one.
func (a *arena) hosts() []string {
	list := []string{"direct"}
	for _, p := range a.pickers {
		list = append(list, p.Name)
	}
	return list
}

func middle(list []time.Duration) time.Duration {
	list = slices.Sorted(slices.Values(list))
	return list[len(list)/2]
}

// The shared-prefix load of BenchmarkHits: each engine has four prefixes' share of the groups and
// memory for twice as many.
const (
	groupsPerEngine = 4
	prefixBytes     = 8 << 10
	turns           = 8
	cacheBlocks     = 4096
)

// BenchmarkHits measures which share of the prompt tokens the engines found in their caches,
// with a load in which groups of requests share a prefix.
func BenchmarkHits(b *testing.B) {
	for _, engines := range []int{4, 64} {
		b.Run(strconv.Itoa(engines), func(b *testing.B) {
			a := newArena(b, engines, cacheBlocks)
			a.startEnvoy(b)
			for _, p := range a.pickers {
				for _, e := range a.engines {
					resp, err := http.Post("http://"+e.String()+"/reset_prefix_cache", "", nil)
					if err != nil {
						b.Fatal(err)
					}
					resp.Body.Close()
				}
				prompt, cached := a.tokens(b)
				a.load(b, p.Name, 4*engines, shared(engines*groupsPerEngine))
				promptNow, cachedNow := a.tokens(b)
				b.Logf("%2d engines, %-8s %.1f %% of %d prompt tokens were cached", engines, p.Name,
					100*float64(cachedNow-cached)/float64(promptNow-prompt), promptNow-prompt)
			}
		})
	}
}

// shared returns the bodies of a shared-prefix load in a random order that is the same in each
// run.
func shared(groups int) (bodies []string) {
	rng := rand.New(rand.NewPCG(1, 2))
	for g := range groups {
		prefix := fmt.Sprintf("group %d", g) + strings.Repeat(fmt.Sprintf(" word%d", g), prefixBytes/8)
		for turn := range turns {
			bodies = append(bodies, fmt.Sprintf(`{"model":"sim","max_tokens":4,"prompt":"%s turn %d%s"}`, prefix, turn, strings.Repeat(fmt.Sprintf(" own%d", rng.Uint32()), 40)))
		}
	}
	rng.Shuffle(len(bodies), func(i, j int) { bodies[i], bodies[j] = bodies[j], bodies[i] })
	return bodies
}

// tokens returns the prompt tokens of all engines, and those among them that were cached.
func (a *arena) tokens(b *testing.B) (prompt, cached int) {
	b.Helper()
	for _, e := range a.engines {
		_, text := get("http://" + net.JoinHostPort(e.Host, strconv.Itoa(e.Port)) + "/sim/state")
		var s struct {
			PromptTokens int `json:"prompt_tokens"`
			CachedTokens int `json:"cached_tokens"`
		}
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			b.Fatal(text, err)
		}
		prompt, cached = prompt+s.PromptTokens, cached+s.CachedTokens
	}
	return prompt, cached
}
