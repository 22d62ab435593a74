package surface

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
)

const exposition = `# HELP hits Hits of all kinds.
# TYPE hits counter
hits{kind="a",by="x"} 3
hits{kind="b",by="x"} 4.5
hits_total{kind="a"} 100
alone 7
`

func TestMetric(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/rows" {
			io.WriteString(w, `[1, 2]`)
			return
		}
		io.WriteString(w, exposition)
	}))
	defer srv.Close()
	a := Admin{srv.Client(), srv.URL}
	for _, tt := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"hits", nil, 7.5},
		{"hits", []string{`kind="a"`}, 3},
		{"hits", []string{`kind="a"`, `by="y"`}, 0},
		{"hits_total", nil, 100},
		{"alone", nil, 7},
		{"hit", nil, 0},
	} {
		if got, err := a.Metric(tt.name, tt.labels...); got != tt.want || err != nil {
			t.Errorf("%s, %v: a.Metric(tt.name, tt.labels...) = %v, %v, want %v, nil", tt.name, tt.labels, got, err, tt.want)
		}
	}
	var rows []int
	if err := a.Get("/rows", &rows); err != nil || len(rows) != 2 {
		t.Errorf(`%v: a.Get("/rows", &rows) = %v, want nil`, rows, err)
	}
	if err := a.Get("/metrics", &rows); err == nil {
		t.Error("the exposition is JSON")
	}
}
