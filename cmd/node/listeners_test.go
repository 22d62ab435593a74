package node

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/admintoken"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
)

// strangerVariable makes the test's program act as another user who attacks the admin
// address and the token's file that the variable names.
const strangerVariable = "PDPROXY_TEST_STRANGER"

func TestMain(m *testing.M) {
	if target := os.Getenv(strangerVariable); target != "" {
		stranger(target)
		return
	}
	os.Exit(isolated.Run(m))
}

// servingNode starts a node that serves until the test ends.
func servingNode(t *testing.T, change func(*config.Config)) *Node {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_RUNTIME_DIR", dir)
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen, cfg.Policy.Runtime = "127.0.0.1:0", "127.0.0.1:0", "native"
	change(&cfg)
	n, err := New(&cfg, slog.New(slog.DiscardHandler), Options{Version: "1.2.3"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, "pdproxy", "*.token")); len(left) > 0 {
			t.Errorf("remaining files %q", left)
		}
	})
	return n
}

// write writes text to a new file and returns its path.
func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// call sends a request with the header lines "Name: value". A Host line sets the host of
// the request.
func call(t *testing.T, method, url, body string, lines ...string) (int, string, http.Header) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range lines {
		name, value, _ := strings.Cut(line, ": ")
		if name == "Host" {
			r.Host = value
			continue
		}
		r.Header.Add(name, value)
	}
	resp, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text), resp.Header
}

// TestInternalListeners checks the answers of each internal address to a read and to a
// change, if a web page, another user or the operator sends the request.
func TestInternalListeners(t *testing.T) {
	const secret = "the-token-of-workers"
	tokenFile := write(t, secret+"\n")
	for _, withTokens := range []bool{false, true} {
		n := servingNode(t, func(cfg *config.Config) {
			cfg.Fleet.Listen = "127.0.0.1:0"
			cfg.Discovery.TRTLLM.ClusterURI, cfg.Discovery.TRTLLM.ClusterName = "http://127.0.0.1:0", "blue"
			if withTokens {
				cfg.Fleet.TokenFile, cfg.Discovery.TRTLLM.TokenFile = tokenFile, tokenFile
			}
		})
		for _, l := range []struct {
			name, base, read, change, body, token string
			asks, readAsks                        int // status of a change and a read without the token; 0: the same as with the token
			readOK, changeOK                      int
			named                                 int // status of the operator's request by another host name; 0: the same as by the address
		}{
			{
				"admin", n.AdminURL(), "/v1/exchanges", "/v1/engines", `{"name":"e%d","url":"http://127.0.0.1:1","role":"both"}`, n.AdminToken(),
				401, 0, 200, 201, 0,
			},
			{
				"cluster_uri", "http://" + n.StorageAddr().String(), "/get_prefix?key_prefix=/nothing", "/set", `{"key":"k%d","value":"v"}`, secret,
				0, 0, 400, 200, 403, // 400: there are no such keys
			},
			{
				"fleet.listen", "http://" + n.FleetAddr().String(), "/cluster_info", "/select", `{"role":"ctx","routing_key":null,"req_id":%d}`, secret,
				0, 0, 200, 503, 403, // 503: there is no engine
			},
		} {
			if withTokens && l.name != "admin" {
				l.asks, l.readAsks, l.named = 401, 401, 0
			}
			const jsonType = "Content-Type: application/json"
			right := "Authorization: Bearer " + l.token
			for i, tt := range []struct {
				name         string
				lines        []string
				read, change int // 0: the same as for the operator
			}{
				{"operator", []string{right, jsonType}, 0, 0},
				{"operator who uses the name of a service", []string{right, jsonType, "Host: pdproxy.default.svc:9090"}, l.named, l.named},
				{"operator's own page", []string{right, jsonType, "Origin: " + l.base, "Sec-Fetch-Site: same-origin"}, 0, 0},
				{"no token", []string{jsonType}, l.readAsks, l.asks},
				{"wrong token", []string{jsonType, "Authorization: Bearer x" + l.token}, l.readAsks, l.asks},
				{"foreign Origin", []string{jsonType, "Origin: http://evil.example"}, 403, 403},
				{"foreign Origin with the token", []string{right, jsonType, "Origin: http://evil.example"}, 403, 403},
				{"Origin of a file", []string{jsonType, "Origin: null"}, 403, 403},
				{"page of another site", []string{jsonType, "Sec-Fetch-Site: cross-site"}, 403, 403},
				{"page of another port", []string{jsonType, "Sec-Fetch-Site: same-site"}, 403, 403},
				{"rebound name", []string{jsonType, "Host: rebound.evil.example:9090"}, 403, 403},
				{"rebound page, its own origin", []string{jsonType, "Host: evil.example", "Origin: http://evil.example", "Sec-Fetch-Site: same-origin"}, 403, 403},
				{"simple request", []string{"Content-Type: text/plain;charset=UTF-8", "Origin: http://evil.example", "Host: rebound.evil.example:9090", "Sec-Fetch-Site: cross-site"}, 403, 403},
				{"text", []string{right, "Content-Type: text/plain"}, 0, 415},
				{"form", []string{right, "Content-Type: application/x-www-form-urlencoded"}, 0, 415},
				{"multipart form", []string{right, "Content-Type: multipart/form-data; boundary=x"}, 0, 415},
				{"no type", []string{right}, 0, 415},
			} {
				name := fmt.Sprintf("%s, tokens %t, %s", l.name, withTokens, tt.name)
				for _, r := range []struct {
					method, path, body string
					want, ok           int
				}{{"GET", l.read, "", tt.read, l.readOK}, {"POST", l.change, fmt.Sprintf(l.body, i), tt.change, l.changeOK}} {
					if r.want == 0 {
						r.want = r.ok
					}
					status, text, head := call(t, r.method, l.base+r.path, r.body, tt.lines...)
					if status != r.want || !json.Valid([]byte(text)) {
						t.Errorf("%s: %s: call(r.method, l.base+r.path, r.body, tt.lines...) = %d %s, want %d", name, r.method, status, text, r.want)
					}
					if head.Get("Access-Control-Allow-Origin") != "" || head.Get("Cross-Origin-Resource-Policy") != "same-origin" {
						t.Errorf("%s: %s has %v", name, r.method, head)
					}
				}
			}
			if status, _, head := call(t, "OPTIONS", l.base+l.change, "", "Origin: http://evil.example", "Access-Control-Request-Method: POST"); status != 403 || len(head.Values("Access-Control-Allow-Methods")) > 0 {
				t.Errorf("%s: a preflight got %d, %v", l.name, status, head)
			}
		}
	}
}

// TestAdminRoutes: every route that changes something needs the token. Every other route
// only reads.
func TestAdminRoutes(t *testing.T) {
	n := servingNode(t, func(cfg *config.Config) { cfg.Sidecar.Local = "http://127.0.0.1:1" })
	for _, path := range []string{"/v1/engines", "/v1/engines/x", "/v1/drain", "/v1/policies/auto/reload", "/v1/sidecar/policies", "/v1/nothing", "/", "/healthz", "//v1/drain"} {
		for _, method := range []string{"POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "MKCOL"} {
			if status, text, _ := call(t, method, n.AdminURL()+path, "", "Content-Type: application/json"); status != 401 {
				t.Errorf("%s, %s: call = %d, %s", method, path, status, text)
			}
		}
		for _, method := range []string{"GET", "HEAD"} {
			if status, text, _ := call(t, method, n.AdminURL()+path, ""); status == 401 {
				t.Errorf(`%s, %s: call(method, n.AdminURL()+path, "") = %s`, method, path, text)
			}
		}
	}
	if n.server.Ready() || len(n.registry.Snapshot().Instances) != 1 {
		t.Errorf("engines are %v", n.registry.Snapshot().Instances)
	}
	if status, _, _ := call(t, "GET", n.AdminURL()+"/healthz", ""); status != 200 {
		t.Errorf("/healthz: %d", status)
	}
	if status, text, _ := call(t, "GET", n.URL()+"/version", ""); status != 200 || !strings.Contains(text, `"1.2.3"`) {
		t.Errorf("/version: %d %s", status, text)
	}
}

// TestAddedEngines: keys that name local files or make the proxy trust more hosts are
// refused, unless the configuration allows them. The answer does not tell whether a file
// exists.
func TestAddedEngines(t *testing.T) {
	there := write(t, "THE-SECRET\n")
	add := func(n *Node, key, value string) (int, string) {
		status, text, _ := call(t, "POST", n.AdminURL()+"/v1/engines", `{"name":"e","url":"https://127.0.0.1:1","role":"both","`+key+`":`+value+`}`,
			"Authorization: Bearer "+n.AdminToken(), "Content-Type: application/json")
		return status, text
	}
	quoted := func(text string) string { return `"` + text + `"` }
	strict := servingNode(t, func(*config.Config) {})
	for _, tt := range []struct{ key, value string }{
		{"api_key_file", quoted(there)},
		{"api_key_file", quoted(there + "-missing")},
		{"api\\u005fkey_file", quoted(there)},
		{"ca", quoted(there)},
		{"ca", quoted("/etc/shadow")},
		{"insecure_skip_verify", "true"},
		{"kv_hosts", `"*"`},
		{"kv_hosts", `"10.0.0.1, *"`},
		{"kv_hosts", `"0.0.0.0/0"`},
		{"kv_hosts", `"0.0.0.0/1,128.0.0.0/1"`},
		{"kv_hosts", `"::ffff:0.0.0.0/96"`},
		{"kv_hosts", `"::/0"`},
		{"kv_hosts", `"2000::/3"`},
	} {
		key := strings.ReplaceAll(tt.key, "\\u005f", "_")
		status, text := add(strict, tt.key, tt.value)
		if status != 400 || !strings.Contains(text, `"param":"`+key+`"`) || strings.Contains(text, there) || strings.Contains(text, "SECRET") {
			t.Errorf("%s, %s: add(strict, tt.key, tt.value) = %d, %s", tt.key, tt.value, status, text)
		}
	}
	if status, text := add(strict, "kv_hosts", `"10.0.0.0/8, fd00::/8, rdma0.lab"`); status != 201 {
		t.Errorf("some hosts: %d %s", status, text)
	}

	free := servingNode(t, func(cfg *config.Config) { cfg.Admin.TrustAddedEngines = true })
	for _, file := range []string{"/missing", write(t, "two\nlines\n")} {
		if status, text := add(free, "api_key_file", quoted(file)); status != 400 || strings.Contains(text, "no such file") || strings.Contains(text, "one line") {
			t.Errorf(`%s: add(free, "api_key_file", quoted(file)) = %d, %s`, file, status, text)
		}
	}
	if status, text := add(free, "api_key_file", quoted(there)); status != 201 {
		t.Errorf("allowed: %d %s", status, text)
	}
}

// attack is the result of one attack.
type attack struct{ Name, Got string }

// stranger attacks an admin address and the file of its token, which target names as
// "URL FILE". It prints the results.
func stranger(target string) {
	base, file, _ := strings.Cut(target, " ")
	var got []attack
	text, err := os.ReadFile(file)
	got = append(got, attack{"read the token", fmt.Sprintf("%q %t", text, os.IsPermission(err))})
	got = append(got, attack{"remove the token", fmt.Sprint(os.Remove(file) == nil)})
	for _, request := range []string{"POST /v1/engines", "DELETE /v1/engines/mine", "POST /v1/drain", "POST /v1/policies/auto/reload", "GET /v1/exchanges"} {
		method, path, _ := strings.Cut(request, " ")
		r, err := http.NewRequest(method, base+path, strings.NewReader(`{"name":"x","url":"http://127.0.0.1:1","role":"both","api_key_file":"/etc/shadow"}`))
		if err == nil {
			r.Header.Set("Content-Type", "application/json")
			var resp *http.Response
			if resp, err = http.DefaultClient.Do(r); err == nil {
				resp.Body.Close()
				got = append(got, attack{request, resp.Status[:3]})
				continue
			}
		}
		got = append(got, attack{request, err.Error()})
	}
	_ = json.NewEncoder(os.Stdout).Encode(got) // on an error the test misses the output
}

// TestLocalUser: a process of another user on this machine neither reads the token nor
// changes anything.
func TestLocalUser(t *testing.T) {
	if os.Geteuid() != 0 || runtime.GOOS != "linux" {
		t.Skip("this test needs Linux and root, to run a process of another user; make test-all runs it as root")
	}
	n := servingNode(t, func(cfg *config.Config) {
		e := config.DefaultEngine()
		e.Name, e.URL, e.Role = "mine", "http://127.0.0.1:1", config.RoleBoth
		cfg.Engines = []config.Engine{e}
	})
	c := exec.Command("/proc/self/exe")
	c.Env = []string{strangerVariable + "=" + n.AdminURL() + " " + admintoken.Path(n.front.AdminAddr().String())}
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	var stderr strings.Builder
	c.Stderr, c.Dir = &stderr, "/"
	out, err := c.Output()
	if err != nil {
		t.Fatalf("c.Output() = %v, %s", err, stderr.String())
	}
	var got []attack
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	want := []attack{
		{"read the token", `"" true`}, {"remove the token", "false"}, {"POST /v1/engines", "401"}, {"DELETE /v1/engines/mine", "401"},
		{"POST /v1/drain", "401"}, {"POST /v1/policies/auto/reload", "401"}, {"GET /v1/exchanges", "200"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("the stranger got\n%v, want\n%v", got, want)
	}
	if text, err := admintoken.Find(n.front.AdminAddr().String()); err != nil || text != n.AdminToken() {
		t.Errorf("afterwards: %q, %v", text, err)
	}
	if list := n.registry.Snapshot().Instances; len(list) != 1 || list[0].State().String() == "draining" {
		t.Errorf("engines are %v", list)
	}
}

// TestLastLineOfTheAccessLog: a node that ends writes the lines that still wait.
func TestLastLineOfTheAccessLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access.jsonl")
	t.Run("node", func(t *testing.T) {
		n := servingNode(t, func(cfg *config.Config) { cfg.Server.AccessLog = path })
		if status, text, _ := call(t, "POST", "http://"+n.front.Addr().String()+"/v1/completions", `{"prompt":7}`); status != 400 {
			t.Errorf("got %d %s", status, text)
		}
	})
	text, err := os.ReadFile(path)
	if err != nil || strings.Count(string(text), "\n") != 1 || !strings.Contains(string(text), `"status":400`) {
		t.Errorf("the log has %q, %v", text, err)
	}
}
