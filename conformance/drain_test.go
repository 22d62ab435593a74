package conformance

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// reading is a stream that a client reads.
type reading struct {
	body   string
	events atomic.Int32 // that have come
	ended  chan struct{}
	answer answer // after ended
}

// read opens a stream and reads it.
func (f *fleet) read(ctx context.Context, body string, header ...string) *reading {
	f.t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+completionPath, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	r := &reading{body: body, ended: make(chan struct{})}
	go func() {
		defer close(r.ended)
		resp, err := f.client.Do(req)
		if err != nil {
			r.answer.err = err
			return
		}
		defer resp.Body.Close()
		var all []byte
		piece := make([]byte, 16<<10)
		for err == nil {
			var n int
			n, err = resp.Body.Read(piece)
			all = append(all, piece[:n]...)
			r.events.Add(int32(bytes.Count(piece[:n], []byte("\n\n"))))
		}
		if err == io.EOF {
			err = nil
		}
		r.answer = readAnswer(resp, all, err)
	}()
	return r
}

// longStream is a request whose answer has 1,000 tokens.
func longStream(n int) string {
	return fmt.Sprintf(`{"model":"sim","prompt":"tell %d of them","max_tokens":1000,"ignore_eos":true,"temperature":%d,"stream":true}`, n%9, n%2)
}

// readMany opens streams, and waits until a seam can be found in each.
func (f *fleet) readMany(n int) (list []*reading) {
	f.t.Helper()
	for i := range n {
		list = append(list, f.read(context.Background(), longStream(i)))
	}
	f.underWay(list)
	return list
}

// underWay waits until a seam can be found in each stream.
func (f *fleet) underWay(list []*reading) {
	f.t.Helper()
	f.eventually("all streams are under way", func() bool {
		all := true
		for _, r := range list {
			select {
			case <-r.ended:
				f.t.Fatalf("a stream has ended: %+v", r.answer)
			default:
				all = all && r.events.Load() >= 30
			}
		}
		return all
	})
}

// allRight lets the engines run fast, and asserts that each text is that of one engine alone.
func (f *fleet) allRight(list []*reading) {
	f.t.Helper()
	f.decodeEvery(500)
	for _, r := range list {
		select {
		case <-r.ended:
			f.right(r.answer, completionPath, r.body)
		case <-time.After(time.Minute):
			f.t.Fatal("a stream does not end")
		}
	}
}

// decodeEvery sets the time that the decode engines need for a token, in microseconds.
func (f *fleet) decodeEvery(us int) {
	for _, d := range f.decode {
		d.SetDecodeUsPerToken(us)
	}
}

// drainEngine calls POST or DELETE /v1/engines/NAME/drain.
func (f *fleet) drainEngine(method, rest string) {
	f.t.Helper()
	req, err := http.NewRequest(method, f.front.AdminURL()+"/v1/engines/"+rest, nil)
	if err != nil {
		f.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+f.front.AdminToken())
	resp, err := f.client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		f.t.Fatalf("%s %s: %s: %s", method, rest, resp.Status, text)
	}
	f.awaitWorkers()
}

// requestsOf returns the requests that the proxy has at an engine.
func (f *fleet) requestsOf(name string) (n int) {
	f.t.Helper()
	var rows []struct {
		Name  string
		Ranks []struct{ Requests int }
	}
	f.admin("/v1/engines", &rows)
	for _, r := range rows {
		for _, rank := range r.Ranks {
			if r.Name == name {
				n += rank.Requests
			}
		}
	}
	return n
}

// continued returns how many streams other engines have continued.
func (f *fleet) continued() int {
	return int(f.metric("pdproxy_continuations_total", `result="continued"`))
}

// moving is a configuration in which streams may move, and nothing else is retried.
func moving(c *config.Config) {
	c.Retry.Continue, c.Retry.MoveAfter = config.ContinueDrain, config.Duration(100*time.Millisecond)
	c.Retry.Budget, c.Retry.MinBudget = 0, 0
	c.Circuit.Failures = 1
	c.Server.DrainTimeout = config.Duration(time.Minute)
	c.Health.LoadInterval = config.Duration(100 * time.Millisecond)
}

// noFault asserts that streams have moved, that no other stream has broken off, and that nobody was
// at fault.
func (f *fleet) noFault() {
	f.t.Helper()
	if all := int(f.metric("pdproxy_continuations_total")); all == 0 || all != f.continued() {
		f.t.Errorf("%d of %d streams were continued", f.continued(), all)
	}
	for _, name := range []string{"pdproxy_leg_errors_total", "pdproxy_broken_streams_total"} {
		if n := f.metric(name); n != 0 {
			f.t.Errorf("%s is %v", name, n)
		}
	}
}

// slowDecode are decode engines that need a minute for the answer to a longStream.
func slowDecode(role string, _ int, c *enginesim.Config) {
	c.KVBlocks = 20_000
	if role == enginesim.RoleDecode {
		c.DecodeUsPerToken = 60_000
	}
}

// TestRollingUpdate replaces three decode engines, one after the other, under 50 streams: each is
// drained, killed when it has no stream, and started again. The update does not wait for the end of a
// stream, and each text is that of one engine alone.
func TestRollingUpdate(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		if kindOf(connector) == enginesim.ConnectorTRTLLM {
			return // its events have no token ids
		}
		f := startFleet(t, connector, fleetOptions{prefill: 2, decode: 3, engine: slowDecode, config: moving})
		streams := f.readMany(50)
		const us = 200_000 // an answer takes more than three minutes, so that none ends before the update
		f.decodeEvery(us)
		moves := 0
		for n, d := range f.decode {
			name := fmt.Sprint("d", n)
			f.eventually("each stream is at an engine", func() bool {
				return f.requestsOf("d0")+f.requestsOf("d1")+f.requestsOf("d2") == len(streams)
			})
			moves += f.requestsOf(name)
			f.drainEngine(http.MethodPost, name+"/drain?move=true")
			f.eventually("engine "+name+" has no stream", func() bool { return f.requestsOf(name) == 0 && d.State().RequestsRunning == 0 })
			addr := d.Addr()
			d.Kill()
			d.Close()
			c := enginesim.Config{Connector: f.connector, Role: enginesim.RoleDecode, Listen: addr}
			c.SGLang.HeaderOverrides = connector == sglangHeaders
			slowDecode(c.Role, n, &c)
			c.DecodeUsPerToken = us
			keepKVPorts(&c, d)
			f.decode[n] = startEngine(t, c)
			f.drainEngine(http.MethodDelete, name+"/drain")
			f.eventually("the new engine is ready", func() bool { return f.engineState(name) == "ready" })
			f.awaitWorkers()
		}
		for _, r := range streams {
			select {
			case <-r.ended:
				t.Fatal("the update has waited for the end of a stream")
			default:
			}
		}
		f.allRight(streams)
		if n := f.continued(); n != moves {
			t.Errorf("the engines had %d streams, %d were continued", moves, n)
		}
		f.noFault()
		f.settled()
	})
}

// TestDrainedStreams are the failures while the streams of an engine move.
func TestDrainedStreams(t *testing.T) {
	// start opens streams at d0. d1 then takes requests too.
	start := func(t *testing.T, n int, o fleetOptions) (*fleet, []*reading) {
		if o.engine == nil {
			o.engine = slowDecode
		}
		change := o.config
		o.config = func(c *config.Config) {
			if moving(c); change != nil {
				change(c)
			}
		}
		f := startFleet(t, enginesim.ConnectorVLLMNixl, o)
		f.drainEngine(http.MethodPost, "d1/drain")
		streams := f.readMany(n)
		f.drainEngine(http.MethodDelete, "d1/drain")
		if got := f.requestsOf("d0"); got != n {
			t.Fatalf("%d of %d streams are at d0", got, n)
		}
		return f, streams
	}
	away := func(f *fleet, name string) {
		f.eventually("engine "+name+" has no stream", func() bool { return f.requestsOf(name) == 0 })
	}

	t.Run("it leaves the configuration", func(t *testing.T) {
		f, streams := start(t, 8, fleetOptions{})
		next := f.cfg
		next.Engines = nil
		for _, e := range f.cfg.Engines {
			if e.Name != "d0" {
				next.Engines = append(next.Engines, e)
			}
		}
		if err := f.reload(&next); err != nil {
			t.Fatal(err)
		}
		f.eventually("the engine has left", func() bool { return f.engineState("d0") == "" })
		f.allRight(streams)
		f.noFault()
	})

	t.Run("its configuration changes", func(t *testing.T) {
		f, streams := start(t, 4, fleetOptions{})
		next := f.cfg
		next.Engines = append([]config.Engine(nil), f.cfg.Engines...)
		for i := range next.Engines {
			next.Engines[i].Weight = 2
		}
		if err := f.reload(&next); err != nil {
			t.Fatal(err)
		}
		f.waitMoves()
		f.allRight(streams)
		if n := f.continued(); n != 0 {
			t.Errorf("%d streams moved", n)
		}
	})

	t.Run("the drain is cancelled", func(t *testing.T) {
		f, streams := start(t, 4, fleetOptions{config: func(c *config.Config) { c.Retry.MoveAfter = config.Duration(2 * time.Second) }})
		f.drainEngine(http.MethodPost, "d0/drain?move=true")
		f.drainEngine(http.MethodDelete, "d0/drain")
		time.Sleep(time.Duration(f.cfg.Retry.MoveAfter)) // the streams would move then
		f.waitMoves()
		if n := f.continued(); n != 0 || f.requestsOf("d0") != 4 || f.engineState("d0") != "ready" {
			t.Errorf("%d streams moved, %d are there, d0 is %s", n, f.requestsOf("d0"), f.engineState("d0"))
		}
		f.allRight(streams)
	})

	t.Run("a second drain", func(t *testing.T) {
		f, streams := start(t, 8, fleetOptions{})
		for _, name := range []string{"d0", "d1", "d0", "d1"} {
			f.drainEngine(http.MethodPost, name+"/drain?move=true")
			away(f, name)
			f.drainEngine(http.MethodDelete, name+"/drain")
		}
		if n := f.continued(); n < 24 {
			t.Errorf("%d streams moved", n)
		}
		f.allRight(streams)
		f.noFault()
	})

	t.Run("no other engine has room", func(t *testing.T) {
		f, streams := start(t, 3, fleetOptions{engine: func(role string, n int, c *enginesim.Config) {
			slowDecode(role, n, c)
			if c.Role == enginesim.RoleDecode {
				c.MaxRunning = 4
			}
		}})
		f.drainEngine(http.MethodPost, "d0/drain")
		for i := range 6 {
			streams = append(streams, f.read(context.Background(), longStream(i)))
		}
		f.eventually("requests wait in d1", func() bool { return f.decode[1].State().RequestsWaiting > 0 })
		f.eventually("the proxy knows", func() bool { return f.metric("pdproxy_role_requests_waiting", `role="decode"`) > 0 })
		f.drainEngine(http.MethodPost, "d0/drain?move=true")
		f.waitMoves()
		if n := f.continued(); n != 0 || f.requestsOf("d0") != 3 {
			t.Errorf("%d streams moved, %d are at d0", n, f.requestsOf("d0"))
		}
		f.allRight(streams)
	})

	t.Run("no other engine", func(t *testing.T) {
		f, streams := start(t, 3, fleetOptions{})
		f.decode[1].Kill()
		f.eventually("d1 has ended", func() bool { return f.engineState("d1") == "unhealthy" })
		f.drainEngine(http.MethodPost, "d0/drain?move=true")
		f.waitMoves()
		if n := f.continued(); n != 0 {
			t.Errorf("%d streams moved", n)
		}
		f.allRight(streams)
	})

	t.Run("it dies", func(t *testing.T) {
		f, streams := start(t, 20, fleetOptions{config: func(c *config.Config) { c.Retry.MinBudget = 100 }})
		f.drainEngine(http.MethodPost, "d0/drain?move=true")
		f.eventually("a stream has moved", func() bool { return f.continued() > 0 })
		f.decode[0].Kill()
		f.allRight(streams)
		if n := f.continued(); n < 20 {
			t.Errorf("%d streams moved", n)
		}
	})

	t.Run("clients leave", func(t *testing.T) {
		f, streams := start(t, 4, fleetOptions{})
		ctx, leave := context.WithCancel(context.Background())
		f.drainEngine(http.MethodPost, "d1/drain")
		var others []*reading
		for i := range 12 {
			others = append(others, f.read(ctx, longStream(i)))
		}
		f.underWay(others)
		f.drainEngine(http.MethodDelete, "d1/drain")
		f.drainEngine(http.MethodPost, "d0/drain?move=true")
		f.eventually("streams move", func() bool { return f.continued() > 0 })
		leave()
		away(f, "d0")
		f.allRight(streams)
		for _, r := range others {
			<-r.ended
		}
		f.settled()
	})

	t.Run("a stream that cannot move", func(t *testing.T) {
		f, streams := start(t, 2, fleetOptions{})
		f.drainEngine(http.MethodPost, "d1/drain")
		stays := f.read(context.Background(), longStream(3), "X-Pdproxy-Continue", "off")
		f.underWay([]*reading{stays})
		f.drainEngine(http.MethodDelete, "d1/drain")
		f.drainEngine(http.MethodPost, "d0/drain?move=true")
		f.eventually("the other streams have moved", func() bool { return f.continued() == 2 })
		f.waitMoves()
		if f.continued() != 2 || f.requestsOf("d0") != 1 {
			t.Errorf("%d streams moved, %d are at d0", f.continued(), f.requestsOf("d0"))
		}
		f.allRight(append(streams, stays))
		away(f, "d0")
		f.noFault()
	})

	t.Run("off", func(t *testing.T) {
		f, streams := start(t, 2, fleetOptions{config: func(c *config.Config) { c.Retry.Continue = config.ContinueOff }})
		f.drainEngine(http.MethodPost, "d0/drain?move=true")
		f.waitMoves()
		if f.continued() != 0 || f.requestsOf("d0") != 2 {
			t.Errorf("%d streams moved, %d are at d0", f.continued(), f.requestsOf("d0"))
		}
		f.allRight(streams)
	})
}

// waitMoves waits for a time in which streams that may move have moved. Nothing reports that a stream
// stays.
func (f *fleet) waitMoves() { time.Sleep(time.Second) }
