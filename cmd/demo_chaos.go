package cmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/internal/loadgen"
	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/journal"
)

const (
	// chaosEvery is the time between two kills. A kill waits until all engines are ready.
	chaosEvery = 3 * time.Second
	// chaosDown is the time from a kill to the restart.
	chaosDown = time.Second
	// chaosSilence is how long a stream may have no event while an engine decodes it; less than chaosDown.
	chaosSilence = 500 * time.Millisecond
	// chaosPinned is how long the clean-up of the last requests may take.
	chaosPinned = 5 * time.Second
)

// configureChaos changes the configuration of the proxy for demo --chaos. Each kill breaks enough
// streams to open the circuit of the engine, which is to be used again soon. A stream may see many kills:
// its repeats are more than the default budget of retries allows.
func configureChaos(cfg *config.Config) {
	cfg.Retry.Budget = 1
	cfg.Circuit.OpenFor = config.Duration(chaosDown)
}

// chaos kills decode engines again and again, while users read long streams.
type chaos struct {
	app               *app
	url, admin, alone string // of the proxy, its admin address, and the engine to compare with
	engines           []*demoEngine
	chats             bool // the engines continue chats; otherwise all requests are completions

	mu   sync.Mutex
	open map[string]*chaosStream // by request id; guarded by mu
	sum  chaosSum                // guarded by mu
	gaps []float64               // of all continued streams, in ms; guarded by mu
}

// chaosStream is the stream of a user. The mutex of chaos guards it.
type chaosStream struct {
	last   time.Time     // of the last event; zero: none has come
	gap    time.Duration // the longest wait for an event since the last kill
	ended  bool
	failed string // why it has ended too early; "": it has not
}

// chaosKill is the report of one kill.
type chaosKill struct {
	Killed    string         `json:"killed"`
	Streams   int            `json:"streams"` // open on the engine
	Continued int            `json:"continued"`
	Ended     map[string]int `json:"ended"`  // with an error, by reason
	Gap       loadgen.Spread `json:"gap_ms"` // between two events of a continued stream, at the client
}

// chaosSum is the result of the demo.
type chaosSum struct {
	Kills     int            `json:"kills"`
	Streams   int            `json:"streams"`   // that have ended
	Continued int            `json:"continued"` // a stream counts once for each kill
	Ended     map[string]int `json:"ended"`     // with an error, by reason
	Gap       loadgen.Spread `json:"gap_ms"`
	Wrong     int            `json:"wrong"`         // complete answers that differ from that of one engine alone
	Pinned    int            `json:"pinned_blocks"` // after all requests have ended
}

// newChaos returns the chaos of running engines.
func newChaos(a *app, connector string, engines []*demoEngine, url, admin, alone string) *chaos {
	return &chaos{
		app: a, url: url, admin: admin, alone: alone, engines: engines, chats: strings.HasPrefix(connector, "vllm-"),
		open: make(map[string]*chaosStream), sum: chaosSum{Ended: make(map[string]int)},
	}
}

// printChaos prints what the demo does.
func (a *app) printChaos(n *node.Node, d demoFlags) {
	fmt.Fprintf(a.out, `pdproxy serves %s with %d prefill and %d decode engines (%s, simulated).

What happens, as a page for the browser:
  %s/

%d users read long streams. Every %.0f s a decode engine is killed; it restarts after %.0f s.
Press Ctrl-C to stop the demo and to see whether every text was right.

`, n.URL(), d.prefill, d.decode, d.connector, n.AdminURL(), chaosUsers, chaosEvery.Seconds(), chaosDown.Seconds())
}

// run kills engines and sends streams while serve runs, until a signal. The open streams end before
// run reports.
func (c *chaos) run(serve func() error) error {
	until, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	requests, cancel := context.WithCancel(context.Background())
	defer cancel()
	var all sync.WaitGroup
	all.Go(func() {
		if !c.awaitReady(until) {
			return
		}
		for user := range chaosUsers {
			all.Go(func() { c.user(until, requests, user) })
		}
		c.kill(until)
	})
	err := serve()
	stop()
	if err != nil {
		cancel()
	}
	all.Wait()
	if err != nil {
		return err
	}
	return c.conclude()
}

// kill kills the decode engines in turn until ctx ends.
func (c *chaos) kill(ctx context.Context) {
	decode := slices.DeleteFunc(slices.Clone(c.engines), func(e *demoEngine) bool { return e.Cfg.Role != enginesim.RoleDecode })
	for n := 0; wait(ctx, chaosEvery-chaosDown) && c.awaitReady(ctx); n++ {
		e := decode[n%len(decode)]
		streams := c.streamsOn(e.name)
		e.Kill()
		time.Sleep(chaosDown)    // after a signal too: report takes a stream that is silent for less as one that has gone on
		for e.restart() != nil { // another process has taken its port
			if !wait(ctx, chaosDown) {
				return
			}
		}
		if err := c.report(e.name, streams); err != nil {
			return // nobody reads the output
		}
	}
}

// restart replaces a killed engine by a new one at the same addresses.
func (e *demoEngine) restart() error {
	e.Close()
	next := e.Cfg
	next.Listen, next.BootstrapPort = e.Addr(), e.BootstrapPort()
	_, port, _ := net.SplitHostPort(e.SideAddress())
	next.SideChannelPort, _ = strconv.Atoi(port) // the text of a listener's address
	if at, err := config.ParseKVAddress(e.KVAddress()); err == nil {
		next.MoRIIO.HandshakePort, next.MoRIIO.NotifyPort = at.Handshake, at.Notify
	}
	next.KVEvents.Endpoint, next.KVEvents.Replay = e.KVEventsEndpoint(), e.KVEventsReplay()
	fresh, err := enginesim.New(next)
	if err != nil {
		return err
	}
	if err := fresh.Start(); err != nil {
		return err
	}
	e.Engine = fresh
	return nil
}

// awaitReady waits until the proxy uses all engines. It returns false if ctx ends before.
func (c *chaos) awaitReady(ctx context.Context) bool {
	for wait(ctx, 100*time.Millisecond) {
		var rows []admin.EngineRow
		if c.get("/v1/engines", &rows) == nil && !slices.ContainsFunc(rows, func(r admin.EngineRow) bool { return r.State != "ready" }) {
			return true
		}
	}
	return false
}

// get asks the admin address.
func (c *chaos) get(path string, v any) error {
	resp, err := http.Get(c.admin + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(v)
}

// streamsOn returns the open streams whose decode engine has that name, and begins to measure the
// gaps of all streams anew.
func (c *chaos) streamsOn(name string) (list []*chaosStream) {
	var rows []journal.RunningRow
	if c.get("/v1/exchanges", &rows) != nil {
		return nil // a draining proxy
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.open {
		s.gap = 0
	}
	for _, r := range rows {
		if s := c.open[r.RequestID]; s != nil && r.Decode == name && !s.last.IsZero() {
			list = append(list, s)
		}
	}
	return list
}

// report prints what has become of the streams of a killed engine. It waits until each of them has
// gone on or has ended.
func (c *chaos) report(engine string, streams []*chaosStream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for slices.ContainsFunc(streams, func(s *chaosStream) bool { return !s.ended && time.Since(s.last) > chaosSilence }) {
		c.mu.Unlock()
		time.Sleep(chaosSilence / 5)
		c.mu.Lock()
	}
	k := chaosKill{Killed: engine, Streams: len(streams), Ended: make(map[string]int)}
	var gaps []float64
	for _, s := range streams {
		if s.failed != "" {
			k.Ended[s.failed]++
			continue
		}
		k.Continued++
		gaps = append(gaps, float64(s.gap.Microseconds())/1e3)
	}
	c.sum.Kills++
	c.sum.Continued += k.Continued
	c.gaps = append(c.gaps, gaps...)
	k.Gap = loadgen.NewSpread(gaps)
	if c.app.json {
		return c.app.printJSON(k)
	}
	_, err := fmt.Fprintf(c.app.out, "%s  killed %s under %d streams: %s\n", time.Now().Format(time.TimeOnly), engine, k.Streams, fates(fmt.Sprint(k.Continued, " continued"), k.Ended, k.Gap))
	return err
}

// fates describes what has become of streams, beginning with the continued ones.
func fates(text string, ended map[string]int, gap loadgen.Spread) string {
	if gap != (loadgen.Spread{}) {
		text += fmt.Sprintf(", gap p50 %.0f ms, p99 %.0f ms", gap.P50, gap.P99)
	}
	for _, reason := range slices.Sorted(maps.Keys(ended)) {
		text += fmt.Sprintf(", %d ended (%s)", ended[reason], reason)
	}
	return text
}

// conclude prints the result, after all requests have ended. A wrong text or a pinned block is an
// error.
func (c *chaos) conclude() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for end := time.Now().Add(chaosPinned); ; time.Sleep(50 * time.Millisecond) {
		c.sum.Pinned = 0
		for _, e := range c.engines {
			c.sum.Pinned += e.State().BlocksPinned
		}
		if c.sum.Pinned == 0 || time.Now().After(end) {
			break
		}
	}
	c.sum.Gap = loadgen.NewSpread(c.gaps)
	if c.app.json {
		if err := c.app.printJSON(c.sum); err != nil {
			return exit.Failed(err)
		}
	} else {
		fmt.Fprintf(c.app.out, "\n%d kills, %d streams: %s\n", c.sum.Kills, c.sum.Streams, fates(fmt.Sprint(c.sum.Continued, " continuations"), c.sum.Ended, c.sum.Gap))
	}
	var problems []error
	if c.sum.Wrong > 0 {
		problems = append(problems, fmt.Errorf("%d answers differ from that of one engine alone", c.sum.Wrong))
	}
	if c.sum.Pinned > 0 {
		problems = append(problems, fmt.Errorf("%d KV blocks are still pinned", c.sum.Pinned))
	}
	if len(problems) == 0 && !c.app.json {
		fmt.Fprintln(c.app.out, "Every complete text equals that of one engine alone. No KV block is pinned.")
	}
	return exit.Failed(errors.Join(problems...))
}
