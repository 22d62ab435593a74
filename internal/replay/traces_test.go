package replay

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"os"
	"testing"
	"time"
)

// wholeTrace is the trace of Mooncake's conversations, on which parameters are tuned.
func wholeTrace(t testing.TB) *Trace { return publicTrace(t, "mooncake") }

// publicTrace reads a trace of testdata, whose README has the form.
func publicTrace(t testing.TB, name string) *Trace {
	t.Helper()
	f, err := os.Open("testdata/" + name + ".gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var w traceWriter
	own := uint64(1) << 32 // the next id of a block that no other prompt has
	for lines := bufio.NewScanner(z); lines.Scan(); {
		var (
			at            float64
			input, output int
			runs          [][2]uint64
			ids           []uint64
		)
		if err := json.Unmarshal(lines.Bytes(), &[]any{&at, &input, &output, &runs}); err != nil {
			t.Fatal(err)
		}
		if len(runs) == 0 {
			blocks := uint64(input+511) / 512
			runs = [][2]uint64{{own, blocks}}
			own += blocks
		}
		for _, run := range runs {
			for i := range run[1] {
				ids = append(ids, run[0]+i)
			}
		}
		w.add(time.Duration(at*float64(time.Millisecond)), input, output, ids)
	}
	tr := w.trace(name, 512)
	want := map[string]int{"mooncake": 12031, "mooncake_synthetic": 3993, "azure_code": 8819, "azure_conv": 19366}
	if len(tr.Requests) != want[name] {
		t.Fatalf("%s: got %d requests, want %d", name, len(tr.Requests), want[name])
	}
	return tr
}
