package docs

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// TestMetricNames: the table of grafana.md has the names of other endpoint pickers that the program knows.
func TestMetricNames(t *testing.T) {
	const page = "../../docs/howto/grafana.md"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	code := func(name string) string {
		if name == "" {
			return ""
		}
		return "`" + name + "`"
	}
	table := "| Inference Extension | llm-d | pdproxy | remark |\n| --- | --- | --- | --- |\n"
	for _, row := range telemetry.ExtensionMetrics {
		ours := regexp.MustCompile(`pdproxy_\w+`).ReplaceAllString(row.Ours, "`$0`")
		if ours == "" {
			ours = "none"
		}
		table += "| " + code(row.Extension) + " | " + code(row.LLMD) + " | " + ours + " | " + row.Note + " |\n"
	}
	at := regexp.MustCompile(`(?m)^\| Inference Extension \|.*\n(\|.*\n)*`)
	want := at.ReplaceAllString(string(text), strings.ReplaceAll(table, "$", "$$"))
	if want == string(text) {
		return
	}
	if !*update {
		t.Fatalf("%s differs from the table of the program: run make reference", page)
	}
	if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
		t.Fatal(err)
	}
}
