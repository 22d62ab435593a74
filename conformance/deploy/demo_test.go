package deploy

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

var (
	demoPage    = regexp.MustCompile(`page for the browser:\n  (http://\S+)/\n`)
	demoPublic  = regexp.MustCompile(`pdproxy serves (http://\S+) with`)
	demoAnswers = regexp.MustCompile(`(?m)^pdproxy_exchanges_total\{(.*)\} (\S+)$`)
	demoTokens  = regexp.MustCompile(`(?m)^pdproxy_time_to_first_token_seconds_count\{.*\} [1-9]`)
)

// TestDemoTraffic: `pdproxy demo --traffic` prints the address of the page, and its users'
// requests are answered. SIGTERM ends the program and everything that it has started.
func TestDemoTraffic(t *testing.T) {
	p := start(t, nil, pdproxy, "demo", "--traffic", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
	eventually(t, "the demo prints its addresses", func() bool { return demoPage.MatchString(p.out.String()) })
	admin, public := demoPage.FindStringSubmatch(p.out.String())[1], demoPublic.FindStringSubmatch(p.out.String())[1]

	if page := fetch(t, admin+"/", "text/html"); !strings.Contains(page, "<title>pdproxy") {
		t.Errorf("the page: %.200s", page)
	}
	eventually(t, "the traffic is counted", func() bool {
		metrics := fetch(t, admin+"/metrics", "")
		ok := 0.0
		for _, m := range demoAnswers.FindAllStringSubmatch(metrics, -1) {
			n, err := strconv.ParseFloat(m[2], 64)
			switch {
			case err != nil:
				t.Fatal(err)
			case strings.Contains(m[1], `outcome="ok"`):
				ok += n
			case n > 0:
				t.Fatalf("a request of the demo fails: %s", m[0])
			}
		}
		return ok >= 6 && demoTokens.MatchString(metrics)
	})
	var engines []struct{ Name, URL string }
	if err := json.Unmarshal([]byte(fetch(t, admin+"/v1/engines", "")), &engines); err != nil || len(engines) != 4 {
		t.Fatalf("%d engines, %v", len(engines), err)
	}

	p.signal(syscall.SIGTERM)
	if status := p.ended(); status != 0 {
		t.Errorf("exit status %d", status)
	}
	if err := syscall.Kill(-p.cmd.Process.Pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("processes of the demo remain: %v", err)
	}
	closed := []string{admin, public}
	for _, e := range engines {
		closed = append(closed, e.URL)
	}
	for _, address := range closed {
		u, err := url.Parse(address)
		if err != nil {
			t.Fatal(err)
		}
		if c, err := net.Dial("tcp", u.Host); err == nil {
			c.Close()
			t.Errorf("%s still accepts connections", address)
		}
	}
}

// TestDemoChaos: `pdproxy demo --chaos` reports each killed engine and what became of its streams.
// After Ctrl-C, every text is right and nothing is pinned.
func TestDemoChaos(t *testing.T) {
	type report struct {
		Killed           string
		Kills, Streams   int
		Continued, Wrong int
		Pinned           int `json:"pinned_blocks"`
		Ended            map[string]int
		Gap              struct{ P50, P99 float64 } `json:"gap_ms"`
	}
	for connector, reason := range map[string]string{"vllm-nixl": "", "sglang": "", "trtllm": "no_ids"} {
		t.Run(connector, func(t *testing.T) {
			t.Parallel()
			p := start(t, nil, pdproxy, "demo", "--chaos", "--json", "--connector", connector, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
			reports := func() (list []report) {
				d := json.NewDecoder(strings.NewReader(p.out.String()))
				for {
					var r report
					if d.Decode(&r) != nil {
						return list
					}
					list = append(list, r)
				}
			}
			eventually(t, "each decode engine is killed", func() bool { return len(reports()) >= 4 }) // the first one has the addresses
			p.signal(syscall.SIGINT)
			if status := p.ended(); status != 0 {
				t.Errorf("exit status %d", status)
			}
			all := reports()
			sum := all[len(all)-1]
			killed := map[string]bool{}
			broken, continued := 0, 0
			for _, r := range all[1 : len(all)-1] {
				killed[r.Killed] = true
				continued += r.Continued
				for why, n := range r.Ended {
					broken += n
					if why != reason {
						t.Errorf("%d streams of %s ended: %s", n, r.Killed, why)
					}
				}
				if r.Streams != r.Continued+r.Ended[reason] || r.Continued > 0 && !(r.Gap.P50 > 0 && r.Gap.P99 >= r.Gap.P50) {
					t.Errorf("got %+v", r)
				}
			}
			if len(killed) != 2 || sum.Kills != len(all)-2 || sum.Continued != continued || sum.Ended[reason] != broken || sum.Wrong+sum.Pinned != 0 || sum.Streams <= broken {
				t.Errorf("killed %v, result %+v", killed, sum)
			}
			if reason == "" && continued == 0 || reason != "" && (broken == 0 || continued > 0) {
				t.Errorf("%d streams continued, %d ended", continued, broken)
			}
		})
	}
}

// fetch returns the body of a GET.
func fetch(t *testing.T, url, accept string) string {
	t.Helper()
	r, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Accept", accept)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("GET %s: %d, %v", url, resp.StatusCode, err)
	}
	return string(body)
}
