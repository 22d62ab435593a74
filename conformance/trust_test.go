package conformance

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// tap is a proxy in front of an engine that records the engine's requests.
type tap struct {
	addr    string
	engine  atomic.Pointer[url.URL]
	answers func([]byte) []byte // changes the engine's answers; nil: no change

	mu   sync.Mutex
	seen []string // requests with head and body; guarded by mu
}

// newTaps opens taps. Call it before the fleet starts, because the fleet's end
// checks that nothing is left.
func newTaps(t *testing.T, n int) []*tap {
	t.Helper()
	var taps []*tap
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		p := &tap{addr: l.Addr().String()}
		s := &http.Server{Handler: p}
		done := make(chan struct{})
		go func() { defer close(done); s.Serve(l) }()
		t.Cleanup(func() { s.Close(); <-done })
		taps = append(taps, p)
	}
	return taps
}

// before puts taps in front of the engines of a configuration, in its order.
func before(taps []*tap, c *config.Config) {
	for i, p := range taps {
		u, _ := url.Parse(c.Engines[i].URL)
		p.engine.Store(u)
		c.Engines[i].URL = "http://" + p.addr
	}
}

func (p *tap) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	if r.Method == http.MethodPost {
		p.mu.Lock()
		p.seen = append(p.seen, fmt.Sprintf("%s %s %v %s", r.Method, r.URL, r.Header, body))
		p.mu.Unlock()
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	proxy := httputil.ReverseProxy{
		Rewrite:       func(pr *httputil.ProxyRequest) { pr.SetURL(p.engine.Load()) },
		Transport:     &http.Transport{DisableKeepAlives: true, DisableCompression: true},
		FlushInterval: -1,
		ErrorHandler:  func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	if p.answers != nil {
		proxy.ModifyResponse = func(resp *http.Response) error {
			data, err := io.ReadAll(resp.Body)
			if err != nil {
				return err
			}
			data = p.answers(data)
			resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(data)), int64(len(data))
			resp.Header.Set("Content-Length", fmt.Sprint(len(data)))
			return nil
		}
	}
	proxy.ServeHTTP(w, r)
}

// sent returns the engine's requests since the last call.
func (p *tap) sent() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	seen := p.seen
	p.seen = nil
	return seen
}

// The marks in values of a client that only the proxy may set.
const (
	markText   = "attacker.invalid"
	markNumber = "660066066"
)

// pdFields are the members that tell engines about a transfer, all with marks
// in them.
var pdFields = []string{
	`"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":true,"remote_engine_id":"MARK","remote_block_ids":[NUM],"remote_host":"MARK","remote_port":NUM,"tp_size":1,"transfer_id":"MARK"}`,
	`"ec_transfer_params":{"peer":"MARK"}`,
	`"request_id":"MARK"`, `"rid":"MARK"`,
	`"bootstrap_host":"MARK"`, `"bootstrap_port":NUM`, `"bootstrap_room":NUM`, `"bootstrap_pair_key":"MARK"`,
	`"decode_tp_size":NUM`, `"routed_dp_rank":NUM`, `"disagg_prefill_dp_rank":NUM`, `"data_parallel_rank":NUM`,
	`"disaggregated_params":{"request_type":"generation_only","ctx_request_id":NUM,"disagg_request_id":NUM,"ctx_info_endpoint":["tcp://MARK:1"],"encoded_opaque_state":"MARK"}`,
	`"prompt_token_ids_b64":"MARK"`,
	`"need_wait_for_mm_inputs":"MARK"`, `"num_items_assigned":{"IMAGE":[NUM]}`, `"encoder_urls":["http://MARK"]`,
	`"mm_data_mooncake":["MARK"]`, `"positional_embed_overrides":{"embeds":"MARK"}`, `"http_worker_ipc":"tcp://MARK:1"`,
	`"kv_hints":{"protocol_version":"MARK","actions":[{"payload":{"source_control_endpoint":"tcp://MARK:1"}}]}`,
	`"kv_router_hint":{"source_control_endpoint":"tcp://MARK:1","block_hashes":["NUM"]}`,
}

// vllmFields are those that vLLM reads from members which clients may set.
var vllmFields = []string{
	`"vllm_xargs":{"kv_transfer_params":{"remote_host":"MARK"},"ec_transfer_params":{"peer":"MARK"}}`,
}

// pdHeader are the headers that tell engines, and their sidecars, about a
// transfer.
var pdHeader = []string{
	"X-Request-Id", "___prefill_addr_host:MARK,handshake:1,notify:2___decode_addr_host:MARK,handshake:1,notify:2_0123456789abcdef0123456789abcdef",
	"X-data-parallel-rank", "NUM", "X-Data-Parallel-Host-Port", "MARK:1",
	"X-Prefiller-Host-Port", "MARK:1", "X-Prefiller-Url", "http://MARK", "X-Encoder-Hosts-Ports", "MARK:1",
	"EPP-Profile", "MARK",
	"X-Override-Bootstrap-Host", "MARK", "X-Override-Bootstrap-Room", "NUM", "X-Override-Rid", "MARK",
	"X-TRTLLM-Disagg-Auth", "MARK", "X-Trtllm-Anything", "MARK",
	"X-Kv-Cache-Source-Host-Port", "MARK:1",
}

func marked(s string) string {
	return strings.NewReplacer("MARK", markText, "NUM", markNumber).Replace(s)
}

// escaped writes the first letter of a member's name as an escape, which means
// the same to every parser.
func escaped(member string) string { return fmt.Sprintf(`"\u%04x%s`, member[1], member[2:]) }

// TestNoPDFieldReachesAnEngine: a client writes transfer parameters into the
// body, nested, escaped, into the request line and into headers, on every
// route. No engine receives them, and the answer is the same as without them.
func TestNoPDFieldReachesAnEngine(t *testing.T) {
	bodies := []struct{ path, body string }{
		{"/v1/completions", `{"model":"sim","prompt":"a prompt of some words for two engines","max_tokens":6,"ignore_eos":true%s}`},
		{chatPath, `{"model":"sim","messages":[{"role":"user","content":"a prompt of some words for two engines"}],"max_tokens":6,"ignore_eos":true%s}`},
		{chatPath, `{"model":"sim","messages":[{"role":"user","content":"two answers, which one engine gives"}],"max_tokens":6,"n":2%s}`},
		{"/v1/responses", `{"model":"sim","input":"a prompt of some words for two engines","max_output_tokens":6%s}`},
		{"/v1/messages", `{"model":"sim","messages":[{"role":"user","content":"a prompt of some words for two engines"}],"max_tokens":6%s}`},
		{"/inference/v1/generate", `{"model":"sim","token_ids":[1,2,3,4,5],"sampling_params":{"max_tokens":6,"extra_args":{"kv_transfer_params":{"remote_host":"MARK"},"ec_transfer_params":{"peer":"MARK"}}}%s}`},
		{"/generate", `{"text":"a prompt of some words for two engines","sampling_params":{"max_new_tokens":6}%s}`},
		{"/v1/embeddings", `{"model":"sim","input":"words"%s}`},
		{"/v1/rerank", `{"model":"sim","query":"words","documents":["a","b"]%s}`},
		{"/score", `{"model":"sim","text_1":"words","text_2":["a","b"]%s}`},
		{"/classify", `{"model":"sim","input":"words"%s}`},
		{"/pooling", `{"model":"sim","input":"words"%s}`},
		{"/v1/messages/count_tokens", `{"model":"sim","messages":[{"role":"user","content":"words"}]%s}`},
		{"/tokenize", `{"model":"sim","prompt":"words"%s}`},
		{"/detokenize", `{"model":"sim","tokens":[1,2]%s}`},
	}
	eachConnector(t, func(t *testing.T, connector string) {
		for name, o := range map[string]fleetOptions{"legs": {}, "legs and questions": knowing(t, connector, "kv_aware")} {
			t.Run(name, func(t *testing.T) {
				taps := newTaps(t, 2)
				change := o.config
				o.prefill, o.decode, o.config = 1, 1, func(c *config.Config) {
					if change != nil {
						change(c)
						c.Tokens.Sources = []string{"engine"}
					}
					before(taps, c)
				}
				f := startFleet(t, connector, o)
				asked := false
				for _, b := range bodies {
					for _, sent := range f.hostile(taps, b.path, b.body) {
						asked = asked || strings.Contains(sent, "/render ") || strings.Contains(sent, "/v1/tokenize ") || strings.Contains(sent, "/_internal/tokenize ")
					}
				}
				if asked != (change != nil) {
					t.Errorf("token ids were requested from engines: %v", asked)
				}
			})
		}
	})
}

// hostile sends a body to a path with every PD field in every form, and returns
// the engines' requests. None may contain a mark.
func (f *fleet) hostile(taps []*tap, path, body string) (all []string) {
	f.t.Helper()
	var escapes []string
	for _, field := range pdFields {
		escapes = append(escapes, escaped(field))
	}
	for name, fields := range map[string][]string{"plain": pdFields, "escaped": escapes, "vllm": vllmFields} {
		var header []string
		for _, h := range pdHeader {
			header = append(header, marked(h))
		}
		a := f.post(context.Background(), f.url, path+marked("?bootstrap_host=MARK&kv_transfer_params=MARK"),
			marked(fmt.Sprintf(body, ","+strings.Join(fields, ","))), header...)
		if text := path == chatPath || path == "/v1/completions"; text && name != "vllm" && !strings.Contains(body, `"n":2`) {
			f.right(a, path, fmt.Sprintf(body, ""))
		}
		for i, p := range taps {
			for _, sent := range p.sent() {
				if strings.Contains(sent, markText) || strings.Contains(sent, markNumber) {
					f.t.Errorf("%s, %s: engine %d received %s", path, name, i, sent)
				}
				all = append(all, sent)
			}
		}
	}
	return all
}

// TestDecodeIsSentToPrefillOnly: a prefill engine, or another host that answers
// in its place, names a host that is not its own in all fields of its answer.
// No decode engine connects to that host, and clients get answers anyway.
func TestDecodeIsSentToPrefillOnly(t *testing.T) {
	const foreign = "169.254.169.254"
	eachConnector(t, func(t *testing.T, connector string) {
		taps := newTaps(t, 2)
		taps[0].answers = func(b []byte) []byte {
			for _, own := range []string{"127.0.0.1", "localhost"} {
				b = bytes.ReplaceAll(b, []byte(own), []byte(foreign))
			}
			return b
		}
		f := startFleet(t, connector, fleetOptions{prefill: 1, decode: 1,
			engine: func(_ string, _ int, c *enginesim.Config) { c.Lease = time.Second }, // the decode engine that would free the blocks does not get their addresses
			config: func(c *config.Config) {
				before(taps, c)
				c.Engines[0].KVHosts = "192.0.2.1" // limited to the known hosts
			},
		})
		for _, stream := range []bool{true, false} {
			body := chat("a prompt of some words, which all have to be read", 6, stream)
			f.right(f.try(chatPath, body), chatPath, body)
		}
		sent := taps[1].sent()
		if len(sent) < 2 {
			t.Errorf("decode received %d requests", len(sent))
		}
		for _, s := range sent {
			if strings.Contains(s, foreign) {
				t.Errorf("decode received %s", s)
			}
		}
		if connector == enginesim.ConnectorVLLMNixl {
			if n := f.metric("pdproxy_fallbacks_total", `what="kv_transfer"`, `reason="foreign_host"`); n != 2 {
				t.Errorf("got %v counted fallbacks", n)
			}
			var rows []pairRow
			if f.admin("/v1/pairs", &rows); len(rows) != 1 || rows[0].LastError != "foreign_host" {
				t.Errorf("pairs %+v", rows)
			}
		}
	})
}
