package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/surface"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// connectors are the protocols whose legs run on two engines.
var connectors = []string{
	enginesim.ConnectorVLLMNixl, enginesim.ConnectorVLLMNixlPush, enginesim.ConnectorVLLMStore, enginesim.ConnectorVLLMMoRIIO, enginesim.ConnectorVLLMMoRIIORead,
	enginesim.ConnectorVLLMMooncake, enginesim.ConnectorVLLMP2PTier,
	enginesim.ConnectorSGLang, sglangHeaders, enginesim.ConnectorTRTLLM, trtllmFirst,
}

// sglangHeaders is SGLang with the transfer's parameters in headers: engines
// that accept overrides, and engine.header_overrides.
const sglangHeaders = enginesim.ConnectorSGLang + " header_overrides"

// trtllmFirst is TensorRT-LLM with the generation leg sent first: a connector,
// followed by trtllm.schedule_style.
const trtllmFirst = enginesim.ConnectorTRTLLM + " generation_first"

// kindOf is the connector of the engines.
func kindOf(connector string) string {
	kind, _, _ := strings.Cut(connector, " ")
	return kind
}

// failedTransfer returns the fault of a decode engine whose transfers fail
// visibly: with the P2P tier decode computes the KV that does not arrive.
func failedTransfer(connector string) string {
	if kindOf(connector) == enginesim.ConnectorVLLMP2PTier {
		return "1:500"
	}
	return "1:load"
}

// patience bounds every wait for a condition; it is not a claim about speed.
const patience = 20 * time.Second

// fleet is one proxy with simulated engines, and a separate engine whose
// answers are the right texts.
type fleet struct {
	t         *testing.T
	connector string
	prefill   []*enginesim.Engine
	decode    []*enginesim.Engine
	encode    []*enginesim.Engine
	alone     *enginesim.Engine
	mode      string
	size      int        // number of workers in fleet mode; 0: the usual number
	front     *process   // its admin address covers all processes: the node or the coordinator
	workers   []*process // none in single mode
	cfg       config.Config
	log       io.Writer
	dir       *privatedir.Dir   // of the host of the coordinator
	dirs      []*privatedir.Dir // of all hosts
	token     string            // of fleet.listen, in the mode hosts
	url       string            // the client sends its requests for url to all workers in turn
	client    *http.Client
	drained   bool // the test has stopped the proxy itself
	base      resources
}

// fleetOptions shapes a fleet; the zero value is two engines of each role.
type fleetOptions struct {
	prefill, decode int
	encode          int // vLLM's encoders
	workers         int // 0: the usual number
	engine          func(role string, n int, c *enginesim.Config)
	config          func(c *config.Config)
	log             io.Writer
}

// startFleet starts engines and proxy. At the test's end it stops both and
// asserts that nothing is left of them.
func startFleet(t *testing.T, connector string, o fleetOptions) *fleet {
	t.Helper()
	connector, style, _ := strings.Cut(connector, " ")
	f := &fleet{t: t, connector: connector, size: o.workers, base: measure()}
	if o.prefill+o.decode == 0 {
		o.prefill, o.decode = 2, 2
	}
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Server.DrainTimeout = config.Duration(5 * time.Second)
	cfg.Health.Interval, cfg.Health.Timeout = config.Duration(100*time.Millisecond), config.Duration(2*time.Second)
	cfg.Server.ExposePlacement = true
	if style != "" && connector == enginesim.ConnectorTRTLLM {
		cfg.TRTLLM.ScheduleStyle = style
	}
	store := t.TempDir() // before the fleet's own clean-up, which stops the engines that write there
	start := func(role string, n int) *enginesim.Engine {
		c := enginesim.Config{Connector: connector, Role: role, Lease: time.Minute, Listen: testbed.FreeAddr(t)}
		c.SGLang.HeaderOverrides = style == "header_overrides"
		c.TRTLLM.DisconnectPoll = 20 * time.Millisecond
		c.TRTLLM.KVTransferTimeout = 2 * time.Second
		c.MoRIIO.DeferTimeout, c.MoRIIO.ReceiveTimeout = 2*time.Second, 2*time.Second
		c.Mooncake.AbortTimeout = 2 * time.Second
		if connector == enginesim.ConnectorVLLMStore && role != enginesim.RoleBoth {
			c.Store = store
		}
		c.P2PTier.UnboundTimeout, c.P2PTier.LoadTimeout = 2*time.Second, 2*time.Second
		if connector == enginesim.ConnectorVLLMNixlPush {
			// longer than decode may stand still on a busy machine: otherwise the request
			// would never end
			c.Lease, c.Nixl.ReclaimAfter = 4*time.Second, 5*time.Second
		}
		if o.engine != nil {
			o.engine(role, n, &c)
		}
		if connector == enginesim.ConnectorVLLMMoRIIO || connector == enginesim.ConnectorVLLMMoRIIORead {
			ranks := max(1, c.Ranks)
			c.MoRIIO.HandshakePort = testbed.Ports(t, 2*ranks)
			c.MoRIIO.NotifyPort = c.MoRIIO.HandshakePort + ranks
		}
		if (connector == enginesim.ConnectorVLLMNixlPush || connector == enginesim.ConnectorVLLMP2PTier) && role == enginesim.RolePrefill {
			c.SideChannelPort = testbed.Ports(t, max(1, c.Ranks))
		}
		if connector == enginesim.ConnectorVLLMMooncake && role != enginesim.RoleDecode {
			c.BootstrapPort = testbed.Ports(t, 1)
		}
		e := startEngine(t, c)
		if role != enginesim.RoleBoth {
			spec := engineSpec(fmt.Sprintf("%s%d", role[:1], n), role, connector, e)
			spec.HeaderOverrides = c.SGLang.HeaderOverrides
			cfg.Engines = append(cfg.Engines, spec)
		}
		return e
	}
	for n := range o.prefill {
		f.prefill = append(f.prefill, start(enginesim.RolePrefill, n))
	}
	for n := range o.decode {
		f.decode = append(f.decode, start(enginesim.RoleDecode, n))
	}
	for n := range o.encode {
		f.encode = append(f.encode, start(enginesim.RoleEncode, n))
	}
	f.alone = start(enginesim.RoleBoth, 0)
	if o.config != nil {
		o.config(&cfg)
	}
	f.startNode(&cfg, o.log)
	f.waitReady()
	return f
}

func startEngine(t *testing.T, c enginesim.Config) *enginesim.Engine {
	t.Helper()
	c.FutureParams = true // the proxy passes on members that it does not know
	e, err := enginesim.New(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	return e
}

func engineSpec(name, role, connector string, e *enginesim.Engine) config.Engine {
	spec := config.DefaultEngine()
	spec.Name, spec.URL, spec.Role, spec.Connector = name, e.URL(), role, connector
	if connector != enginesim.ConnectorSGLang { // its engines report it themselves
		spec.KVEvents = e.KVEventsEndpoint()
	}
	spec.KVReplay, spec.KVAddress = e.KVEventsReplay(), e.KVAddress()
	if spec.SideChannelled() {
		spec.SideChannel = e.SideAddress()
	}
	if spec.Pushes() {
		spec.EngineID = e.EngineID()
	}
	if connector == enginesim.ConnectorVLLMMooncake {
		spec.BootstrapPort = e.BootstrapPort()
	}
	return spec
}

// keepKVPorts configures the ports of an engine's KV transfer for its replacement.
func keepKVPorts(c *enginesim.Config, e *enginesim.Engine) {
	if (c.Connector == enginesim.ConnectorVLLMNixlPush || c.Connector == enginesim.ConnectorVLLMP2PTier) && c.Role == enginesim.RolePrefill {
		_, digits, _ := net.SplitHostPort(e.SideAddress())
		c.SideChannelPort, _ = strconv.Atoi(digits)
		c.Nixl.EngineID = e.EngineID()
	}
	if c.Connector == enginesim.ConnectorVLLMMooncake {
		c.BootstrapPort = e.BootstrapPort()
	}
	if at, err := config.ParseKVAddress(e.KVAddress()); err == nil {
		c.MoRIIO.HandshakePort, c.MoRIIO.NotifyPort = at.Handshake, at.Notify
	}
}

// waitReady waits until every engine is ready, so that no test depends on which
// one answered its probe first.
func (f *fleet) waitReady() {
	f.t.Helper()
	f.eventually("all engines are ready", func() bool {
		var rows []struct{ State string }
		f.admin("/v1/engines", &rows)
		for _, r := range rows {
			if r.State != "ready" {
				return false
			}
		}
		return len(rows) > 0
	})
	f.awaitWorkers()
}

// close ends the fleet and asserts that nothing is left.
func (f *fleet) close() {
	if !f.drained {
		f.settled()
	}
	if err := f.end(); err != nil {
		f.t.Errorf("the drain was not clean: %v", err)
	}
	for _, e := range f.engines() {
		e.Close()
	}
	for _, d := range f.dirs {
		d.Close()
	}
	f.eventually("goroutines and descriptors are back at the baseline", func() bool {
		now := measure()
		return now.goroutines <= f.base.goroutines && now.descriptors <= f.base.descriptors
	})
	if f.t.Failed() {
		now := measure()
		f.t.Logf("goroutines %d -> %d, descriptors %d -> %d", f.base.goroutines, now.goroutines, f.base.descriptors, now.descriptors)
	}
}

// settled asserts that no request remains: no lease, no running or waiting
// request, no used or pinned block.
func (f *fleet) settled() {
	f.t.Helper()
	f.eventually("no lease is open", func() bool {
		for _, w := range f.workers {
			if n, err := w.admin.Metric("pdproxy_leases_open"); n != 0 || err != nil {
				return false
			}
		}
		return f.metric("pdproxy_leases_open") == 0
	})
	for _, e := range f.engines() {
		f.eventually("engine "+e.Addr()+" is idle and empty", func() bool {
			s := e.State()
			return s.BlocksUsed == 0 && s.BlocksPinned == 0 && s.RequestsRunning == 0 && s.RequestsWaiting == 0
		})
		if s := e.State(); s.DuplicateIDs > 0 {
			f.t.Errorf("engine %s saw %d ids twice", e.Addr(), s.DuplicateIDs)
		}
	}
}

func (f *fleet) engines() []*enginesim.Engine {
	return append(append(append(append([]*enginesim.Engine{}, f.prefill...), f.decode...), f.encode...), f.alone)
}

// eventually waits for a condition.
func (f *fleet) eventually(what string, ok func() bool) {
	f.t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if ok() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	if !ok() {
		f.t.Errorf("never: %s", what)
		for _, e := range f.engines() {
			f.t.Logf("%s: %+v", e.Addr(), e.State())
		}
	}
}

// resources are those that the process has in use.
type resources struct{ goroutines, descriptors int }

func measure() resources {
	fds, _ := os.ReadDir("/proc/self/fd")
	return resources{runtime.NumGoroutine(), len(fds) - testbed.Reservations()}
}

// surface is the admin endpoint of all processes.
func (f *fleet) surface() surface.Admin {
	return surface.Admin{Client: f.client, URL: f.front.AdminURL()}
}

// admin reads one admin endpoint.
func (f *fleet) admin(path string, into any) {
	f.t.Helper()
	if err := f.surface().Get(path, into); err != nil {
		f.t.Fatal(err)
	}
}

// metric sums the series of one metric whose labels contain all given texts.
func (f *fleet) metric(name string, labels ...string) float64 {
	f.t.Helper()
	sum, err := f.surface().Metric(name, labels...)
	if err != nil {
		f.t.Fatal(err)
	}
	return sum
}

// chat returns a chat request whose answer has maxTokens tokens.
func chat(prompt string, maxTokens int, stream bool) string {
	text, _ := json.Marshal(prompt)
	return fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%s}],"max_tokens":%d,"ignore_eos":true,"stream":%t}`, text, maxTokens, stream)
}

// answer is a client's view of an answer.
type answer struct {
	status int
	header http.Header
	body   string
	text   string // the generated text
	errors int    // error events
	done   bool   // [DONE] was received
	err    error  // the connection broke
}

// post sends a body and reads the whole answer.
func (f *fleet) post(ctx context.Context, base, path, body string, header ...string) answer {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+path, strings.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := f.client.Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return readAnswer(resp, data, err)
}

func readAnswer(resp *http.Response, data []byte, err error) answer {
	a := answer{status: resp.StatusCode, header: resp.Header, body: string(data), err: err}
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		a.text = textOf(data)
		return a
	}
	for event := range bytes.SplitSeq(data, []byte("\n\n")) {
		name := ""
		if rest, ok := bytes.CutPrefix(event, []byte("event: ")); ok {
			line, after, _ := bytes.Cut(rest, []byte("\n"))
			name, event = string(line), after
		}
		payload, ok := bytes.CutPrefix(event, []byte("data: "))
		switch {
		case !ok:
		case string(payload) == "[DONE]", name == "message_stop", name == "response.completed", name == "response.incomplete":
			a.done = true
		case name == "error", name == "response.failed", bytes.HasPrefix(payload, []byte(`{"error"`)), bytes.Contains(payload, []byte(`"finish_reason":{"type":"abort"`)):
			a.errors++
		case bytes.Contains(payload, []byte(`"meta_info":{`)): // SGLang's own events repeat the whole text
			a.text = textOf(payload)
		default:
			a.text += textOf(payload)
		}
	}
	return a
}

// textOf returns the generated text of one answer or event of any API. For
// token ids it returns the list.
func textOf(data []byte) string {
	type texts []struct{ Text string }
	var a struct {
		Choices []struct {
			Text     string
			Message  struct{ Content string }
			Delta    struct{ Content string }
			TokenIDs []int `json:"token_ids"`
		}
		Content texts                     // messages
		Output  []struct{ Content texts } // responses
		Text    string                    // SGLang's own
		Delta   json.RawMessage           // of the typed events of both
		Type    string
	}
	json.Unmarshal(data, &a)
	var b strings.Builder
	for _, c := range a.Choices {
		b.WriteString(c.Text + c.Message.Content + c.Delta.Content)
		for _, id := range c.TokenIDs {
			fmt.Fprint(&b, id, " ")
		}
	}
	for _, o := range a.Output {
		a.Content = append(a.Content, o.Content...)
	}
	for _, c := range a.Content {
		b.WriteString(c.Text)
	}
	var delta struct{ Text string }
	switch a.Type {
	case "response.output_text.delta":
		json.Unmarshal(a.Delta, &delta.Text)
	case "content_block_delta":
		json.Unmarshal(a.Delta, &delta)
	}
	if a.Type == "" {
		b.WriteString(a.Text)
	}
	return b.String() + delta.Text
}

// right asserts that an answer is complete and equals that of one engine alone.
func (f *fleet) right(a answer, path, body string) {
	f.t.Helper()
	if a.err != nil || a.status != 200 || a.errors > 0 {
		f.t.Fatalf("got status %d, %d error events, err %v: %s", a.status, a.errors, a.err, a.body)
	}
	if !strings.Contains(body, `"model"`) { // some engines require it; the proxy adds it for them
		body = strings.Replace(body, "{", `{"model":"sim",`, 1)
	}
	want := f.post(context.Background(), f.alone.URL(), path, body)
	if want.text == "" || a.text != want.text {
		f.t.Fatalf("text differs from one engine alone:\n got %q\nwant %q", a.text, want.text)
	}
}

// try posts a request through the proxy.
func (f *fleet) try(path, body string) answer {
	return f.post(context.Background(), f.url, path, body)
}

// readRest reads the rest of an opened answer.
func readRest(resp *http.Response) answer {
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return readAnswer(resp, data, err)
}
