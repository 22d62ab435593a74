package replay

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies"
)

// native is a compiled-in policy that gets all facts.
type native struct{ place policies.Placer }

func (n native) Place(f *abi.PlaceFacts) (abi.PlaceDecision, bool) { return n.place(f), true }
func (native) Needs() abi.Needs                                    { return ^abi.NeedPrompt }

func builtin(t testing.TB, name string) Placer {
	t.Helper()
	p, ok := policies.Place(name)
	if !ok {
		t.Fatalf("no policy %q", name)
	}
	return native{p}
}

// decider is a policy made for a test.
type decider func(*abi.PlaceFacts) (abi.PlaceDecision, bool)

func (d decider) Place(f *abi.PlaceFacts) (abi.PlaceDecision, bool) { return d(f) }
func (decider) Needs() abi.Needs                                    { return ^abi.NeedPrompt }

// always places on two rows.
func always(prefill, decode int32) Placer {
	return decider(func(*abi.PlaceFacts) (abi.PlaceDecision, bool) {
		return abi.PlaceDecision{Prefill: prefill, Decode: decode}, true
	})
}

// anywhere places by the facts' random number: the worst case for caches.
func anywhere(f *abi.PlaceFacts) (abi.PlaceDecision, bool) {
	var prefill, decode []int32
	for i, c := range f.Candidates {
		if c.Roles == abi.RolePrefill {
			prefill = append(prefill, int32(i))
		} else {
			decode = append(decode, int32(i))
		}
	}
	r := rand.New(rand.NewPCG(f.Random, 1))
	return abi.PlaceDecision{Prefill: prefill[r.IntN(len(prefill))], Decode: decode[r.IntN(len(decode))]}, true
}

// simple is a model whose times are easy to add up.
func simple() Model {
	return Model{
		Name: "simple", PrefillMicros: 100, ChunkTokens: 1000,
		DecodeMicros: 10_000, DecodeRequests: 100, DecodeTokens: 1 << 20,
		TransferMicros: 1000, TransferTokenMicros: 1, KVBytes: 1000,
		TTFTMillis: 1000, ITLMillis: 100,
	}
}

// sample is the beginning of the public trace.
func mooncake(t testing.TB) *Trace {
	t.Helper()
	f, err := os.Open("testdata/mooncake_300.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	tr, err := ReadTrace("mooncake_300.jsonl", f, 512)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func preset(t testing.TB, name string) Model {
	t.Helper()
	m, err := Preset(name)
	if err != nil {
		t.Fatal(err)
	}
	return *m
}

func newLab(t testing.TB, cfg Config, tr *Trace) *Lab {
	t.Helper()
	l, err := New(cfg, tr)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// traceWriter writes traces in the form of their files.
type traceWriter struct{ text []byte }

func (w *traceWriter) add(at time.Duration, input, output int, ids []uint64) {
	line, err := json.Marshal(Line{Timestamp: millis(at), InputLength: input, OutputLength: output, HashIDs: ids})
	if err != nil {
		panic(err)
	}
	w.text = append(append(w.text, line...), '\n')
}

func (w *traceWriter) trace(name string, block int) *Trace {
	t, err := ReadTrace(name, bytes.NewReader(w.text), block)
	if err != nil {
		panic(err)
	}
	return t
}
