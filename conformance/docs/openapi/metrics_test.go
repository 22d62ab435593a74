package openapi

import (
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	listed = regexp.MustCompile("(?m)^### (pdproxy_\\w+)\n\n(.*)\n\nKind: (\\w+). Labels: (.*)\\.$")
	sample = regexp.MustCompile(`^(pdproxy_\w+?)(?:_bucket|_sum|_count)?(?:\{(.*)\})? `)
	label  = regexp.MustCompile(`(\w+)="(?:[^"\\]|\\.)*"`)
)

// TestMetrics compares the kind, the text and the labels of each metric that a fleet with
// HTTP/3 shows with the page.
func TestMetrics(t *testing.T) {
	page, err := os.ReadFile("../../../docs/reference/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]string{} // help, kind, labels
	for _, m := range listed.FindAllStringSubmatch(string(page), -1) {
		want[m[1]] = m[2:]
	}
	p := run(t, "https", "http3 = \""+address(t)+"\"\n[server.tls]\nself_signed = true\n[fleet]\nworkers = 1\n")
	r, err := http.NewRequest("GET", p.admin+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+p.token)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	families := 0
	for line := range strings.Lines(string(text)) {
		words := strings.SplitN(strings.TrimSpace(line), " ", 4)
		switch {
		case len(words) == 4 && words[0] == "#" && strings.HasPrefix(words[2], "pdproxy_"):
			m, ok := want[words[2]]
			if !ok {
				t.Errorf("%s is not listed", words[2])
			} else if words[1] == "HELP" && words[3] != m[0] || words[1] == "TYPE" && words[3] != m[1] {
				t.Errorf("the page differs from %s", line)
			}
			families++
		case strings.HasPrefix(line, "pdproxy_"):
			checkLabels(t, want, line)
		}
	}
	if families < 40 {
		t.Errorf("found only %d lines about families", families)
	}
}

func checkLabels(t *testing.T, want map[string][]string, line string) {
	t.Helper()
	m := sample.FindStringSubmatch(line)
	if m == nil {
		t.Errorf("%q has another form", line)
		return
	}
	page := want[strings.TrimSpace(strings.SplitN(strings.SplitN(line, "{", 2)[0], " ", 2)[0])]
	if page == nil {
		page = want[m[1]]
	}
	for _, l := range label.FindAllStringSubmatch(m[2], -1) {
		if page == nil || !slices.Contains([]string{"le", "process"}, l[1]) && !strings.Contains(page[2], "`"+l[1]+"`") {
			t.Errorf("the label %s of %s is not listed", l[1], line)
		}
	}
}
