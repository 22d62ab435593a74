package docs

import (
	"context"
	"fmt"
	"go/ast"
	"io/fs"
	"log/slog"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// metric is the description of a family of metrics in the program's output.
type metric struct {
	kind, help string
	labels     []string
}

// description is the form of prometheus.Desc.String, which is the only access to a Desc.
var description = regexp.MustCompile(`^Desc\{fqName: ("(?:[^"\\]|\\.)*"), help: ("(?:[^"\\]|\\.)*"), (?:unit: "[^"]*", )?constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)

// describe adds the families that a collector describes.
func describe(t testing.TB, found map[string]metric, c interface {
	Describe(chan<- *prometheus.Desc)
}) {
	ch := make(chan *prometheus.Desc)
	go func() {
		defer close(ch)
		c.Describe(ch)
	}()
	for desc := range ch {
		m := description.FindStringSubmatch(desc.String())
		if m == nil {
			t.Fatalf("%s has another form", desc)
		}
		name, _ := strconv.Unquote(m[1]) // the expression matches only quoted texts
		help, _ := strconv.Unquote(m[2])
		if strings.HasPrefix(name, "pdproxy_") {
			found[name] = metric{help: help, labels: strings.FieldsFunc(m[4], func(r rune) bool { return r == ',' })}
		}
	}
}

// kinds is a Registerer that notes the kind of each family.
type kinds struct {
	prometheus.Registerer
	t     testing.TB
	named map[string]string
}

func (k kinds) Register(c prometheus.Collector) error {
	k.MustRegister(c)
	return nil
}

func (k kinds) MustRegister(list ...prometheus.Collector) {
	for _, c := range list {
		kind := ""
		switch c.(type) { // a vector may have no sample
		case *prometheus.CounterVec:
			kind = "counter"
		case *prometheus.HistogramVec:
			kind = "histogram"
		case *prometheus.GaugeVec:
			kind = "gauge"
		default:
			kind = sampleKind(k.t, c)
		}
		families := map[string]metric{}
		describe(k.t, families, c)
		for name := range families {
			k.named[name] = kind
		}
	}
}

// sampleKind returns the kind of a sample of c.
func sampleKind(t testing.TB, c prometheus.Collector) string {
	reg := prometheus.NewRegistry()
	reg.MustRegister(c)
	families, err := reg.Gather()
	if err != nil || len(families) == 0 {
		t.Errorf("%T has no sample: %v", c, err)
		return ""
	}
	return strings.ToLower(families[0].GetType().String())
}

// readMetrics returns the families of a process, of its package telemetry with their
// kinds, and those that a coordinator adds.
func readMetrics(t testing.TB) map[string]metric {
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen, cfg.Policy.Runtime = "127.0.0.1:0", "", "native"
	n, err := node.New(&cfg, slog.New(slog.DiscardHandler), node.Options{})
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]metric{}
	describe(t, found, n)
	ended, end := context.WithCancel(context.Background())
	end()
	if err := n.Serve(ended); err != nil { // closes the sockets
		t.Error(err)
	}
	named := kinds{t: t, named: map[string]string{}}
	telemetry.New(named)
	for name, m := range found {
		switch kind, ok := named.named[name]; {
		case ok:
			m.kind = kind
		case strings.HasSuffix(name, "_total"):
			m.kind = "counter"
		default:
			m.kind = "gauge" // TestLive compares it with a running proxy
		}
		found[name] = m
	}
	coordinator, err := telemetry.NewFleet(prometheus.NewRegistry(), func() []telemetry.Process { return nil }).Gather()
	if err != nil {
		t.Error(err)
	}
	maps.Copy(found, gathered(coordinator))
	return found
}

// gathered describes gathered families.
func gathered(families []*dto.MetricFamily) map[string]metric {
	found := map[string]metric{}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "pdproxy_") {
			continue
		}
		m := metric{kind: strings.ToLower(f.GetType().String()), help: f.GetHelp()}
		for _, label := range f.GetMetric()[0].GetLabel() {
			m.labels = append(m.labels, label.GetName())
		}
		found[f.GetName()] = m
	}
	return found
}

// metricsPage lists the metrics by name.
func metricsPage(t testing.TB) string {
	var b strings.Builder
	b.WriteString(notice + `# Metrics

` + "`GET /metrics`" + ` on the [admin address](../howto/admin.md) answers in the format of Prometheus. [Grafana](../howto/grafana.md) shows how to collect them. Filters add metrics of their own with the prefix ` + "`pdproxy_plugin_`" + `. The metrics of Go's runtime and of the process have the usual names (` + "`go_*`, `process_*`" + `). In a fleet, a gauge of one process has the label ` + "`process`" + ` in addition.
`)
	metrics := readMetrics(t)
	for _, name := range slices.Sorted(maps.Keys(metrics)) {
		m := metrics[name]
		labels := "none"
		if len(m.labels) > 0 {
			labels = "`" + strings.Join(m.labels, "`, `") + "`"
		}
		fmt.Fprintf(&b, "\n### %s\n\n%s\n\nKind: %s. Labels: %s.\n", name, m.help, m.kind, labels)
	}
	return b.String()
}

// TestEveryMetricIsListed: each text of the program that looks like the name of a metric has
// a heading, so that no metric can hide in a registry that the page does not read.
func TestEveryMetricIsListed(t *testing.T) {
	page := metricsPage(t)
	names := 0
	for _, top := range []string{"cmd", "plugins", "proxy", "abi/host"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() || d.Name() == "testdata" {
				return err
			}
			for _, file := range parseDir(t, path) {
				ast.Inspect(file, func(n ast.Node) bool {
					l, ok := n.(*ast.BasicLit)
					if !ok {
						return true
					}
					name := literal(l)
					if strings.HasPrefix(name, "pdproxy_") && !strings.HasPrefix(name, "pdproxy_v1_") && !strings.HasSuffix(name, "_") {
						names++
						if !strings.Contains(page, "### "+name+"\n") {
							t.Errorf("%s is not listed", name)
						}
					}
					return true
				})
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if names < 30 {
		t.Errorf("found only %d metrics", names)
	}
}
