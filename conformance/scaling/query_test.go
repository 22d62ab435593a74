package scaling

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
)

// metrics are the series of GET /metrics.
type metrics map[string]*dto.MetricFamily

var (
	aggregate = regexp.MustCompile(`^(sum|max)\(([^()]+)\)$`)
	selector  = regexp.MustCompile(`^(\w+)\{([^{}]*)\}$`)
	matcher   = regexp.MustCompile(`^(\w+)="([^"]*)"$`)
)

// value evaluates a query of a ScaledObject, as Prometheus does: a sum of terms, where each
// term is the sum or the maximum of one metric or of the product of metrics with the same
// labels. A term over no series has no value, and KEDA then takes 0 (ignoreNullValues). The forms that the queries do
// not use are errors: make test-operations evaluates the queries with a real Prometheus.
func (m metrics) value(query string) (total float64, err error) {
	found := true
	for term := range strings.SplitSeq(strings.Join(strings.Fields(query), " "), " + ") {
		inner := aggregate.FindStringSubmatch(term)
		if inner == nil {
			return 0, fmt.Errorf("%q is neither a sum nor a maximum", term)
		}
		var product map[string]float64
		for n, factor := range strings.Split(inner[2], " * ") {
			series, err := m.series(factor)
			if err != nil {
				return 0, err
			}
			if n == 0 {
				product = series
				continue
			}
			maps.DeleteFunc(product, func(labels string, _ float64) bool { _, ok := series[labels]; return !ok })
			for labels := range product {
				product[labels] *= series[labels]
			}
		}
		found = found && len(product) > 0
		values := slices.Collect(maps.Values(product))
		switch {
		case len(values) == 0:
		case inner[1] == "max":
			total += slices.Max(values)
		default:
			for _, v := range values {
				total += v
			}
		}
	}
	if !found {
		return 0, nil
	}
	return total, nil
}

// series returns the values that a selector matches, by all their labels.
func (m metrics) series(text string) (map[string]float64, error) {
	parts := selector.FindStringSubmatch(text)
	if parts == nil {
		return nil, fmt.Errorf("%q is not a selector", text)
	}
	want := map[string]string{}
	for label := range strings.SplitSeq(parts[2], ",") {
		pair := matcher.FindStringSubmatch(label)
		if pair == nil {
			return nil, fmt.Errorf("%q is not a matcher of a label", label)
		}
		want[pair[1]] = pair[2]
	}
	found := map[string]float64{}
	for _, s := range m[parts[1]].GetMetric() {
		have := map[string]string{}
		for _, l := range s.GetLabel() {
			have[l.GetName()] = l.GetValue()
		}
		matches := true
		for name, value := range want {
			matches = matches && have[name] == value
		}
		if matches {
			found[fmt.Sprint(have)] = s.GetGauge().GetValue() // fmt sorts the labels
		}
	}
	return found, nil
}

func TestQuery(t *testing.T) {
	m := parse(t, []byte(`# TYPE a gauge
a{model="m",role="prefill"} 3
a{model="m",role="decode"} 5
a{model="n",role="prefill"} 7
# TYPE b gauge
b{model="m",role="prefill"} 10
b{model="m",role="both"} 100
`))
	for _, tt := range []struct {
		query string
		want  float64
		err   bool
	}{
		{`sum(a{model="m"})`, 8, false},
		{`sum(a{role="prefill",model="m"})`, 3, false},
		{"\n sum(a{model=\"m\"} * b{model=\"m\"})\n", 30, false},
		{`sum(a{model="m"}) + sum(b{model="m"})`, 118, false},
		{`sum(a{model="m"}) + sum(b{model="n"})`, 0, false},
		{`sum(c{model="m"})`, 0, false},
		{`a{model="m"}`, 0, true},
		{`max(a{model="m"})`, 5, false},
		{`max(a{model="m"} * b{model="m"})`, 30, false},
		{`max(c{model="m"})`, 0, false},
		{`min(a{model="m"})`, 0, true},
		{`sum(a)`, 0, true},
		{`sum(a{model=~"m"})`, 0, true},
		{`sum(a{model="m"}) - sum(b{model="m"})`, 0, true},
	} {
		if got, err := m.value(tt.query); got != tt.want || (err != nil) != tt.err {
			t.Errorf("%s: got %v, %v, want %v", tt.query, got, err, tt.want)
		}
	}
}
