package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// TestOperatorsNamesAreListed: the metrics page lists each metric that the dashboard, the
// alert rules and the ScaledObjects name. `make test-operations` checks that the series
// exist.
func TestOperatorsNamesAreListed(t *testing.T) {
	page := metricsPage(t)
	named, found := regexp.MustCompile(`\bpdproxy_[a-z_]+`), 0
	for _, pattern := range []string{"grafana/*.json", "prometheus/*.yaml", "keda/*.yaml"} {
		files, err := filepath.Glob(filepath.Join(root, "deploy", pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v, %d files", pattern, err, len(files))
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range named.FindAllString(string(text), -1) {
				found++
				for _, suffix := range telemetry.HistogramSuffixes {
					if base, ok := strings.CutSuffix(name, suffix); ok && strings.Contains(page, "### "+base+"\n") {
						name = base
					}
				}
				if !strings.Contains(page, "### "+name+"\n") {
					t.Errorf("%s names %s, which is not a metric", filepath.Base(file), name)
				}
			}
		}
	}
	if found < 50 {
		t.Errorf("found only %d names", found)
	}
}
