package replay

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"
)

func TestReadTrace(t *testing.T) {
	tr := mooncake(t)
	if len(tr.Requests) != 300 || tr.Blocks != 8490 || tr.Uneven != 0 {
		t.Errorf("%d requests, %d blocks, %d uneven", len(tr.Requests), tr.Blocks, tr.Uneven)
	}
	if want := 676.0 / 8490; tr.IdealHitRatio != want {
		t.Errorf("ideal hit ratio %v, want %v", tr.IdealHitRatio, want)
	}
	if last := tr.Requests[299].Arrival; last != 102*time.Second {
		t.Errorf("the last request arrives at %v", last)
	}
}

func TestReadTraceForms(t *testing.T) {
	for name, tt := range map[string]struct {
		text     string
		requests int
		ideal    float64
		uneven   int
		err      string
	}{
		"recording": {
			`{"timestamp":0.5,"input_length":1100,"output_length":0,"hash_ids":[18446744073709551615,2],"conversation":"c"}` + "\n\n" +
				`{"timestamp":1,"input_length":1600,"output_length":3,"hash_ids":[18446744073709551615,2,3]}`, 2, 2. / 5, 0, "",
		},
		"ids of an earlier line only": {`{"timestamp":0,"input_length":1000,"output_length":1,"hash_ids":[1,1]}`, 1, 0, 0, ""},
		"a hole is a hit, not a prefix": {
			`{"timestamp":0,"input_length":1000,"output_length":1,"hash_ids":[1,2]}
{"timestamp":0,"input_length":1000,"output_length":1,"hash_ids":[3,2]}`, 2, 1. / 4, 0, "",
		},
		"other block size": {`{"timestamp":0,"input_length":5000,"output_length":1,"hash_ids":[1,2]}`, 1, 0, 1, ""},
		"no blocks":        {`{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[]}`, 1, 0, 0, ""},
		"empty":            {"", 0, 0, 0, "no requests"},
		"no JSON":          {"\n{", 0, 0, 0, "line 2"},
		"no tokens":        {`{"timestamp":0,"output_length":1,"hash_ids":[]}`, 0, 0, 0, "line 1"},
		"negative time":    {`{"timestamp":-1,"input_length":5,"output_length":1,"hash_ids":[]}`, 0, 0, 0, "line 1"},
	} {
		t.Run(name, func(t *testing.T) {
			tr, err := ReadTrace("t", strings.NewReader(tt.text), 512)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("got error %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if len(tr.Requests) != tt.requests || tr.IdealHitRatio != tt.ideal || tr.Uneven != tt.uneven {
				t.Errorf("%d requests, ideal %v, %d uneven", len(tr.Requests), tr.IdealHitRatio, tr.Uneven)
			}
		})
	}
}

// Requests are played by arrival, and the ideal is counted by line.
func TestReadTraceSorts(t *testing.T) {
	tr, err := ReadTrace("t", strings.NewReader(`{"timestamp":9,"input_length":512,"output_length":1,"hash_ids":[1]}
{"timestamp":3,"input_length":512,"output_length":2,"hash_ids":[1]}`), 512)
	if err != nil {
		t.Fatal(err)
	}
	if tr.Requests[0].OutputLength != 2 || tr.Requests[0].Ideal != 1 || tr.Requests[1].Ideal != 0 {
		t.Errorf("%+v", tr.Requests)
	}
}

func FuzzReadTrace(f *testing.F) {
	text, err := os.ReadFile("testdata/mooncake_300.jsonl")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text[:bytes.IndexByte(text, '\n')], 512)
	f.Add([]byte(`{"timestamp":1e300,"input_length":9223372036854775807,"output_length":1,"hash_ids":[1]}`), 1)
	f.Fuzz(func(t *testing.T, text []byte, block int) {
		block = max(1, block)
		tr, err := ReadTrace("t", bytes.NewReader(text), block)
		if err != nil {
			return
		}
		for i := range tr.Requests {
			q := &tr.Requests[i]
			if q.Ideal > len(q.HashIDs) || q.Arrival < 0 || q.whole(block) > len(q.HashIDs) {
				t.Errorf("&tr.Requests[i] = %+v", q)
			}
		}
	})
}
