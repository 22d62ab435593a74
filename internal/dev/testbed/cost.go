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

// costsFile is the path of costs in the repository.
const costsFile = "internal/dev/testbed/costs.txt"

// Cost compares a rounded cost with its number in costs.txt. The test fails if the cost is above its
// number. The test also fails if the cost is more than 5 % below its number. Then lower the number,
// so that no later change uses up the gain unnoticed.
func Cost(t testing.TB, name string, got float64) {
	t.Helper()
	got = max(0, math.Round(got))
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
			t.Errorf("%s: got %.0f, more than %s in %s", name, got, number, costsFile)
		case got < 0.95*most:
			t.Errorf("%s: got %.0f, more than 5 %% below %s in %s: lower the number", name, got, number, costsFile)
		default:
			t.Logf("%s: %.0f of %s", name, got, number)
		}
		return
	}
	t.Errorf("%s: got %.0f, but %s has no number for this cost", name, got, costsFile)
}
