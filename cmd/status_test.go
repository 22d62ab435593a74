package cmd

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/admin"
)

// deadDecode is a snapshot, in the form of GET /v1/dashboard/events, in which d1 has died and a
// plugin is parked. The model of p0 tries to write to the terminal.
const deadDecode = `{"time":1796011586.144,"version":"0.1.0","workers":2,"silent_workers":1,` +
	`"traffic":{"requests":3.5,"outcomes":{"ok":3,"broken":0.5},"events":1234.5,"retries":1,"shed":0,"ttft_ms":{"p50":141.2,"p95":null,"p99":null},"running":3,"waiting":2},` +
	`"engines":[` +
	`{"name":"d0","role":"decode","state":"ready","since":1796007986.1,"circuit":"half_open","restarts":1,"model":"sim","ranks":[{"requests":2,"queued":0,"running":3,"waiting":1},{"requests":1,"queued":0,"running":1,"waiting":0}]},` +
	`{"name":"d1","role":"decode","state":"unhealthy","since":1796011574.1,"circuit":"closed","model":"sim","ranks":[{"requests":0,"queued":0}]},` +
	`{"name":"p0","role":"prefill","state":"ready","since":1796011286.1,"circuit":"closed","model":"a\u001b]0;evil\u0007b","ranks":[{"requests":1,"queued":123456,"running":1,"waiting":0}]}],` +
	`"pairs":[{"prefill":"p0","decode":"d0","state":"ready","failures":0,"last_error":"old"},{"prefill":"p0","decode":"d1","state":"broken","unavailable":"d1 is unhealthy","failures":4,"last_error":"connection refused"}],` +
	`"more_pairs":7,"policies":[{"name":"auto","phase":"plan","state":"active","calls":1136,"failures":0,"mean_us":22.9,"p99_us":131},` +
	`{"name":"mine","phase":"place","state":"parked","calls":12,"failures":3,"mean_us":1500,"p99_us":2000}]}`

// statusProxy is an admin address that sends a snapshot again and again.
func statusProxy(t *testing.T, snapshot string) *httptest.Server {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/dashboard/events" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		if token := r.Header.Get("Authorization"); token == "Bearer wrong" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for r.Context().Err() == nil {
			fmt.Fprintf(w, "event: snapshot\ndata: %s\n\n", snapshot)
			http.NewResponseController(w).Flush()
			time.Sleep(20 * time.Millisecond)
		}
	}))
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

func TestStatus(t *testing.T) {
	host := statusProxy(t, deadDecode).Listener.Addr().String()
	code, stdout, stderr := run("status", "--admin", host)
	want := "pdproxy 0.1.0 at " + host + ", " + time.UnixMilli(1796011586144).Format(time.TimeOnly) + `, workers 2
1 workers gave no answer in time
engines   3: 1 unhealthy, 2 ready
pairs     9: 1 broken, 1 ready
policies  2: 1 parked, 1 active
requests  3 running, 2 waiting, 3.5 ended per second: 0.5 broken, 3 ok
speed     first token p50 141 ms, p95 -; 1.2k events/s
          1 retries and 0 refused requests per second

  ENGINE  ROLE     STATE                     FOR  REQS  RUN  WAIT  QUEUED  RESTARTS  MODEL
! d1      decode   unhealthy                 12s     0    -     -       0         0  sim
  d0      decode   ready, circuit half open   1h     3    4     1       0         1  sim
  p0      prefill  ready                      5m     1    1     0    123k         0  a?]0;evil?b

  PREFILL  DECODE  STATE   FAILURES  REASON
! p0       d1      broken         4  d1 is unhealthy
  p0       d0      ready          0
  7 more

  POLICY  PHASE  STATE   CALLS  FAILURES    MEAN     P99
! mine    place  parked     12         3  1.5 ms    2 ms
  auto    plan   active   1.1k         0   23 µs  131 µs
`
	if code != exit.OK || stdout != want || stderr != "" {
		t.Errorf("exit %d, stderr %q, output:\n%swant:\n%s", code, stderr, stdout, want)
	}
}

// TestStatusWritesNothingToTheTerminal: no text of the proxy or of an engine has a character that a
// terminal obeys.
func TestStatusWritesNothingToTheTerminal(t *testing.T) {
	const evil = "x\x1b]0;evil\a\u009b2J\r\ny"
	var s admin.Snapshot
	if err := json.Unmarshal([]byte(deadDecode), &s); err != nil {
		t.Fatal(err)
	}
	s.Version, s.Traffic.Outcomes = evil, map[string]float64{evil: 1}
	s.Engines[0].Name, s.Engines[0].Role, s.Engines[0].State, s.Engines[0].Circuit, s.Engines[0].Model = evil, evil, evil, evil, evil
	s.Pairs[0].Prefill, s.Pairs[0].State, s.Pairs[0].Refused = evil, evil, evil
	s.Policies[0].Name, s.Policies[0].Phase, s.Policies[0].State = evil, evil, evil
	for _, l := range (statusView{problem: evil}).lines(&s, evil) {
		if strings.ContainsFunc(l, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("%q", l)
		}
	}
}

func TestStatusAsJSON(t *testing.T) {
	code, stdout, _ := run("status", "--json", "--admin", statusProxy(t, deadDecode).URL)
	var s admin.Snapshot
	if err := json.Unmarshal([]byte(stdout), &s); err != nil || code != exit.OK || len(s.Engines) != 3 {
		t.Errorf("exit %d, %v, %s", code, err, stdout)
	}
}

// TestStatusFits: the state of a dead engine is on every screen, however small.
func TestStatusFits(t *testing.T) {
	var s admin.Snapshot
	if err := json.Unmarshal([]byte(deadDecode), &s); err != nil {
		t.Fatal(err)
	}
	for i := range 200 { // more engines than any screen has lines
		e := s.Engines[0]
		e.Name, e.Circuit = fmt.Sprintf("e%d", i), "closed"
		s.Engines = append(s.Engines, e)
	}
	for _, size := range [][2]int{{80, 24}, {80, 50}, {40, 24}, {30, 13}, {200, 100}} {
		v := statusView{columns: size[0], rows: size[1], problem: "the proxy sends nothing"}
		lines := v.lines(&s, "h:1")
		text := strings.Join(lines, "\n")
		if len(lines) > size[1] || !strings.Contains(text, "! d1") {
			t.Errorf("%v: %d lines\n%s", size, len(lines), text)
		}
		for _, l := range lines {
			if n := len([]rune(l)); n > size[0] {
				t.Errorf("%v: %d columns: %s", size, n, l)
			}
		}
	}
	v := statusView{columns: 80, color: true}
	if text := strings.Join(v.lines(&s, "h:1"), "\n"); !strings.Contains(text, "\x1b[1;31m! d1 ") {
		t.Errorf("the dead engine is not red: %q", text)
	}
}

func TestStatusRefused(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("wrong\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	proxy := statusProxy(t, deadDecode)
	old := httptest.NewServer(http.NotFoundHandler())
	defer old.Close()
	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"no proxy":    {[]string{"--admin", "127.0.0.1:1"}, "pdproxy: no proxy answers at 127.0.0.1:1: connection refused; --admin names another admin address\n"},
		"wrong token": {[]string{"--admin", proxy.URL, "--token-file", token}, "requires another token than the token that was found; name its file by --token-file or $PDPROXY_ADMIN_TOKEN_FILE"},
		"no file":     {[]string{"--admin", proxy.URL, "--token-file", token + "2"}, "the admin token: open "},
		"no address":  {[]string{"--admin", "http://[::1"}, "--admin: "},
		"no events":   {[]string{"--admin", old.URL}, ": 404 Not Found"},
	} {
		code, stdout, stderr := run(append([]string{"status"}, tt.args...)...)
		if code != exit.Failure || stdout != "" || !strings.Contains(stderr, tt.want) {
			t.Errorf("%s: exit %d, %q, %q", name, code, stdout, stderr)
		}
	}
}

func TestShort(t *testing.T) {
	for n, want := range map[float64]string{0: "0", 3: "3", 0.46: "0.5", 9.96: "10", 999: "999", 999.6: "1.0k", 1234: "1.2k", 12345: "12k", 3.4e6: "3.4M", 2e15: "2000T"} {
		if got := short(n); got != want {
			t.Errorf("%v: %s, want %s", n, got, want)
		}
	}
}
