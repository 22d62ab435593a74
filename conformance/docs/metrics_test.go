package docs

import (
	"fmt"
	"go/ast"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// metric is what the program says about a metric where it creates it.
type metric struct {
	kind, help string
	labels     []string
}

// productFiles parses all packages of the product: cmd, plugins, proxy and abi/host.
func productFiles(t testing.TB) []*ast.File {
	var files []*ast.File
	for _, top := range []string{"cmd", "plugins", "proxy", "abi/host"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() && d.Name() != "testdata" {
				files = append(files, parseDir(t, path)...)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// literal returns the value of a string literal, or "".
func literal(e ast.Expr) string {
	l, ok := e.(*ast.BasicLit)
	if !ok || l.Kind != token.STRING {
		return ""
	}
	s, err := strconv.Unquote(l.Value)
	if err != nil {
		return ""
	}
	return s
}

// literals returns the string literals of expressions and of the lists in them.
func literals(list []ast.Expr) []string {
	var found []string
	for _, e := range list {
		if c, ok := e.(*ast.CompositeLit); ok {
			found = append(found, literals(c.Elts)...)
		} else if s := literal(e); s != "" {
			found = append(found, s)
		}
	}
	return found
}

// readMetrics finds the places where the program creates its metrics: calls whose first
// two arguments are name and help, and structs of options with Name and Help.
func readMetrics(t testing.TB) map[string]metric {
	found := map[string]metric{}
	for _, file := range productFiles(t) {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CallExpr:
				if len(n.Args) < 2 || !strings.HasPrefix(literal(n.Args[0]), "pdproxy_") || literal(n.Args[1]) == "" {
					return true
				}
				found[literal(n.Args[0])] = metric{kind: nameOf(n.Fun), help: literal(n.Args[1]), labels: literals(n.Args[2:])}
			case *ast.CompositeLit:
				var name, help string
				for _, e := range n.Elts {
					if kv, ok := e.(*ast.KeyValueExpr); ok {
						switch nameOf(kv.Key) {
						case "Name":
							name = literal(kv.Value)
						case "Help":
							help = literal(kv.Value)
						}
					}
				}
				if strings.HasPrefix(name, "pdproxy_") {
					found[name] = metric{kind: nameOf(n.Type), help: help, labels: optionLabels(file, n)}
				}
			}
			return true
		})
	}
	return found
}

// optionLabels returns the labels beside the options of a metric: the second argument of
// the call that has the options as its first.
func optionLabels(file *ast.File, options *ast.CompositeLit) []string {
	var labels []string
	ast.Inspect(file, func(n ast.Node) bool {
		if c, ok := n.(*ast.CallExpr); ok && len(c.Args) > 1 && c.Args[0] == ast.Expr(options) {
			labels = literals(c.Args[1:])
		}
		return true
	})
	return labels
}

func nameOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}

// kindOfMetric returns the kind that Prometheus shows.
func kindOfMetric(name string, m metric) string {
	kind := strings.ToLower(m.kind)
	switch {
	case strings.HasSuffix(name, "_total"):
		return "counter"
	case strings.Contains(kind, "histogram") || kind == "plain":
		return "histogram"
	}
	return "gauge"
}

// metricsPage lists the metrics by name.
func metricsPage(t testing.TB) string {
	var b strings.Builder
	b.WriteString(notice + `# Metrics

` + "`GET /metrics`" + ` on the admin address answers in the format of Prometheus. Filters add metrics of their own with the prefix ` + "`pdproxy_plugin_`" + `. The metrics of Go's runtime and of the process have the usual names (` + "`go_*`, `process_*`" + `).
`)
	metrics := readMetrics(t)
	for _, name := range slices.Sorted(maps.Keys(metrics)) {
		m := metrics[name]
		labels := "none"
		if len(m.labels) > 0 {
			labels = "`" + strings.Join(m.labels, "`, `") + "`"
		}
		fmt.Fprintf(&b, "\n### %s\n\n%s\n\nKind: %s. Labels: %s.\n", name, m.help, kindOfMetric(name, m), labels)
	}
	return b.String()
}

// TestEveryMetricIsListed: each text of the program that is the name of a metric has a
// heading.
func TestEveryMetricIsListed(t *testing.T) {
	page := metricsPage(t)
	names := 0
	for _, file := range productFiles(t) {
		ast.Inspect(file, func(n ast.Node) bool {
			if l, ok := n.(*ast.BasicLit); ok && strings.HasPrefix(literal(l), "pdproxy_") && !strings.HasPrefix(literal(l), "pdproxy_v1_") && !strings.HasSuffix(literal(l), "_") {
				names++
				if !strings.Contains(page, "### "+literal(l)+"\n") {
					t.Errorf("%s is not listed", literal(l))
				}
			}
			return true
		})
	}
	if names < 30 {
		t.Errorf("found only %d metrics", names)
	}
}
