package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// replayCommand sends prompts of a trace, each once, or of a corpus, for some
// time. A request starts as soon as a connection is free.
func replayCommand(args []string) error {
	fs := flag.NewFlagSet("replay", flag.ContinueOnError)
	trace := fs.String("trace", "internal/replay/testdata/mooncake.gz", "`file`")
	variant := fs.String("variant", heldOut[0], "`KIND:SEED`")
	n := fs.Int("requests", hitRequests, "at most, of a trace")
	corpus := fs.String("corpus", "", "`NAME:BYTES` of a corpus; empty: the trace")
	conns := fs.Int("conns", hitConns, "connections")
	limit := fs.Duration("for", 2*time.Second, "how long, with a corpus")
	addr := fs.String("addr", "127.0.0.1:9000", "`address` of the router")
	pids := fs.String("pids", "", "processes of the router, comma separated")
	if err := fs.Parse(args); err != nil {
		return err
	}
	r := &replaying{addr: *addr, tokens: 1}
	var err error
	if *corpus != "" {
		r.prompt, err = corpusPrompts(*corpus)
		r.tokens, r.end = overheadTokens, time.Now().Add(*limit)
	} else {
		var prompts [][]byte
		prompts, err = tracePrompts(*trace, *variant, *n)
		r.prompt, r.most = func(i int) []byte { return prompts[i] }, len(prompts)
	}
	if err != nil {
		return err
	}
	var of []int
	for text := range strings.FieldsFuncSeq(*pids, func(c rune) bool { return c == ',' }) {
		pid, err := strconv.Atoi(text)
		if err != nil {
			return fmt.Errorf("-pids: %w", err)
		}
		of = append(of, pid)
	}
	return r.run(*conns, of)
}

// replaying is a load of different prompts.
type replaying struct {
	addr   string
	prompt func(i int) []byte
	tokens int
	most   int       // requests, 0: no limit
	end    time.Time // zero: no limit
	next   atomic.Int64
}

// replayed is its result.
type replayed struct {
	Requests int     `json:"requests"`
	Seconds  float64 `json:"seconds"`
	CPU      float64 `json:"cpu_us"` // of a request
	Mean     float64 `json:"mean_us"`
	P50      float64 `json:"p50_us"`
	P99      float64 `json:"p99_us"`
	Others   float64 `json:"others"` // share of the two cores that other programs used
}

func (r *replaying) run(conns int, pids []int) error {
	before, err := usageOf(pids)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	took := make([][]float64, conns)
	failed := make(chan error, conns)
	begin := time.Now()
	for i := range conns {
		wg.Go(func() {
			var err error
			took[i], err = r.on()
			failed <- err
		})
	}
	wg.Wait()
	close(failed)
	for err := range failed {
		if err != nil {
			return err
		}
	}
	seconds := time.Since(begin).Seconds()
	after, err := usageOf(pids)
	if err != nil {
		return err
	}
	all := slices.Sorted(slices.Values(slices.Concat(took...)))
	used, sum := after.minus(before), 0.0
	for _, t := range all {
		sum += t
	}
	n := len(all)
	at := func(q float64) float64 { return all[min(n-1, int(q*float64(n)))] }
	if n == 0 {
		return errors.New("no request was made")
	}
	return json.NewEncoder(os.Stdout).Encode(replayed{Requests: n, Seconds: seconds, CPU: used.CPU.Seconds() * 1e6 / float64(n), Mean: sum / float64(n), P50: at(0.5), P99: at(0.99)})
}

// on sends requests on one connection. It returns their times in µs.
func (r *replaying) on() (took []float64, err error) {
	c, err := dialRaw(r.addr, "", nil, 8<<10)
	if err != nil {
		return nil, err
	}
	defer c.close()
	for r.end.IsZero() || time.Now().Before(r.end) {
		i := int(r.next.Add(1)) - 1
		if r.most > 0 && i >= r.most {
			break
		}
		c.request = rawRequest(r.addr, "", fmt.Appendf(nil, `{"model":%q,"max_tokens":%d,"stream":false,"prompt":"%s"}`, benchModel, r.tokens, r.prompt(i)))
		from := time.Now()
		body, err := c.call()
		if err == nil {
			_, err = io.Copy(io.Discard, body)
		}
		if err != nil {
			return nil, err
		}
		took = append(took, float64(time.Since(from))/float64(time.Microsecond))
	}
	return took, nil
}

// replay runs replayCommand in a process of its own on the engines' core.
func (s *peerSuite) replay(ctx context.Context, st *stub, r *running, args ...string) (*replayed, error) {
	limit, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	pids := make([]string, len(r.pids))
	for i, pid := range r.pids {
		pids[i] = strconv.Itoa(pid)
	}
	var stderr strings.Builder
	cmd := pinned(limit, s.loadCore, append([]string{s.self, "replay", "-addr", r.scene.listen, "-pids", strings.Join(pids, ",")}, args...)...)
	cmd.Stderr = &stderr
	watch, err := s.watch(st, r)
	if err != nil {
		return nil, err
	}
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("replay: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	res := &replayed{}
	if err := json.Unmarshal(out, res); err != nil {
		return nil, err
	}
	res.Others, err = watch(cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime())
	return res, err
}
