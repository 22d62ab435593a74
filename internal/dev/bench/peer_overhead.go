package main

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	overheadTokens  = 16 // max_tokens of a request
	overheadEngines = 4
	hotPrompts      = 64
	coldBodies      = 256
)

// overhead is the matrix of vllm-router's router_overhead harness: instant engines, unary
// requests, prompts that repeat (hot64) or that share nothing (cold).
type overhead struct {
	// Published is the summary of the harness itself, in Markdown; "" with the reason in Missing.
	Published string         `json:"published,omitempty"`
	Missing   string         `json:"missing,omitempty"`
	Cells     []overheadCell `json:"cells"`
}

// overheadCell is one cell of the matrix, measured with this program's load.
type overheadCell struct {
	Peer   string    `json:"peer"`
	Corpus string    `json:"corpus"`
	Bytes  int       `json:"bytes"`
	Conns  int       `json:"conns"`
	Result *replayed `json:"result,omitempty"`
	Failed string    `json:"failed,omitempty"`
}

// corpusPrompts returns the prompts of a corpus, NAME:BYTES.
func corpusPrompts(text string) (func(i int) []byte, error) {
	name, size, _ := strings.Cut(text, ":")
	n, err := strconv.Atoi(size)
	if err != nil || n < 32 {
		return nil, fmt.Errorf("corpus %q: no size of at least 32 bytes", text)
	}
	bodies := make([][]byte, coldBodies)
	for i := range bodies {
		bodies[i] = wordText(uint64(i), n)
	}
	marked := func(mark string, body []byte) []byte { return append([]byte(mark), body[:n-len(mark)]...) }
	switch name {
	case "hot64":
		return func(i int) []byte {
			return marked(fmt.Sprintf("[hot %02d] ", i%hotPrompts), bodies[i%hotPrompts])
		}, nil
	case "cold":
		return func(i int) []byte { return marked(fmt.Sprintf("[cold %d] ", i), bodies[i%coldBodies]) }, nil
	}
	return nil, fmt.Errorf("unknown corpus %q", name)
}

// wordText is a text of words that depends on the seed.
func wordText(seed uint64, n int) []byte {
	words := strings.Fields("router worker prefix cache token request latency budget policy stream decode prefill batch queue health retry model prompt answer memory block index")
	h := fnv.New64a()
	var text []byte
	for i := 0; len(text) < n; i++ {
		fmt.Fprint(h, seed, i)
		text = append(append(text, words[h.Sum64()%uint64(len(words))]...), ' ')
	}
	return text[:n]
}

func (s *peerSuite) overheadRun(ctx context.Context) error {
	o := &overhead{}
	if s.some && s.result.Overhead != nil {
		o.Cells = s.result.Overhead.Cells
	}
	var err error
	if o.Published, err = s.published(ctx); err != nil {
		o.Missing = err.Error()
		fmt.Fprintf(s.log, "router_overhead as published: %v\n", err)
	}
	all := s.chosen(func(p *peer) bool { return p.Name == noProxy || p.isRouter() })
	for _, p := range append([]*peer{&peers[1], &kvAware}, all...) {
		cells, err := s.overheadOf(ctx, p)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			cells = []overheadCell{{Peer: p.Name, Failed: err.Error()}}
			fmt.Fprintf(s.log, "overhead  %s: %v\n", p.Name, err)
		}
		o.Cells = slices.DeleteFunc(o.Cells, func(c overheadCell) bool { return c.Peer == p.Name })
		o.Cells = append(o.Cells, cells...)
	}
	s.result.Overhead = o
	return nil
}

func (s *peerSuite) overheadOf(ctx context.Context, p *peer) (cells []overheadCell, err error) {
	if why := s.unfit(p); why != "" {
		return nil, errors.New(why)
	}
	st, err := startStub(ctx, s.self, s.dir, s.loadCore, overheadEngines, "-no-tokens") // as the harness's engines
	if err != nil {
		return nil, err
	}
	defer st.stop()
	r := &running{peer: p, scene: st.scene(p.Work, 1)}
	r.scene.listen = st.engines[0]
	if p.start != nil {
		if r, err = s.start(ctx, p, r.scene, fmt.Sprint(s.core), s.loadCore); err != nil {
			return nil, err
		}
		defer r.stop()
	}
	for _, corpus := range []string{"hot64", "cold"} {
		for _, size := range []int{200, 2048, 16384} {
			for _, conns := range []int{1, 64} {
				cell := overheadCell{Peer: p.Name, Corpus: corpus, Bytes: size, Conns: conns}
				cell.Result, err = s.replay(ctx, st, r, "-corpus", fmt.Sprintf("%s:%d", corpus, size), "-conns", strconv.Itoa(conns), "-for", "1500ms")
				if err != nil {
					cell.Failed = err.Error()
				} else {
					fmt.Fprintf(s.log, "overhead  %-24s %-6s %6d bytes, %2d connections: mean %8.1f µs, p99 %8.1f, CPU %7.1f, %6.0f/s\n", p.Name, corpus, size, conns,
						cell.Result.Mean, cell.Result.P99, cell.Result.CPU, float64(cell.Result.Requests)/cell.Result.Seconds)
				}
				cells = append(cells, cell)
			}
		}
	}
	return cells, nil
}

// published runs the harness in a checkout of vllm-router, with the matrix as
// published and shorter cells. It returns its summary.
func (s *peerSuite) published(ctx context.Context) (string, error) {
	const test = "router_overhead_bench"
	source := os.Getenv("VLLM_ROUTER_SOURCE")
	if source == "" {
		return "", errors.New("it is a Rust test in the source of vllm-router, which neither its wheel nor its source package has: VLLM_ROUTER_SOURCE names a checkout")
	}
	if _, err := os.Stat(filepath.Join(source, "tests", test+".rs")); err != nil {
		return "", err
	}
	out, err := filepath.Abs(filepath.Join(s.dir, "router_overhead"))
	if err != nil {
		return "", err
	}
	limit, cancel := context.WithTimeout(ctx, 40*time.Minute) // with the build
	defer cancel()
	cmd := exec.CommandContext(limit, "cargo", "test", "--release", "--test", test, "--", "--ignored", "--nocapture")
	cmd.Dir = source
	cmd.Env = append(os.Environ(), "VLLM_ROUTER_BENCH_WARMUP_SECS=1", "VLLM_ROUTER_BENCH_MEASURE_SECS=3",
		fmt.Sprintf("VLLM_ROUTER_BENCH_ROUTER_CPUS=%d", s.core), "VLLM_ROUTER_BENCH_OUT_DIR="+out)
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("cargo test: %w: %s", err, text[max(0, len(text)-300):])
	}
	text, err := os.ReadFile(filepath.Join(out, "summary.md"))
	return string(text), err
}

func (p *page) overheadTable() {
	o := p.Overhead
	if o == nil {
		return
	}
	p.say("## router_overhead\n\nThe matrix of vllm-router's own harness, `router_overhead`: four engines that answer at once and give no token ids, unary requests, prompts that repeat (hot64) or share nothing (cold). Measured with the load of this page, one run of 1.5 s a cell, one process a router. CPU of a request in µs, and in brackets the added mean latency.\n")
	var rows [][]string
	base := map[string]*replayed{}
	key := func(c *overheadCell) string { return fmt.Sprint(c.Corpus, c.Bytes, c.Conns) }
	for i := range o.Cells {
		if c := &o.Cells[i]; c.Peer == noProxy && c.Result != nil {
			base[key(c)] = c.Result
		}
	}
	var names []string
	for _, c := range o.Cells {
		if c.Peer != noProxy && !slices.Contains(names, c.Peer) {
			names = append(names, c.Peer)
		}
	}
	for _, name := range names {
		for _, corpus := range []string{"hot64", "cold"} {
			row := []string{name, corpus}
			for _, conns := range []int{1, 64} {
				for _, size := range []int{200, 2048, 16384} {
					row = append(row, "–")
					for i := range o.Cells {
						c := &o.Cells[i]
						if c.Peer != name || c.Corpus != corpus || c.Bytes != size || c.Conns != conns || c.Result == nil {
							continue
						}
						text := number3(c.Result.CPU)
						if b := base[key(c)]; conns == 1 && b != nil && max(b.Others, c.Result.Others) <= disturbedTime {
							text += fmt.Sprintf(" (%s)", number3(c.Result.Mean-b.Mean))
						}
						row[len(row)-1] = text
					}
				}
			}
			rows = append(rows, row)
		}
	}
	p.table([]string{"router", "prompts", "1 connection, 200 B", "2 KB", "16 KB", "64 connections, 200 B", "2 KB", "16 KB"}, rows)
	if o.Missing != "" {
		p.say("The harness itself was not run: %s.\n", o.Missing)
		return
	}
	p.say("The harness itself, in a checkout, with cells of 3 s:\n\n%s", strings.ReplaceAll(o.Published, "\n#", "\n###"))
}
