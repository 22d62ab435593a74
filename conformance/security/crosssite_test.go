package security

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// foreignPages are the header lines with which a browser marks a request that a page
// of another origin makes. HOST is the address that the request goes to.
var foreignPages = map[string]string{
	"text/plain":       "Host: HOST\r\nOrigin: http://evil.example\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\nContent-Type: text/plain;charset=UTF-8\r\n",
	"form":             "Host: HOST\r\nOrigin: http://evil.example\r\nContent-Type: application/x-www-form-urlencoded\r\n",
	"multipart":        "Host: HOST\r\nOrigin: http://evil.example\r\nContent-Type: multipart/form-data; boundary=x\r\n",
	"JSON":             "Host: HOST\r\nOrigin: http://evil.example\r\nSec-Fetch-Site: cross-site\r\nContent-Type: application/json\r\n",
	"origin null":      "Host: HOST\r\nOrigin: null\r\nContent-Type: application/json\r\n",
	"other port":       "Host: HOST\r\nOrigin: http://127.0.0.1:1\r\nSec-Fetch-Site: same-site\r\nContent-Type: application/json\r\n",
	"no content type":  "Host: HOST\r\nOrigin: http://evil.example\r\n",
	"text, no origin":  "Host: HOST\r\nSec-Fetch-Site: cross-site\r\nContent-Type: text/plain\r\n",
	"rebound":          "Host: rebound.evil.example:9090\r\nOrigin: http://rebound.evil.example:9090\r\nSec-Fetch-Site: same-origin\r\nContent-Type: application/json\r\n",
	"rebound, no port": "Host: rebound.evil.example\r\nContent-Type: application/json\r\n",
	"rebound IP name":  "Host: 127.0.0.1.evil.example\r\nContent-Type: application/json\r\n",
	"rebound suffix":   "Host: evil-localhost\r\nContent-Type: application/json\r\n",
}

// rawRequest sends one request with those header lines and returns the answer.
func rawRequest(addr, line, header, body string) (status int, text string, err error) {
	c, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		return 0, "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	length := ""
	if body != "" || strings.HasPrefix(line, "POST") {
		length = fmt.Sprintf("Content-Length: %d\r\n", len(body))
	}
	fmt.Fprintf(c, "%s HTTP/1.1\r\n%s%sConnection: close\r\n\r\n%s", line, strings.ReplaceAll(header, "HOST", addr), length, body)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// internal is a proxy with all its internal HTTP addresses on loopback, without
// any token in its configuration.
type internal struct {
	*proxyProcess
	engine, thief *fakeEngine
	cluster       string // discovery.trtllm.cluster_uri, host:port
	fleet         string // fleet.listen
}

func newInternal(t *testing.T) *internal {
	t.Helper()
	i := &internal{engine: newFakeEngine(t), thief: newFakeEngine(t), cluster: testbed.FreeAddr(t), fleet: testbed.FreeAddr(t)}
	i.proxyProcess = startProxy(t, setup{
		noToken: true, fleet: fmt.Sprintf("workers = 1\nlisten = %q\n", i.fleet),
		sections: i.engine.section("both", "none") + fmt.Sprintf("[discovery.trtllm]\ncluster_uri = \"http://%s\"\ncluster_name = \"blue\"\n", i.cluster),
	})
	return i
}

func (i *internal) adminAddr() string { return strings.TrimPrefix(i.admin.URL, "http://") }

// names returns the names of the proxy's engines.
func (i *internal) names() []string {
	i.t.Helper()
	var rows []struct{ Name string }
	if err := i.admin.Get("/v1/engines", &rows); err != nil {
		i.t.Fatal(err)
	}
	var names []string
	for _, row := range rows {
		names = append(names, row.Name)
	}
	return names
}

// unchanged asserts that no request of a page had an effect.
func (i *internal) unchanged() {
	i.t.Helper()
	if names := i.names(); !slices.Equal(names, []string{i.engine.name("both")}) {
		i.t.Errorf("the engines are %q", names)
	}
	if n := i.thief.connections(); n > 0 {
		i.t.Errorf("the proxy connected to the attacker's engine %d times", n)
	}
	if _, text, err := rawRequest(i.cluster, "GET /get_prefix?key_prefix=/", "Host: HOST\r\n", ""); err != nil || strings.Contains(text, "evil") {
		i.t.Errorf("a page has registered a worker: %s %v", text, err)
	}
	i.serves("after the requests of a web page")
	i.nothingLeft() // includes reservations of /select
}

// TestForeignPages sends the requests of web pages to every internal address.
func TestForeignPages(t *testing.T) {
	t.Parallel()
	i := newInternal(t)
	add := fmt.Sprintf(`{"name":"evil","url":"http://%s","role":"both","connector":"none"}`, i.thief.listener.Addr())
	worker := fmt.Sprintf(`{"key":"/blue/workers/evil","value":"{\"worker_id\":\"evil\",\"host\":\"127.0.0.1\",\"port\":%d,\"role\":\"both\"}","ttl":60}`, i.thief.listener.Addr().(*net.TCPAddr).Port)
	if status, text, err := rawRequest(i.cluster, "POST /set", "Host: HOST\r\nContent-Type: application/json\r\n", `{"key":"/blue/kept","value":"kept"}`); err != nil || status != 200 {
		t.Fatalf("a worker cannot register: %d %s %v", status, text, err)
	}
	for name, header := range foreignPages {
		for _, request := range []struct{ addr, line, body string }{
			{i.adminAddr(), "POST /v1/engines", add},
			{i.adminAddr(), "POST /v1/drain", ""}, {i.adminAddr(), "POST /v1/drain", "{}"},
			{i.adminAddr(), "POST /v1/policies/least_load/reload", ""},
			{i.adminAddr(), "DELETE /v1/engines/" + i.engine.name("both"), ""},
			{i.cluster, "POST /set", worker}, {i.cluster, "GET /expire?key=/blue/kept&ttl=1", ""}, {i.cluster, "DELETE /delete?key=/blue/kept", ""},
			{i.fleet, "POST /select", `{"role":"context","routing_key":null,"req_id":7}`}, {i.fleet, "POST /finish", `{"role":"context","req_id":7}`},
		} {
			status, text, err := rawRequest(request.addr, request.line, header, request.body)
			if err == nil && !slices.Contains([]int{400, 401, 403, 404, 405, 415, 421}, status) {
				t.Errorf("%s: %s: status %d: %.200s", name, request.line, status, text)
			}
		}
	}
	for _, host := range []string{"rebound.evil.example:9090", "rebound.evil.example", "127.0.0.1.evil.example", "localhost.evil.example:1"} {
		for _, request := range []struct{ addr, line string }{
			{i.adminAddr(), "GET /v1/engines"}, {i.adminAddr(), "GET /v1/exchanges"}, {i.adminAddr(), "GET /metrics"},
			{i.adminAddr(), "GET /v1/policies"}, {i.adminAddr(), "GET /v1/explain/x"}, {i.adminAddr(), "GET /perf_metrics"},
			{i.adminAddr(), "GET /v1/pairs"}, {i.adminAddr(), "GET /v1/workers"},
			{i.cluster, "GET /get?key=/blue/kept"}, {i.cluster, "GET /get_prefix?key_prefix=/"}, {i.fleet, "GET /cluster_info"},
		} {
			status, text, err := rawRequest(request.addr, request.line, "Host: "+host+"\r\nSec-Fetch-Site: same-origin\r\n", "")
			if err == nil && status < 400 {
				t.Errorf("a rebound page reads %s by the name %s: %d %.100q", request.line, host, status, text)
			}
		}
	}
	for _, path := range []string{"/metrics", "/v1/engines", "/v1/exchanges"} { // the control: an operator's curl
		for _, host := range []string{"HOST", "localhost:9090"} {
			if status, text, err := rawRequest(i.adminAddr(), "GET "+path, "Host: "+host+"\r\nUser-Agent: curl/8\r\n", ""); err != nil || status != 200 {
				t.Errorf("an operator reads %s by %s: %d %.100q %v", path, host, status, text, err)
			}
		}
	}
	if status, text, err := rawRequest(i.cluster, "GET /get?key=/blue/kept", "Host: HOST\r\n", ""); err != nil || status != 200 || !strings.Contains(text, "kept") {
		t.Errorf("registration of the worker: %d %s %v", status, text, err)
	}
	i.unchanged()
}

// TestAddedEngineKeys: an operator adds and removes an engine, but not with keys that
// name files of the proxy's host or widen its trust.
func TestAddedEngineKeys(t *testing.T) {
	t.Parallel()
	e, added := newFakeEngine(t), newFakeEngine(t)
	p := startProxy(t, setup{sections: e.section("both", "none")})
	secret := t.TempDir() + "/secret"
	write(t, secret, "ONE-LINE-SECRET\n")
	send := func(method, path, body string) (int, string) {
		status, text, err := rawRequest(strings.TrimPrefix(p.admin.URL, "http://"), method+" "+path,
			"Host: HOST\r\nAuthorization: Bearer "+adminToken+"\r\nContent-Type: application/json\r\n", body)
		if err != nil {
			t.Error(err)
		}
		return status, text
	}
	for n, key := range []string{
		fmt.Sprintf(`"api_key_file":%q`, secret), `"api_key_file":"/etc/hostname"`, fmt.Sprintf(`"ca":%q`, secret), `"ca":"/etc/shadow"`,
		`"kv_hosts":"*"`, `"kv_hosts":"10.0.0.1,*"`, `"kv_hosts":"0.0.0.0/0"`, `"kv_hosts":"::/0"`, `"insecure_skip_verify":true`,
	} {
		body := fmt.Sprintf(`{"name":"added-%d","url":"http://%s","role":"both","connector":"vllm-nixl",%s}`, n, added.listener.Addr(), key)
		if status, text := send("POST", "/v1/engines", body); status < 400 || status > 499 || strings.Contains(text, "SECRET") {
			t.Errorf("%s: status %d: %s", key, status, text)
		}
	}
	if n := added.connections(); n > 0 {
		t.Errorf("the proxy connected %d times to an engine that it had refused", n)
	}
	plainEngine := fmt.Sprintf(`{"name":"added","url":"http://%s","role":"both","connector":"none"}`, added.listener.Addr())
	if status, text := send("POST", "/v1/engines", plainEngine); status != 201 {
		t.Errorf("an engine without such keys: status %d: %s", status, text)
	}
	if status, text := send("DELETE", "/v1/engines/added?drain=0s", ""); status != 202 {
		t.Errorf("its removal: status %d: %s", status, text)
	}
	p.serves("after the additions")
}
