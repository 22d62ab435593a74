package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// faultPatience is how long a client waits. A request that is not over then hangs.
	faultPatience = 10 * time.Second
	// settleLimit is the time after which blocks that are still pinned count as left.
	settleLimit = 3 * time.Second
	faultTokens = 60 // of an answer
	tokenMicros = 20_000
	// faultParallel peers are tried at the same time: nothing is timed.
	faultParallel = 3
)

// outcome is the effect of one fault on one peer.
type outcome struct {
	Peer    string         `json:"peer"`
	Case    string         `json:"case"`
	Clients map[string]int `json:"clients,omitempty"` // number of clients by what they saw
	Later   map[string]int `json:"later,omitempty"`   // requests after the fault
	Slowest float64        `json:"slowest_s,omitempty"`
	Pinned  int            `json:"pinned"`            // KV blocks of the living engines that wait for a transfer
	Busy    int            `json:"busy"`              // requests that the living engines still compute or keep waiting
	Aborted int            `json:"aborted,omitempty"` // requests that engines stopped, because the proxy left
	Failed  string         `json:"failed,omitempty"`
}

// trial is one fault case of one peer.
type trial struct {
	outcome
	suite           *peerSuite
	work            string
	slow            bool
	peer            *running
	dir             string
	prefill, decode []*sim
	boot            []int
	prompts         int // so far
}

// sim is one simulated engine: a process of its own, so that it can be killed.
type sim struct {
	*process
	argv []string
	dead bool
}

func (e *sim) kill() {
	e.dead = true
	e.cmd.Process.Kill()
	<-e.done
}

func (s *peerSuite) faultAll(ctx context.Context) error {
	slots := make(chan struct{}, faultParallel)
	var wg sync.WaitGroup
	var mu sync.Mutex
	for i := range faultCases {
		c := &faultCases[i]
		if !s.cases.MatchString(c.name) {
			continue
		}
		for _, p := range s.chosen(func(p *peer) bool { return p.Work == workVLLM || p.Work == workSGLang }) {
			wg.Go(func() {
				slots <- struct{}{}
				o := s.faultPeer(ctx, c, p)
				<-slots
				mu.Lock()
				defer mu.Unlock()
				fmt.Fprintf(s.log, "fault  %-28s %-36s %v later %v slowest %.1f s, pinned %d busy %d aborted %d %s\n",
					o.Peer, o.Case, o.Clients, o.Later, o.Slowest, o.Pinned, o.Busy, o.Aborted, o.Failed)
				s.result.Faults = replace(s.result.Faults, o, func(other outcome) bool { return other.Peer == o.Peer && other.Case == o.Case })
			})
		}
	}
	wg.Wait()
	return ctx.Err()
}

func (s *peerSuite) faultPeer(ctx context.Context, c *faultCase, p *peer) outcome {
	t := &trial{outcome: outcome{Peer: p.Name, Case: c.name}, suite: s, work: p.Work, slow: c.slow}
	if why := s.unfit(p); why != "" {
		t.Failed = why
		return t.outcome
	}
	if err := t.run(ctx, c, p); err != nil {
		t.Failed = err.Error()
	}
	return t.outcome
}

func (t *trial) run(ctx context.Context, c *faultCase, p *peer) (err error) {
	if t.dir, err = os.MkdirTemp(t.suite.dir, "fault"); err != nil {
		return err
	}
	defer func() {
		for _, e := range slices.Concat(t.prefill, t.decode) {
			e.stop()
		}
	}()
	s := &scene{model: benchModel, cores: 2}
	for range c.pairs {
		for role, list := range map[string]*[]*sim{"prefill": &t.prefill, "decode": &t.decode} {
			e, err := t.engine(ctx, role)
			if err != nil {
				return err
			}
			*list = append(*list, e)
		}
	}
	for i := range c.pairs {
		s.prefill, s.engines = append(s.prefill, t.prefill[i].addr), append(s.engines, t.decode[i].addr)
	}
	if t.work == workSGLang {
		s.boot = t.boot
	}
	cores := fmt.Sprintf("%d,%d", t.suite.core, t.suite.loadCore)
	if t.peer, err = t.suite.start(ctx, p, s, cores, t.suite.loadCore); err != nil {
		return err
	}
	defer t.peer.stop()
	aborted, _, _ := t.left(ctx)
	if err := c.run(ctx, t); err != nil {
		return err
	}
	for limit := time.Now().Add(settleLimit); time.Now().Before(limit); pause(ctx, 100*time.Millisecond) {
		if t.Aborted, t.Pinned, t.Busy = t.left(ctx); t.Pinned+t.Busy == 0 {
			break
		}
	}
	t.Aborted = max(0, t.Aborted-aborted)
	return ctx.Err()
}

// engine starts a simulated engine.
func (t *trial) engine(ctx context.Context, role string) (*sim, error) {
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	connector, prefill := "vllm-nixl", 100
	if t.slow { // the probe of 5 bytes is a prompt too
		prefill = 2_000_000 / promptTokens
	}
	if t.work == workSGLang {
		connector = "sglang"
	}
	argv := []string{t.suite.pdproxy, "sim", "--connector", connector, "--role", role, "--model", benchModel, "--listen", addr, "--log-level", "warn",
		"--kv-blocks", "65536", "--prefill-us-per-token", strconv.Itoa(prefill), "--decode-us-per-token", strconv.Itoa(tokenMicros)}
	if role == "prefill" && t.work == workSGLang {
		boot, err := freePort()
		if err != nil {
			return nil, err
		}
		n, _ := strconv.Atoi(boot)
		t.boot = append(t.boot, n)
		argv = append(argv, "--bootstrap-port", boot)
	}
	e := &sim{argv: argv}
	return e, e.launch(ctx, t, addr)
}

func (e *sim) launch(ctx context.Context, t *trial, addr string) (err error) {
	if e.process, err = launch(ctx, t.dir, "sim-"+port(addr), t.suite.loadCore, e.argv...); err != nil {
		return err
	}
	e.addr, e.dead = addr, false
	return e.await(func() error { return accepts(addr) })
}

// left adds up what the living engines hold.
func (t *trial) left(ctx context.Context) (aborted, pinned, busy int) {
	for _, e := range slices.Concat(t.prefill, t.decode) {
		if e.dead {
			continue
		}
		var state struct {
			Pinned  int `json:"blocks_pinned"`
			Running int `json:"requests_running"`
			Waiting int `json:"requests_waiting"`
			Aborted int `json:"aborted"`
		}
		if getJSON(ctx, "http://"+e.addr+"/sim/state", &state) == nil {
			aborted, pinned, busy = aborted+state.Aborted, pinned+state.Pinned, busy+state.Running+state.Waiting
		}
	}
	return aborted, pinned, busy
}

// promptTokens is about the number of tokens of a client's prompt in the
// simulated engines.
const promptTokens = 200

// begin starts n requests, gap apart. The returned function waits for them. It
// returns how many clients saw each end.
func (t *trial) begin(ctx context.Context, n int, stream bool, gap time.Duration) func() map[string]int {
	saw := make(chan string, n)
	first := t.prompts // no two clients of a trial have the same prompt
	t.prompts += n
	var wg sync.WaitGroup
	var mu sync.Mutex
	wg.Go(func() {
		for i := range n {
			wg.Go(func() {
				from := time.Now()
				saw <- t.client(ctx, first+i, stream)
				mu.Lock()
				t.Slowest = max(t.Slowest, rounded(time.Since(from).Seconds()))
				mu.Unlock()
			})
			pause(context.WithoutCancel(ctx), gap)
		}
	})
	return func() map[string]int {
		wg.Wait()
		close(saw)
		counts := map[string]int{}
		for what := range saw {
			counts[what]++
		}
		return counts
	}
}

// client sends one request and returns what its client saw.
func (t *trial) client(ctx context.Context, i int, stream bool) string {
	tokens := 4
	if stream {
		tokens = faultTokens
	}
	words := strings.Repeat(fmt.Sprintf("word%d ", i), promptTokens/2)
	body := fmt.Sprintf(`{"model":%q,"prompt":"%s","max_tokens":%d,"ignore_eos":true,"stream":%t}`, benchModel, words, tokens, stream)
	patient, cancel := context.WithTimeout(ctx, faultPatience)
	defer cancel()
	a, err := t.peer.post(patient, requestPath, []byte(body))
	switch {
	case ctx.Err() != nil:
		return "left"
	case patient.Err() != nil:
		return fmt.Sprintf("hangs (over %d s)", int(faultPatience.Seconds()))
	case err != nil && a == nil:
		var op *net.OpError
		if errors.As(err, &op) && op.Op == "dial" {
			return "connection refused"
		}
		return "connection closed without an answer"
	case a.status != 200:
		return "HTTP " + strconv.Itoa(a.status)
	case err != nil:
		return "cut off"
	case !stream:
		return whole(a.body)
	}
	return streamed(a.body)
}

func whole(body []byte) string {
	var v struct {
		Choices []json.RawMessage `json:"choices"`
	}
	if json.Unmarshal(body, &v) != nil || len(v.Choices) == 0 {
		return "200 without an answer"
	}
	return "ok"
}

// streamed classifies a stream that ended cleanly.
func streamed(body []byte) string {
	events, failed, done := 0, false, false
	for line := range strings.Lines(string(body)) {
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data:")
		if !ok {
			continue
		}
		switch data = strings.TrimSpace(data); {
		case data == "[DONE]":
			done = true
		case strings.Contains(data, `"error"`) && !strings.Contains(data, `"choices"`):
			failed = true
		default:
			events++
		}
	}
	switch {
	case failed && done:
		return "error event, then [DONE]"
	case failed:
		return "error event"
	case done && events >= faultTokens:
		return "ok"
	case done:
		return "short, with [DONE]"
	}
	return "short, without [DONE]"
}

// sawText lists what clients saw, the most frequent first.
func sawText(counts map[string]int) string {
	keys := slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		if d := counts[b] - counts[a]; d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	var all []string
	for _, k := range keys {
		all = append(all, fmt.Sprintf("%d %s", counts[k], k))
	}
	return strings.Join(all, ", ")
}
