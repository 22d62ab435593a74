package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// batchOf returns a completion of n prompts of several KV blocks.
func batchOf(n, maxTokens int, stream bool) string {
	prompts := make([]string, n)
	for i := range prompts {
		prompts[i] = fmt.Sprint(i, " ", long)
	}
	list, _ := json.Marshal(prompts)
	return fmt.Sprintf(`{"model":"sim","prompt":%s,"max_tokens":%d,"ignore_eos":true,"stream":%t}`, list, maxTokens, stream)
}

// choices returns the text of each choice of an answer, streamed or not.
func choices(t *testing.T, a answer) map[int]string {
	t.Helper()
	if a.err != nil || a.status != 200 || a.errors > 0 {
		t.Fatalf("got status %d, %d error events, err %v: %s", a.status, a.errors, a.err, a.body)
	}
	texts := map[int]string{}
	for event := range strings.SplitSeq(a.body, "\n\n") {
		data := strings.TrimPrefix(event, "data: ")
		if data == "" || data == "[DONE]" {
			continue
		}
		var o struct {
			Choices []struct {
				Index int
				Text  string
			}
		}
		if err := json.Unmarshal([]byte(data), &o); err != nil {
			t.Fatalf("json.Unmarshal([]byte(data), &o) = %v, %s", err, data)
		}
		for _, c := range o.Choices {
			texts[c.Index] += c.Text
		}
	}
	return texts
}

// rightBatch asserts that every choice equals that of one engine alone.
func (f *fleet) rightBatch(a answer, body string) {
	f.t.Helper()
	got := choices(f.t, a)
	want := choices(f.t, f.post(context.Background(), f.alone.URL(), "/v1/completions", body))
	if len(got) != len(want) || len(want) == 0 {
		f.t.Fatalf("%d choices, one engine alone has %d", len(got), len(want))
	}
	for i, text := range want {
		if got[i] != text {
			f.t.Errorf("choice %d is %q, alone %q", i, got[i], text)
		}
	}
}

// Each prompt of a list has its own transfer, on any ranks.
func TestBatchesMeetOneByOne(t *testing.T) {
	for _, ranks := range []int{1, 3} {
		t.Run(fmt.Sprint(ranks, " ranks"), func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{prefill: 1, decode: 1,
				engine: func(role string, _ int, c *enginesim.Config) {
					if role != enginesim.RoleBoth {
						c.Ranks = ranks
					}
				}})
			for _, n := range []int{1, 2, 17} {
				before := f.decode[0].State().Transfers
				f.rightBatch(f.try("/v1/completions", batchOf(n, 6, n == 2)), batchOf(n, 6, false))
				if got := f.decode[0].State().Transfers - before; got != int64(n) {
					t.Errorf("%d transfers for %d prompts", got, n)
				}
			}
			body := `{"model":"sim","text":["in a","list of two"],"sampling_params":{"max_new_tokens":5}}`
			got, want := f.try("/generate", body), f.post(context.Background(), f.alone.URL(), "/generate", body)
			if got.status != 200 || nativeTexts(t, got) != nativeTexts(t, want) {
				t.Errorf("got status %d: %s\nwant %s", got.status, got.body, want.body)
			}
			f.settled()
		})
	}
}

// nativeTexts returns the texts of a native answer to a batch.
func nativeTexts(t *testing.T, a answer) string {
	t.Helper()
	var list []struct{ Text string }
	if err := json.Unmarshal([]byte(a.body), &list); err != nil {
		t.Fatalf("json.Unmarshal([]byte(a.body), &list) = %v, %s", err, a.body)
	}
	return fmt.Sprint(list)
}

// Several samples of one prompt cannot be transferred, and no engine here
// serves them whole: the client gets an error, and no engine gets a request.
func TestSamplesAreRefused(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{prefill: 1, decode: 1})
	for path, body := range map[string]string{
		chatPath:          `{"model":"sim","messages":[{"role":"user","content":"x"}],"n":2}`,
		"/v1/completions": `{"model":"sim","prompt":["x","y"],"n":2}`,
	} {
		if a := f.try(path, body); a.status != 400 || !strings.Contains(a.body, `"param":"n"`) {
			t.Errorf("%s: status %d: %s", path, a.status, a.body)
		}
	}
	if n := f.prefill[0].State().Requests + f.decode[0].State().Requests; n != 0 {
		t.Errorf("engines got %d requests", n)
	}
}

// A batch of embeddings would count one room up into the rooms of later
// requests. An engine that serves both phases gets the whole batch, or the
// client gets an error. Simultaneous requests are answered correctly.
func TestEmbeddingsStayWhole(t *testing.T) {
	var vectors []string
	for i := range 40 {
		vectors = append(vectors, fmt.Sprintf("[[0.%d],[%d]]", i+1, i))
	}
	body := `{"input_embeds":[` + strings.Join(vectors, ",") + `],"sampling_params":{"max_new_tokens":5,"ignore_eos":true}}`
	beside := func(f *fleet) answer {
		batch := make(chan answer, 1)
		go func() { batch <- f.try("/generate", body) }()
		var plain []chan answer
		for i := range 8 {
			got := make(chan answer, 1)
			go func() { got <- f.try(chatPath, chat(fmt.Sprint(i, long), 6, true)) }()
			plain = append(plain, got)
		}
		for i, got := range plain {
			f.right(<-got, chatPath, chat(fmt.Sprint(i, long), 6, true))
		}
		return <-batch
	}
	t.Run("no engine serves both phases", func(t *testing.T) {
		f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{prefill: 1, decode: 1})
		if a := beside(f); a.status != 400 || !strings.Contains(a.body, `"param":"input_embeds"`) {
			t.Errorf("got status %d: %s", a.status, a.body)
		}
	})
	t.Run("an engine does", func(t *testing.T) {
		both := startEngine(t, enginesim.Config{Connector: enginesim.ConnectorSGLang, Role: enginesim.RoleBoth})
		f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{prefill: 1, decode: 1, config: func(c *config.Config) {
			c.Engines = append(c.Engines, engineSpec("b0", "both", enginesim.ConnectorSGLang, both))
		}})
		f.decode = append(f.decode, both)
		want := f.post(context.Background(), f.alone.URL(), "/generate", body)
		if got := beside(f); got.status != 200 || nativeTexts(t, got) != nativeTexts(t, want) {
			t.Errorf("got status %d: %s\nwant %s", got.status, got.body, want.body)
		}
	})
}

// After any end of a batch, nothing of it remains on either engine.
func TestFailingBatches(t *testing.T) {
	body := batchOf(9, 40, true)
	rows := map[string]struct {
		slow string
		fail func(f *fleet)
	}{
		"the client leaves before prefill answered": {enginesim.RolePrefill, func(f *fleet) {
			ctx, leave := context.WithCancel(context.Background())
			gone := make(chan answer, 1)
			go func() { gone <- f.post(ctx, f.url, "/v1/completions", body) }()
			f.eventually("prefill works", func() bool { return f.busy(f.prefill) })
			leave()
			<-gone
			f.cleanupCounted()
		}},
		"the client leaves while decode streams": {enginesim.RoleDecode, func(f *fleet) {
			ctx, leave := context.WithCancel(context.Background())
			resp := f.openAt(ctx, "/v1/completions", body)
			if _, err := resp.Body.Read(make([]byte, 10)); err != nil {
				f.t.Fatal(err)
			}
			leave()
			resp.Body.Close()
			f.cleanupCounted()
		}},
		"prefill refuses": {"", func(f *fleet) {
			for _, p := range f.prefill {
				p.SetFault("1:400", 0, "")
			}
			if a := f.try("/v1/completions", body); a.status != 400 {
				f.t.Errorf("got status %d: %s", a.status, a.body)
			}
		}},
		"prefill fails, and the batch is tried again": {"", func(f *fleet) {
			f.prefill[0].SetFault("1:500", 0, "")
			for range 4 {
				f.rightBatch(f.try("/v1/completions", body), batchOf(9, 40, false))
			}
		}},
		"decode cannot load, and the batch is tried again": {"", func(f *fleet) {
			f.decode[0].SetFault("1:load", 0, "")
			for range 4 {
				f.rightBatch(f.try("/v1/completions", body), batchOf(9, 40, false))
			}
		}},
		"decode dies mid-stream": {enginesim.RoleDecode, func(f *fleet) {
			resp := f.openAt(context.Background(), "/v1/completions", body)
			if _, err := resp.Body.Read(make([]byte, 10)); err != nil {
				f.t.Fatal(err)
			}
			for _, d := range f.decode {
				if d.State().RequestsRunning > 0 {
					d.Kill()
				}
			}
			if a := readRest(resp); a.errors != 1 && a.err == nil {
				f.t.Errorf("%d error events, err %v: %s", a.errors, a.err, a.body)
			}
		}},
	}
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			quick := slow(row.slow, 3000)
			f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{engine: func(role string, n int, c *enginesim.Config) {
				quick(role, n, c)
				c.SGLang.HandshakeInterval, c.SGLang.HeartbeatInterval = 50*time.Millisecond, 250*time.Millisecond
			}})
			row.fail(f)
			f.settled()
		})
	}
}

// Engines that cannot transfer to each other never get the same request: the
// real decode engine would not survive it. The compatible engines serve, and
// the log names the difference.
func TestUnlikeEnginesAreKeptApart(t *testing.T) {
	for name, unlike := range map[string]struct {
		change func(c *enginesim.Config)
		why    string
	}{
		"page size":        {func(c *enginesim.Config) { c.BlockSize = 32 }, "page sizes differ: prefill 32, decode 16"},
		"cache type":       {func(c *enginesim.Config) { c.SGLang.KVCacheDtype = "fp8_e4m3" }, "KV cache types differ: prefill fp8_e4m3, decode auto"},
		"transfer backend": {func(c *enginesim.Config) { c.SGLang.TransferBackend = "nixl" }, "transfer backends differ: prefill nixl, decode mooncake"},
		"ranks":            {func(c *enginesim.Config) { c.SGLang.TPSize = 3 }, "ranks do not map: attention is spread over 3 of prefill and 2 of decode"},
	} {
		t.Run(name, func(t *testing.T) {
			var log testbed.Log
			f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{prefill: 2, decode: 1, log: &log,
				engine: func(role string, n int, c *enginesim.Config) {
					c.SGLang.TPSize = 2
					if role == enginesim.RolePrefill && n == 0 {
						unlike.change(c)
					}
				}})
			for n := range 6 {
				body := chat(fmt.Sprint(n, long), 4, n%2 == 0)
				a := f.try(chatPath, body)
				f.right(a, chatPath, body)
				if at := a.header.Get("X-Pdproxy-Prefill"); at != "p1" {
					t.Errorf("prefill ran on %s", at)
				}
			}
			if n := f.prefill[0].State().Requests; n != 0 {
				t.Errorf("the unlike prefill got %d requests", n)
			}
			if !strings.Contains(log.String(), unlike.why) {
				t.Errorf("the log lacks %q", unlike.why)
			}
			var rows []pairRow
			f.admin("/v1/pairs", &rows)
			if len(rows) != 2 || rows[0].Prefill != "p0" || rows[0].State != "broken" || rows[0].Refused != unlike.why || rows[1].State != "ready" {
				t.Errorf("pairs %+v", rows)
			}
		})
	}
}

// With concurrent legs, only the engines see the begin of a transfer. The times
// that they report become the pair's measured speed.
func TestTransferSpeedIsTheEngines(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{prefill: 1, decode: 1, config: func(c *config.Config) {
		c.Health.LoadInterval = config.Duration(20 * time.Millisecond)
	}})
	speed := func() float64 {
		var rows []struct {
			Micros float64 `json:"transfer_micros"`
		}
		f.admin("/v1/pairs", &rows)
		if len(rows) != 1 {
			return 0
		}
		return rows[0].Micros
	}
	body := chat(long, 4, true)
	f.right(f.try(chatPath, body), chatPath, body)
	f.eventually("the pair has a speed", func() bool { return speed() > 0 })
}

// Prefill engines are found through their bootstrap registries, as soon as
// these exist, together with their ranks.
func TestEnginesFoundByTheirRegistry(t *testing.T) {
	f := &fleet{t: t, connector: enginesim.ConnectorSGLang, base: measure()}
	f.alone = startEngine(t, enginesim.Config{Connector: f.connector})
	port := testbed.Ports(t, 2)
	start := func(port, ranks int) *enginesim.Engine {
		return startEngine(t, enginesim.Config{
			Connector: f.connector, Role: enginesim.RolePrefill, Listen: testbed.FreeAddr(t), BootstrapPort: port, Ranks: ranks,
		})
	}
	f.decode = append(f.decode, startEngine(t, enginesim.Config{Connector: f.connector, Role: enginesim.RoleDecode, Listen: testbed.FreeAddr(t)}))
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Server.DrainTimeout = config.Duration(5 * time.Second)
	cfg.Health.Interval, cfg.Health.Timeout = config.Duration(100*time.Millisecond), config.Duration(2*time.Second)
	cfg.Engines = append(cfg.Engines, engineSpec("d0", enginesim.RoleDecode, f.connector, f.decode[0]))
	cfg.Discovery.SGLang.Interval = config.Duration(50 * time.Millisecond)
	for n := range 2 {
		registry := config.DefaultEngine()
		registry.Name, registry.URL = fmt.Sprint("p", n), fmt.Sprintf("http://127.0.0.1:%d", port+n)
		registry.Role, registry.Connector = config.RolePrefill, config.ConnectorSGLang
		cfg.Discovery.SGLang.Engines = append(cfg.Discovery.SGLang.Engines, registry)
	}
	f.startNode(&cfg, nil)
	f.eventually("decode is ready", func() bool { return f.engineState("d0") == "ready" })
	found := func(name string, ranks int) bool {
		var rows []struct {
			Name, State, Source string
			Ranks               []struct{}
		}
		f.admin("/v1/engines", &rows)
		for _, r := range rows {
			if r.Name == name && r.Source == "sglang" && r.State == "ready" && len(r.Ranks) == ranks {
				return true
			}
		}
		return false
	}
	for n, ranks := range []int{2, 3} {
		p := start(port+n, ranks)
		f.eventually("prefill is found", func() bool { return found(fmt.Sprint("p", n), ranks) })
		f.awaitWorkers()
		f.prefill = []*enginesim.Engine{p}
		for i := range 2 * ranks {
			body := chat(fmt.Sprint(n, i, long), 5, i%2 == 0)
			f.right(f.try(chatPath, body), chatPath, body)
		}
		f.settled()
		if n == 0 {
			p.Kill()
			p.Close()
			f.eventually("its probes have found that the engine has ended", func() bool { return f.engineState("p0") == "unhealthy" })
		}
	}
}

// abortRunning makes the busy decode engine abort all of its requests.
func (f *fleet) abortRunning() {
	f.t.Helper()
	var busy *enginesim.Engine
	f.eventually("decode works", func() bool {
		for _, d := range f.decode {
			if s := d.State(); s.Transfers > 0 && s.RequestsRunning > 0 {
				busy = d
			}
		}
		return busy != nil
	})
	resp, err := f.client.Post(busy.URL()+"/abort_request", "application/json", strings.NewReader(`{"abort_all":true}`))
	if err != nil {
		f.t.Fatal(err)
	}
	resp.Body.Close()
}

// An engine aborts a request in an answer of status 200. If the client has received a
// part of the answer, it gets an error event. Otherwise another pair answers, and the
// client notices nothing.
func TestAbortsInsideAnswers(t *testing.T) {
	t.Run("stream", func(t *testing.T) {
		f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{engine: slow(enginesim.RoleDecode, 20000)})
		resp := f.open(context.Background(), chat(long, 2000, true))
		if _, err := resp.Body.Read(make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
		f.abortRunning()
		a := readRest(resp)
		if a.errors != 1 || a.done || strings.Contains(a.body, `"abort"`) {
			t.Errorf("%d error events, done %v: %s", a.errors, a.done, a.body)
		}
		f.eventually("the aborted stream is counted", func() bool { return f.metric("pdproxy_broken_streams_total", `reason="aborted"`) == 1 })
		f.settled()
	})
	t.Run("unary", func(t *testing.T) {
		f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{engine: slow(enginesim.RoleDecode, 10000)})
		body := chat(long, 300, false)
		got := make(chan answer, 1)
		go func() { got <- f.try(chatPath, body) }()
		f.abortRunning()
		f.right(<-got, chatPath, body)
		if f.metric("pdproxy_retries_total") == 0 {
			t.Error("no retry is counted")
		}
	})
}
