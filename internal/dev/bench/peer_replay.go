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
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/internal/loadgen"
)

// replayCommand sends prompts of a trace, each once, or of a corpus, for some
// time. A request starts as soon as a connection is free.
func replayCommand(args []string) error {
	fs := flag.NewFlagSet("replay", flag.ContinueOnError)
	variant := fs.String("variant", heldOut[0], "`KIND:SEED` of the trace of the part hits")
	corpus := fs.String("corpus", "", "`NAME:BYTES` of a corpus; empty: the trace")
	conns := fs.Int("conns", hitConns, "connections")
	limit := fs.Duration("for", 2*time.Second, "how long, with a corpus")
	addr := fs.String("addr", "127.0.0.1:9000", "`address` of the router")
	var pids pidList
	fs.Var(&pids, "pids", "processes of the router, comma separated; none: no CPU figure")
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
		prompts, err = tracePrompts(heldOutOf, *variant, hitRequests)
		r.prompt, r.most = func(i int) []byte { return prompts[i] }, len(prompts)
	}
	if err != nil {
		return err
	}
	return r.run(*conns, pids)
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
	all := slices.Concat(took...)
	if len(all) == 0 {
		return errors.New("no request was made")
	}
	times, used := loadgen.NewSpread(all), after.minus(before)
	return json.NewEncoder(os.Stdout).Encode(replayed{Requests: len(all), Seconds: seconds, CPU: per(used.CPU.Seconds()*1e6, len(all)),
		Mean: times.Mean * 1000, P50: times.P50 * 1000, P99: times.P99 * 1000})
}

// on sends requests on one connection. It returns their times in ms.
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
		took = append(took, millis(time.Since(from)))
	}
	return took, nil
}

// replay runs replayCommand in a process of its own on the engines' core.
func (s *peerSuite) replay(ctx context.Context, st *stub, r *running, args ...string) (*replayed, error) {
	limit, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	pids := pidList(r.pids)
	var stderr strings.Builder
	cmd := pinned(limit, s.loadCore, append([]string{s.self, "replay", "-addr", r.scene.listen, "-pids", pids.String()}, args...)...)
	cmd.Stderr = &stderr
	watch, err := s.suite(st).watch(append(r.engines(), r.pids...))
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
