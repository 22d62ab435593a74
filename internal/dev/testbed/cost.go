package testbed

import (
	_ "embed"
	"math"
	"strconv"
	"strings"
	"testing"
)

//go:embed costs.txt
var costs string

// Cost compares a rounded cost with its number in costs.txt. The test fails if the cost is above its
// number. The test also fails if the cost is more than 5 % below: then the number has to be
// lowered, so that no later change uses up the gain unnoticed.
func Cost(t testing.TB, name string, got float64) {
	t.Helper()
	got = math.Round(got)
	for line := range strings.Lines(costs) {
		number, what, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.TrimSpace(what) != name {
			continue
		}
		most, err := strconv.ParseFloat(number, 64)
		switch {
		case err != nil:
			t.Fatalf("costs.txt: %q: %v", line, err)
		case got > most:
			t.Errorf("%s: %.0f, the number in internal/dev/testbed/costs.txt is %s", name, got, number)
		case got < 0.95*most:
			t.Errorf("%s: %.0f is less than the number in internal/dev/testbed/costs.txt, %s: lower the number", name, got, number)
		default:
			t.Logf("%s: %.0f of %s", name, got, number)
		}
		return
	}
	t.Errorf("%s: %.0f has no number in internal/dev/testbed/costs.txt", name, got)
}
