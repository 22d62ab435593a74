package discovery

import (
	"net/http"
	"regexp"
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/config/importer"
)

// labelled is a picker of llm-d that keeps decode engines with a label of their pods.
const labelled = `apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: disagg-profile-handler}
- {type: prefill-filter}
- {type: decode-filter}
- {type: label-selector-filter, parameters: {matchLabels: {lab.example/tier: gold}}}
- {type: queue-scorer}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: prefill-filter}, {pluginRef: queue-scorer}]
- name: decode
  plugins: [{pluginRef: decode-filter}, {pluginRef: label-selector-filter}, {pluginRef: queue-scorer}]
`

// labels sets labels of the pod; nil removes one.
func (p *pod) labels(labels fields) {
	p.c.t.Helper()
	p.c.do(http.MethodPatch, podsPath+"/"+p.name, fields{"metadata": fields{"labels": labels}})
}

// TestPodLabels: the configuration that pdproxy import makes of a picker of llm-d chooses engines by the
// labels of their pods, also when the labels change. A label that no scorer reads changes nothing.
func TestPodLabels(t *testing.T) {
	imported, err := importer.LLMD(importer.File{Name: "picker.yaml", Text: []byte(labelled)})
	if err != nil {
		t.Fatal(err)
	}
	from, err := config.Parse([]byte(regexp.MustCompile(`(?m)^#(\S)`).ReplaceAllString(imported.TOML, "$1")))
	if err != nil {
		t.Fatalf("%v\n%s", err, imported.TOML)
	}
	if got := from.Discovery.Kubernetes.Labels; !slices.Equal(got, []string{"lab.example/tier"}) {
		t.Fatalf("labels %q", got)
	}
	c := newCluster(t)
	c.run("p0", "prefill", 0)
	d0, d1 := c.run("d0", "decode", 0), c.run("d1", "decode", 0)
	n := startNodeWith(t, func(cfg *config.Config) {
		cfg.Policy.Place, cfg.Scores = from.Policy.Place, from.Scores
		c.configure(&cfg.Discovery)
		cfg.Discovery.Kubernetes.Labels = from.Discovery.Kubernetes.Labels
	})
	for _, name := range []string{"p0", "d0", "d1"} {
		n.is(podName(name), "ready")
	}
	tier := func(p *pod, value any) {
		t.Helper()
		p.labels(fields{"lab.example/tier": value})
		want, _ := value.(string)
		testbed.Eventually(t, p.name+" has its label", func() bool {
			rows := n.rows()
			i := slices.IndexFunc(rows, func(r row) bool { return r.Name == podName(p.name) && r.State == "ready" })
			return i >= 0 && rows[i].Labels["lab.example/tier"] == want
		})
	}
	uses := func(name string) {
		t.Helper()
		for range 10 {
			if _, d := n.ask(); d != podName(name) {
				t.Errorf("served by %q, want %q", d, podName(name))
			}
		}
	}
	n.ask() // no engine has the label, so the filter removes none
	tier(d1, "gold")
	uses("d1")
	d0.labels(fields{"lab.example/other": "x"})
	tier(d1, "silver")
	tier(d1, "gold")
	uses("d1")
	if n.log.contains(`msg="engine is draining" engine=` + podName("d0")) {
		t.Error("a label that is not listed replaced the engine")
	}
	tier(d0, "gold")
	tier(d1, nil)
	uses("d0")
}
