package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/config"
	pd "github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/journal"
)

const prefillerHeader = "x-prefiller-host-port"

// startSidecar starts engines and a proxy next to the first engine of a role.
func startSidecar(t *testing.T, connector, role string, o fleetOptions) *fleet {
	t.Helper()
	t.Setenv(modeVar, modeSingle) // a sidecar is one process
	change := o.config
	o.config = func(c *config.Config) {
		c.Sidecar.Role, c.Sidecar.Connector = role, kindOf(connector)
		for _, e := range c.Engines {
			if e.Name == role[:1]+"0" {
				c.Sidecar.Local = e.URL
			}
		}
		if change != nil {
			change(c)
		}
		if problems := c.Validate(); len(problems) > 0 {
			t.Fatal(problems)
		}
	}
	return startFleet(t, connector, o)
}

// eachSidecar runs a test next to a decode engine and next to a prefill engine,
// for every protocol.
func eachSidecar(t *testing.T, run func(t *testing.T, connector, role string)) {
	eachConnector(t, func(t *testing.T, connector string) { bothSides(t, connector, run) })
}

// eachSidecarFlow is eachSidecar for one protocol of each order of the legs.
// The other differences are common to every proxy.
func eachSidecarFlow(t *testing.T, run func(t *testing.T, connector, role string)) {
	for _, c := range []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorSGLang, trtllmFirst} {
		t.Run(c, func(t *testing.T) { bothSides(t, c, run) })
	}
}

func bothSides(t *testing.T, connector string, run func(t *testing.T, connector, role string)) {
	for _, role := range []string{enginesim.RoleDecode, enginesim.RolePrefill} {
		t.Run("beside "+role, func(t *testing.T) { run(t, connector, role) })
	}
}

// remotes returns the engines of the remote role.
func (f *fleet) remotes(role string) []*enginesim.Engine {
	if role == enginesim.RoleDecode {
		return f.prefill
	}
	return f.decode
}

// tell posts a chat request with headers. It does not check the answer.
func (f *fleet) tell(body string, header ...string) answer {
	return f.post(context.Background(), f.url, chatPath, body, header...)
}

// coordination returns the policy by which the sidecar placed a request, and
// the fallbacks.
func (f *fleet) coordination(a answer) (policy string, fallbacks []string) {
	f.t.Helper()
	id := a.header.Get("X-Request-Id")
	var e journal.Explanation
	f.eventually("the request is explained", func() bool {
		f.admin("/v1/explain/"+id, &e)
		return e.RequestID == id
	})
	for _, b := range e.Fallbacks {
		fallbacks = append(fallbacks, b.What+"/"+b.Reason)
	}
	return e.Coordination, fallbacks
}

// remoteOf returns the name of the engine that took the remote phase.
func remoteOf(a answer, role string) string {
	if role == enginesim.RoleDecode {
		return a.header.Get("X-Pdproxy-Prefill")
	}
	return a.header.Get("X-Pdproxy-Decode")
}

func TestSidecarCallsTheEngineThatIsNamed(t *testing.T) {
	eachSidecar(t, func(t *testing.T, connector, role string) {
		f := startSidecar(t, connector, role, fleetOptions{})
		other := map[string]string{enginesim.RoleDecode: "p", enginesim.RolePrefill: "d"}[role]
		for n, e := range f.remotes(role) {
			name := other + string(rune('0'+n))
			for _, stream := range []bool{false, true} {
				body := chat("named "+name+long, 12, stream)
				a := f.tell(body, prefillerHeader, e.Addr())
				f.right(a, chatPath, body)
				if got := remoteOf(a, role); got != name {
					t.Errorf("got a leg on %s, want one on %s", got, name)
				}
				if policy, fallbacks := f.coordination(a); policy != map[string]string{"p": "prefill_named", "d": "decode_named"}[other] || len(fallbacks) > 0 {
					t.Errorf("placed by %s with %v", policy, fallbacks)
				}
			}
		}
		// llm-d's own test sends the address as a URL.
		for _, form := range []string{"http://%s", "HTTP://%s", "https://%s", "http://%s/"} {
			body := chat("named by a URL "+long, 12, false)
			a := f.tell(body, prefillerHeader, fmt.Sprintf(form, f.remotes(role)[1].Addr()))
			f.right(a, chatPath, body)
			if got := remoteOf(a, role); got != other+"1" {
				t.Errorf("%s: got a leg on %s, want one on %s", form, got, other+"1")
			}
		}
		// The place policy chooses among several addresses, in one line or in
		// several.
		both := f.remotes(role)[0].Addr() + " , " + strings.ToUpper(f.remotes(role)[1].Addr())
		body := chat("one of two", 12, true)
		f.right(f.tell(body, prefillerHeader, both), chatPath, body)
		if idle := f.decode[1]; role == enginesim.RoleDecode && idle.State().Requests > 0 {
			t.Error("a decode engine other than the local one was called")
		}
	})
}

// TestSidecarCallsNobodyElse: the engine in the header must be known and must
// serve the phase. Otherwise the sidecar opens no connection, and no engine
// receives the request.
func TestSidecarCallsNobodyElse(t *testing.T) {
	bothSides(t, enginesim.ConnectorVLLMNixl, func(t *testing.T, connector, role string) {
		f := startSidecar(t, connector, role, fleetOptions{})
		stranger, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		var dialled atomic.Int32
		go func() {
			for {
				c, err := stranger.Accept()
				if err != nil {
					return
				}
				dialled.Add(1)
				c.Close()
			}
		}()
		defer stranger.Close()
		local := map[string]*enginesim.Engine{enginesim.RoleDecode: f.decode[0], enginesim.RolePrefill: f.prefill[0]}[role]
		ownRole := map[string]*enginesim.Engine{enginesim.RoleDecode: f.decode[1], enginesim.RolePrefill: f.prefill[1]}[role]
		good := f.remotes(role)[0].Addr()
		_, port, _ := net.SplitHostPort(good)
		for name, value := range map[string]string{
			"a stranger":                       stranger.Addr().String(),
			"an unknown engine in a list":      good + "," + stranger.Addr().String(),
			"a URL":                            "http://" + stranger.Addr().String() + "/x",
			"a known engine with further text": good + "/../../" + stranger.Addr().String(),
			"another host's port":              "169.254.169.254:" + port,
			"a known engine and a path":        "http://" + good + "/x",
			"a known engine, two URLs":         "http://http://" + good,
			"a URL with user":                  "http://a@" + good,
			"another scheme":                   "ftp://" + good,
			"no port":                          "127.0.0.1",
			"with user":                        "a@" + good,
			"the local engine":                 local.Addr(),
			"an engine of its role":            ownRole.Addr(),
			"an engine's name":                 "p0",
			"nonsense":                         "\\;%00",
		} {
			a := f.tell(chat("evil", 5, false), prefillerHeader, value)
			if a.status != 403 || !strings.Contains(a.body, prefillerHeader) {
				t.Errorf("%s: status %d: %s", name, a.status, a.body)
			}
		}
		if dialled.Load() > 0 {
			t.Error("the proxy dialled an unknown host")
		}
		for _, e := range f.engines()[:4] {
			if n := e.State().Requests; n > 0 {
				t.Errorf("engine %s saw %d requests", e.Addr(), n)
			}
		}
		f.eventually("the refusals are counted", func() bool {
			return f.metric("pdproxy_exchanges_total", `outcome="client_error"`) == 15
		})
	})
}

// Without the header the sidecar of llm-d uses its engine for both phases. If
// the protocol does not allow that, the place policy chooses a prefill engine.
func TestSidecarWithoutHeader(t *testing.T) {
	eachSidecar(t, func(t *testing.T, connector, role string) {
		f := startSidecar(t, connector, role, fleetOptions{prefill: 1, decode: 1})
		policy := map[string]string{enginesim.RoleDecode: "prefill_placed", enginesim.RolePrefill: "decode_placed"}[role]
		if c, _ := pd.ByName(kindOf(connector)); role == enginesim.RoleDecode && c.AggregatesOn()&abi.RoleDecode != 0 {
			policy = "local"
		}
		for _, header := range [][]string{nil, {prefillerHeader, ""}, {prefillerHeader, " , "}} {
			body := chat(long, 12, true)
			a := f.tell(body, header...)
			f.right(a, chatPath, body)
			if got, fallbacks := f.coordination(a); got != policy || len(fallbacks) > 0 {
				t.Errorf("placed by %s with %v, want %s", got, fallbacks, policy)
			}
		}
		if n := f.metric("pdproxy_coordinations_total", `policy="`+policy+`"`); n != 3 {
			t.Errorf("got %v counted placements", n)
		}
	})
}

// TestSidecarAlone: without another engine the local engine serves all requests that need
// no other engine.
func TestSidecarAlone(t *testing.T) {
	f := startSidecar(t, enginesim.ConnectorVLLMNixl, enginesim.RoleDecode, fleetOptions{prefill: 1, decode: 1, config: func(c *config.Config) {
		c.Engines = nil // includes the local engine, which is known by its url
	}})
	resp, err := f.client.Get(f.url + "/health")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 200 {
		t.Errorf("health answers %d", resp.StatusCode)
	}
	for _, body := range []string{chat(long, 12, true), `{"model":"sim","messages":[{"role":"user","content":"two"}],"n":2,"max_tokens":4}`} {
		if a := f.tell(body); a.status != 200 || a.header.Get("X-Pdproxy-Decode") != "local" {
			t.Errorf("got status %d by %s: %s", a.status, a.header.Get("X-Pdproxy-Decode"), a.body)
		}
	}
	if a := f.tell(chat("x", 5, false), prefillerHeader, f.prefill[0].Addr()); a.status != 403 {
		t.Errorf("status for an unknown engine: %d", a.status)
	}
	ids := f.post(context.Background(), f.url, "/tokenize", `{"model":"sim","prompt":"how many"}`)
	if ids.status != 200 {
		t.Errorf("tokenize: status %d: %s", ids.status, ids.body)
	}
}

func TestSidecarServesTokensInTokensOut(t *testing.T) {
	f := startSidecar(t, enginesim.ConnectorVLLMNixl, enginesim.RoleDecode, fleetOptions{})
	const path = "/inference/v1/generate"
	body := `{"model":"sim","token_ids":[5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32,33,34],"sampling_params":{"max_tokens":8}}`
	tokens := func(a answer) string {
		var v struct {
			Choices []struct {
				TokenIDs []int `json:"token_ids"`
			}
		}
		if json.Unmarshal([]byte(a.body), &v) != nil || len(v.Choices) != 1 {
			return ""
		}
		text, _ := json.Marshal(v.Choices[0].TokenIDs)
		return string(text)
	}
	want := tokens(f.post(context.Background(), f.alone.URL(), path, body))
	a := f.post(context.Background(), f.url, path, body, prefillerHeader, f.prefill[1].Addr())
	if got := tokens(a); a.status != 200 || want == "" || got != want {
		t.Fatalf("got status %d: %s, want %s: %s", a.status, got, want, a.body)
	}
	if a.header.Get("X-Pdproxy-Prefill") != "p1" {
		t.Errorf("prefilled by %s", a.header.Get("X-Pdproxy-Prefill"))
	}
}

// put changes a setting through the admin API.
func (f *fleet) put(path, body string) (int, string) {
	f.t.Helper()
	req, err := http.NewRequest(http.MethodPut, f.front.AdminURL()+path, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	testbed.Authorize(f.t, req)
	resp, err := f.client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	data, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(data)
}

// TestSidecarPoliciesAreSwitched: by a request for itself, by an operator for
// all later requests.
func TestSidecarPoliciesAreSwitched(t *testing.T) {
	const header = "x-coordination"
	f := startSidecar(t, enginesim.ConnectorVLLMNixl, enginesim.RoleDecode, fleetOptions{config: func(c *config.Config) {
		c.Sidecar.PolicyHeader = header
	}})
	ask := func(want string, lines ...string) {
		t.Helper()
		body := chat("switch "+want+long, 8, true)
		a := f.tell(body, lines...)
		f.right(a, chatPath, body)
		if got, _ := f.coordination(a); got != want {
			t.Errorf("placed by %s, want %s", got, want)
		}
	}
	ask("local")
	ask("prefill_placed", header, "prefill_placed")
	ask("local", header, "local", prefillerHeader, f.prefill[0].Addr())
	ask("prefill_named", prefillerHeader, f.prefill[0].Addr())
	if a := f.tell(chat("x", 3, false), header, "decode_placed"); a.status != 400 || !strings.Contains(a.body, header) {
		t.Errorf("a policy that is not in use: status %d: %s", a.status, a.body)
	}
	// A policy that the request names and that cannot be used is skipped and
	// counted.
	a := f.tell(chat("not named", 3, false), header, "prefill_named")
	if policy, fallbacks := f.coordination(a); a.status != 200 || policy != "local" || strings.Join(fallbacks, " ") != "prefill_named/not_applicable" {
		t.Errorf("got status %d, placed by %s with %v", a.status, policy, fallbacks)
	}

	if status, body := f.put("/v1/sidecar/policies", `{"policies":["prefill_placed"]}`); status != 200 || !strings.Contains(body, `"policies":["prefill_placed"]`) {
		t.Fatalf("got status %d: %s", status, body)
	}
	ask("prefill_placed")
	ask("prefill_placed", prefillerHeader, "1.2.3.4:5") // no active policy reads the header
	if a := f.tell(chat("x", 3, false), header, "local"); a.status != 400 {
		t.Errorf("status for a disabled policy: %d", a.status)
	}
	for _, bad := range []string{`{"policies":[]}`, `{"policies":["decode_placed"]}`, `{"policies":["x"]}`, `{"order":["local"]}`, `no`} {
		if status, body := f.put("/v1/sidecar/policies", bad); status != 400 {
			t.Errorf("%s: status %d: %s", bad, status, body)
		}
	}
	if status := f.delete("/v1/sidecar/policies"); status != 200 {
		t.Errorf("DELETE answered %d", status)
	}
	ask("local")
	var row admin.SidecarRow
	if f.admin("/v1/sidecar", &row); row.Engine != "d0" || row.Role != "decode" || strings.Join(row.Policies, " ") != "prefill_named local prefill_placed" {
		t.Errorf("got %+v", row)
	}
}

// TestSidecarHeadersAreIgnored where the configuration does not allow them.
func TestSidecarHeadersAreIgnored(t *testing.T) {
	lines := []string{prefillerHeader, "1.2.3.4:5", "EPP-Profile", "prefill", "x-coordination", "nonsense"}
	t.Run("no sidecar", func(t *testing.T) {
		f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{})
		body := chat("plain", 8, true)
		a := f.tell(body, lines...)
		f.right(a, chatPath, body)
		if a.header.Get("X-Pdproxy-Prefill") == "" {
			t.Error("the header changed the placement")
		}
		if status, _ := f.put("/v1/sidecar/policies", `{"policies":["local"]}`); status != 404 {
			t.Errorf("the admin API answers %d", status)
		}
	})
	t.Run("another caller", func(t *testing.T) {
		f := startSidecar(t, enginesim.ConnectorVLLMNixl, enginesim.RoleDecode, fleetOptions{config: func(c *config.Config) {
			c.Sidecar.PolicyHeader, c.Sidecar.ProfileHeader, c.Sidecar.Callers = "x-coordination", "EPP-Profile", []string{"10.0.0.0/8", "::1"}
		}})
		body := chat("plain", 8, true)
		a := f.tell(body, lines...)
		f.right(a, chatPath, body)
		if policy, _ := f.coordination(a); policy != "local" {
			t.Errorf("placed by %s", policy)
		}
	})
	t.Run("the caller", func(t *testing.T) {
		f := startSidecar(t, enginesim.ConnectorVLLMNixl, enginesim.RoleDecode, fleetOptions{config: func(c *config.Config) {
			c.Sidecar.Callers = []string{"127.0.0.0/8"}
		}})
		if a := f.tell(chat("plain", 8, true), lines...); a.status != 403 {
			t.Errorf("got status %d", a.status)
		}
	})
}

// TestSidecarLinesReachNoEngine: headers for the sidecar are not forwarded,
// whether or not they are used, also for a trusted client.
func TestSidecarLinesReachNoEngine(t *testing.T) {
	for _, callers := range [][]string{nil, {"10.0.0.1"}} {
		local := &testbed.Engine{Name: "d0", Role: "decode", Serve: says(200, `{"choices":[{"text":"ok"}]}`)}
		remote := &testbed.Engine{Name: "p0", Role: "prefill", Serve: says(200, `{"choices":[{"text":""}]}`)}
		f := startScripted(t, enginesim.ConnectorVLLMNixl, func(c *config.Config) {
			c.Sidecar.Local, c.Sidecar.PolicyHeader, c.Sidecar.ProfileHeader = c.Engines[0].URL, "x-coordination", "EPP-Profile"
			c.Sidecar.Header, c.Sidecar.Callers, c.Server.TrustPDFields = "x-remote", callers, true
		}, local, remote)
		address := strings.TrimPrefix(remoteURL(f, "p0"), "http://")
		a := f.post(context.Background(), f.url, completionPath, plainCompletion(false),
			"x-remote", address, "x-coordination", "prefill_named", "EPP-Profile", "", "x-mine", "stays")
		if a.status != 200 {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
		for _, leg := range append(local.Seen(nil), remote.Seen(nil)...) {
			for _, name := range []string{"X-Remote", "X-Coordination", "Epp-Profile"} {
				if _, there := leg.Header[http.CanonicalHeaderKey(name)]; there {
					t.Errorf("%s reached an engine", name)
				}
			}
			if leg.Header.Get("X-Mine") != "stays" {
				t.Error("an unrelated header line did not reach an engine")
			}
		}
		if n := len(remote.Seen(nil)); (callers == nil) != (n == 1) {
			t.Errorf("callers %v: the remote engine saw %d legs", callers, n)
		}
	}
}

// remoteURL returns the address of an engine in the admin API.
func remoteURL(f *fleet, name string) string {
	var rows []struct{ Name, URL string }
	f.admin("/v1/engines", &rows)
	for _, r := range rows {
		if r.Name == name {
			return r.URL
		}
	}
	return ""
}

// TestSidecarOfACallerThatCoordinates: the caller sends each phase with its
// profile, and passes the transfer's parameters on itself.
func TestSidecarOfACallerThatCoordinates(t *testing.T) {
	profile := func(c *config.Config) { c.Sidecar.ProfileHeader = "EPP-Profile" }
	f := startSidecar(t, enginesim.ConnectorVLLMNixl, enginesim.RoleDecode, fleetOptions{prefill: 1, decode: 1, config: profile})
	prompt := `"model":"sim","messages":[{"role":"user","content":"` + long + `"}],"ignore_eos":true`
	first := f.post(context.Background(), f.prefill[0].URL(), chatPath,
		`{`+prompt+`,"max_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}`)
	var said struct {
		Params map[string]json.RawMessage `json:"kv_transfer_params"` // one is a number of 63 bits
	}
	if json.Unmarshal([]byte(first.body), &said) != nil || said.Params["remote_host"] == nil {
		t.Fatalf("prefill: status %d: %s", first.status, first.body)
	}
	decode := func(key, value string, header ...string) answer {
		params := maps.Clone(said.Params)
		if key != "" {
			params[key] = json.RawMessage(value)
		}
		text, _ := json.Marshal(params)
		return f.tell(`{`+prompt+`,"max_tokens":12,"kv_transfer_params":`+string(text)+`}`, header...)
	}
	for name, member := range map[string][2]string{
		"another host":          {"remote_host", `"169.254.169.254"`},
		"a host in a list":      {"remote_hosts", `["127.0.0.1","10.9.9.9"]`},
		"an address elsewhere":  {"x", `{"y":"10.9.9.9:80"}`},
		"a URL":                 {"x", `"http://10.9.9.9/"`},
		"a number for a host":   {"remote_host", `2851995649`},
		"a name for a host":     {"remote_host", `"metadata.internal"`},
		"a bootstrap elsewhere": {"remote_bootstrap_addr", `"http://metadata.internal:80"`},
	} {
		if a := decode(member[0], member[1], "EPP-Profile", "decode"); a.status != 403 || !strings.Contains(a.body, "EPP-Profile") {
			t.Errorf("%s: status %d: %s", name, a.status, a.body)
		}
	}
	if n := f.decode[0].State().Requests; n > 0 {
		t.Fatalf("decode saw %d requests that were refused", n)
	}
	a := decode("", "", "EPP-Profile", "Decode")
	f.right(a, chatPath, `{`+prompt+`,"max_tokens":12}`)
	if f.decode[0].State().Transfers != 1 {
		t.Error("decode did not read prefill's blocks")
	}
	if policy, _ := f.coordination(a); policy != "profile_decode" {
		t.Errorf("placed by %s", policy)
	}
	for value, status := range map[string]int{"prefill": 400, "nonsense": 400, "encode": 200} {
		if a := f.tell(chat("x", 3, false), "EPP-Profile", value); a.status != status {
			t.Errorf("profile %s: status %d: %s", value, a.status, a.body)
		}
	}
	// Without the profile the parameters belong to a client, and are removed.
	if a := decode("remote_host", `"169.254.169.254"`); a.status != 200 {
		t.Errorf("a plain request: status %d: %s", a.status, a.body)
	}
}

// TestSidecarProfilePrefill: the answer to the caller contains the parameters.
func TestSidecarProfilePrefill(t *testing.T) {
	f := startSidecar(t, enginesim.ConnectorVLLMNixl, enginesim.RolePrefill, fleetOptions{prefill: 1, decode: 1, config: func(c *config.Config) {
		c.Sidecar.ProfileHeader = "EPP-Profile"
	}})
	prompt := `"model":"sim","messages":[{"role":"user","content":"` + long + `"}],"ignore_eos":true`
	a := f.tell(`{`+prompt+`,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}`, "EPP-Profile", "prefill")
	var said struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if json.Unmarshal([]byte(a.body), &said) != nil || len(said.Params) == 0 {
		t.Fatalf("got status %d: %s", a.status, a.body)
	}
	b := f.post(context.Background(), f.decode[0].URL(), chatPath, `{`+prompt+`,"max_tokens":12,"kv_transfer_params":`+string(said.Params)+`}`)
	f.right(b, chatPath, `{`+prompt+`,"max_tokens":12}`)
}

// TestSidecarCallsTheEncodersThatAreNamed: the header for encoders has the same
// rules as the other header.
func TestSidecarCallsTheEncodersThatAreNamed(t *testing.T) {
	const header = "x-encoder-hosts-ports"
	f := startSidecar(t, enginesim.ConnectorVLLMNixl, enginesim.RoleDecode, withEncoders(t, 3, nil))
	for n, named := range []string{f.encode[1].Addr(), f.encode[1].Addr() + "," + f.encode[2].Addr()} {
		body := picture(fmt.Sprint("named", n), 4, 8, true)
		f.right(f.tell(body, prefillerHeader, f.prefill[0].Addr(), header, named), chatPath, body)
	}
	var worked []int64
	for _, e := range f.encode {
		worked = append(worked, encodedOf(e.State()))
	}
	if worked[0] != 0 || worked[1] < 4 || worked[2] == 0 || worked[1]+worked[2] != 10 {
		t.Errorf("the encoders worked up %v parts", worked)
	}
	for _, bad := range []string{"1.2.3.4:5", f.prefill[0].Addr(), f.encode[0].Addr() + ",1.2.3.4:5"} {
		if a := f.tell(picture("x", 1, 3, false), header, bad); a.status != 403 || !strings.Contains(a.body, header) {
			t.Errorf("%s: status %d: %s", bad, a.status, a.body)
		}
	}
}

// TestSidecarProfileIsSentOnce: a failed decode may have read the blocks of its
// parameters, so it is not retried.
func TestSidecarProfileIsSentOnce(t *testing.T) {
	local := &testbed.Engine{Name: "d0", Role: "decode", Serve: says(500, `{"error":"x"}`)}
	f := startScripted(t, enginesim.ConnectorVLLMNixl, func(c *config.Config) {
		c.Sidecar.Local, c.Sidecar.ProfileHeader = c.Engines[0].URL, "EPP-Profile"
	}, local)
	for profile, tries := range map[string]int{"decode": 1, "": 3} {
		before := len(local.Seen(nil))
		if a := f.post(context.Background(), f.url, completionPath, plainCompletion(false), "EPP-Profile", profile); a.status != 502 {
			t.Errorf("got status %d: %s", a.status, a.body)
		}
		if n := len(local.Seen(nil)) - before; n != tries {
			t.Errorf("profile %q: %d tries, want %d", profile, n, tries)
		}
	}
}

// TestSidecarUnderLoad: many requests of every kind run while an operator
// changes the policies and an engine sometimes fails. Every answer is right,
// and nothing remains.
func TestSidecarUnderLoad(t *testing.T) {
	for _, connector := range []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorSGLang} {
		t.Run(connector, func(t *testing.T) {
			var f *fleet
			url := startPicker(t, pickAlways(&f))
			f = startSidecar(t, connector, enginesim.RolePrefill, fleetOptions{config: func(c *config.Config) {
				c.Sidecar.Picker, c.Sidecar.PickerTimeout, c.Sidecar.PolicyHeader = url, config.Duration(10*time.Second), "x-coordination"
				c.Retry.Budget, c.Retry.MinBudget, c.Retry.Attempts = 1, 1000, 5
				c.Circuit.Failures = 1000
			}})
			f.decode[1].SetFault("0.3:500", 0, "")
			body := chat("under load"+long, 6, true)
			want := f.post(context.Background(), f.alone.URL(), chatPath, body)
			var clients sync.WaitGroup
			for n := range 16 {
				clients.Go(func() {
					for i := range 6 {
						header := [][]string{
							nil,
							{prefillerHeader, f.decode[n%2].Addr()},
							{prefillerHeader, f.decode[0].Addr() + "," + f.decode[1].Addr()},
							{"x-coordination", "decode_placed"},
						}[(n+i)%4]
						if a := f.tell(body, header...); a.status != 200 || a.text != want.text || a.errors > 0 {
							t.Errorf("%v: status %d: %s", header, a.status, a.body)
						}
					}
				})
			}
			for range 10 {
				f.put("/v1/sidecar/policies", `{"policies":["decode_placed","decode_named"]}`)
				f.put("/v1/sidecar/policies", `{"policies":["decode_named","decode_picked","decode_placed"]}`)
			}
			clients.Wait()
			f.decode[1].SetFault("", 0, "")
			f.settled()
		})
	}
}

// TestSidecarByReload: a running proxy becomes a sidecar, and an ordinary proxy
// again.
func TestSidecarByReload(t *testing.T) {
	t.Setenv(modeVar, modeSingle) // a sidecar is one process
	var plain config.Config
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{config: func(c *config.Config) { plain = *c }})
	beside := plain
	beside.Sidecar.Local = plain.Engines[2].URL // d0
	for _, tt := range []struct {
		cfg    *config.Config
		status int
	}{{&beside, 403}, {&plain, 200}, {&beside, 403}} {
		if err := f.reload(tt.cfg); err != nil {
			t.Fatal(err)
		}
		if a := f.tell(chat("reloaded", 4, false), prefillerHeader, "1.2.3.4:5"); a.status != tt.status {
			t.Errorf("got status %d, want %d", a.status, tt.status)
		}
		body := chat("reloaded"+long, 4, true)
		f.right(f.tell(body), chatPath, body)
	}
}
