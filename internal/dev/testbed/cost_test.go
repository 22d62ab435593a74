package testbed

import (
	"fmt"
	"strings"
	"testing"
)

// outcome keeps the messages of a test instead of failing.
type outcome struct {
	testing.TB
	errors []string
}

func (*outcome) Helper()             {}
func (*outcome) Logf(string, ...any) {}
func (o *outcome) Errorf(format string, args ...any) {
	o.errors = append(o.errors, fmt.Sprintf(format, args...))
}

func TestCost(t *testing.T) {
	old := costs
	t.Cleanup(func() { costs = old })
	costs = "# comment\n 100 request: allocations\n0 event: allocations\n"
	for _, tt := range []struct {
		name string
		got  float64
		want string // part of the error; "": none
	}{
		{"request: allocations", 100.4, ""},
		{"request: allocations", 95, ""},
		{"request: allocations", 100.6, "101, the number"},
		{"request: allocations", 94, "lower the number"},
		{"event: allocations", 0.4, ""},
		{"event: allocations", 1, "1, the number"},
		{"event", 0, "has no number"},
	} {
		o := &outcome{TB: t}
		Cost(o, tt.name, tt.got)
		if text := strings.Join(o.errors, "\n"); (tt.want == "") != (text == "") || !strings.Contains(text, tt.want) {
			t.Errorf("%s %v: got %q, want %q", tt.name, tt.got, text, tt.want)
		}
	}
}

// TestCostsHaveNames: each line of costs.txt that is no comment has a number and a name of its own.
func TestCostsHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for line := range strings.Lines(costs) {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		var number int
		_, name, _ := strings.Cut(line, " ")
		if _, err := fmt.Sscan(line, &number); err != nil || !strings.Contains(name, ": ") || seen[name] {
			t.Errorf("%q: %v", line, err)
		}
		seen[name] = true
	}
}
