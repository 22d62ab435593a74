package trial

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/plugins/build"
)

// naughty is a policy that fails in a way that the frame's sequence number
// selects.
const naughty = `package main

import (
	"encoding/binary"
	"unsafe"
)

func main() {}

var scratch [8192]uint64

//go:wasmexport pdproxy_v1_scratch
func exportScratch(size uint32) uint32 { return uint32(uintptr(unsafe.Pointer(&scratch[0]))) }

// policies answers an empty text: the hooks have no names.
//
//go:wasmexport pdproxy_v1_policies
func policies() uint64 { return 0 }

//go:wasmexport pdproxy_v1_on_place
func place(at, size uint32) uint64 { return answer() }

//go:wasmexport pdproxy_v1_on_plan
func plan(at, size uint32) uint64 { return answer() }

//go:wasmexport pdproxy_v1_on_mint
func mint(at, size uint32) uint64 { return answer() }

//go:wasmexport pdproxy_v1_on_leg
func leg(at, size uint32) uint64 {
	frame := unsafe.Slice((*byte)(unsafe.Pointer(&scratch[0])), 65536)
	if frame[31] == 0xee { // one edit behind the frame
		binary.LittleEndian.PutUint32(frame[56:], size)
		binary.LittleEndian.PutUint32(frame[60:], 16)
		edit := frame[size:]
		for i, n := range []uint32{1, 1, 3} {
			binary.LittleEndian.PutUint32(edit[4*i:], n)
		}
		copy(edit[12:], "kvvv")
		return 1
	}
	return answer()
}

//go:wasmexport pdproxy_v1_on_finish
func finish(at, size uint32) {}

// answer is the sequence number, unless it is one of these.
func answer() uint64 {
	frame := (*[64]byte)(unsafe.Pointer(&scratch[0]))
	switch n := binary.LittleEndian.Uint64(frame[24:]); n {
	case 901:
		for { //nolint
		}
	case 902:
		panic("as asked")
	default:
		return n
	}
}
`

func buildNaughty(t *testing.T) []byte {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module naughty\n\ngo 1.24\n", "main.go": naughty} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r, err := build.Build(t.Context(), build.Options{Dir: dir, Log: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	wasm, err := os.ReadFile(r.Output)
	if err != nil {
		t.Fatal(err)
	}
	return wasm
}

const twoRows = `"candidates": [{"engine": "p", "facts": {"role": "prefill"}}, {"engine": "d", "facts": {"role": "decode"}}]`

func TestRun(t *testing.T) {
	module := buildNaughty(t)
	tests := []struct {
		name, frame     string
		decision, error string // parts of their printed text
	}{
		{"plan", `{"hook": "plan", "sequence": 2, "expect": {"plan": "disaggregate"}}`, `{"plan":"disaggregate","status":0,"limit_ms":0}`, ""},
		{"plan with a limit", `{"hook": "plan", "sequence": 858993459201}`, `"limit_ms":200`, ""},
		{"reject", `{"hook": "plan", "sequence": 28114947, "expect": {"plan": "reject", "status": 429}}`, `"status":429`, ""},
		{"no plan", `{"hook": "plan", "sequence": 9}`, "null", "0x9 is not a plan"},
		{"another plan", `{"hook": "plan", "sequence": 1, "expect": {"plan": "pass"}}`, `"aggregate"`, `expected {"plan": "pass"}`},
		{"place", `{"hook": "place", "sequence": 1, ` + twoRows + `}`, `{"prefill":"p/0","decode":"d/0","prefill_row":0,"decode_row":1}`, ""},
		{"row out of range", `{"hook": "place", "sequence": 7, ` + twoRows + `}`, `"decode_row":7`, "rows 0 to 1"},
		{"one row twice", `{"hook": "place", "sequence": 0, ` + twoRows + `}`, `"decode_row":0`, "both legs are on one target"},
		{"roles swapped", `{"hook": "place", "sequence": 4294967296, ` + twoRows + `}`, `"prefill":"d/0"`, "d/0 does not serve prefill"},
		{"explanation", `{"request_id": "r1", "flow": "prefill_first", "legs": [], ` + twoRows + `}`, `"prefill_row":0`, "both legs are on one target"},
		{"mint", `{"hook": "mint", "sequence": 1099511627777, "expect": {"id": 1099511627777}}`, `{"id":1099511627777}`, ""},
		{"mint out of range", `{"hook": "mint", "sequence": 12}`, `{"id":12}`, "is not within"},
		{"mint abstains", `{"hook": "mint", "sequence": 0}`, "null", "no id"},
		{"leg", `{"hook": "leg", "phase": "decode", "sequence": 0}`, `{"leg":"as_is"}`, ""},
		{"leg failed", `{"hook": "leg", "event": "failed", "sequence": 3, "expect": {"leg": "give_up"}}`, `{"leg":"give_up"}`, ""},
		{"leg unknown", `{"hook": "leg", "sequence": 2}`, "null", "not a decision on a leg"},
		{"edits", `{"hook": "leg", "sequence": 17149707381026848768}`, `{"leg":"edited","edits":[{"op":"set_header","name":"k","value":"vvv"}]}`, ""},
		{"finish", `{"hook": "finish", "outcome": "cancelled", "expect": {}}`, "{}", ""},
		{"endless loop", `{"hook": "plan", "sequence": 901}`, "null", "timeout"},
		{"panic", `{"hook": "plan", "sequence": 902}`, "null", "call pdproxy_v1_on_plan"},
		{"after a panic", `{"hook": "plan", "sequence": 1}`, `"aggregate"`, ""},
		{"policy that is not there", `{"hook": "plan", "policy": "x", "sequence": 1}`, "null", "does not name its policies"},
	}
	var all []string
	for _, tt := range tests {
		all = append(all, tt.frame)
	}
	frames, err := ReadFrames(strings.NewReader("[" + strings.Join(all, ",\n") + "]"))
	if err != nil {
		t.Fatal(err)
	}
	results, err := Run(t.Context(), module, frames, Options{Timeout: 300 * time.Millisecond, Repeat: 1, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if len(results) != len(tests) {
		t.Fatalf("%d results of %d frames", len(results), len(tests))
	}
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			decision, err := json.Marshal(results[i].Decision)
			if err != nil || !strings.Contains(string(decision), tt.decision) {
				t.Errorf("decision %s, want %s", decision, tt.decision)
			}
			if got := results[i].Error; got == "" && tt.error != "" || got != "" && tt.error == "" || !strings.Contains(got, tt.error) {
				t.Errorf("got error %q, want %q", got, tt.error)
			}
		})
	}
	if last := results[len(results)-3]; !strings.Contains(last.Stack, "main.answer") {
		t.Errorf("the stack of the panic is %q", last.Stack)
	}
}

// TestInspect: hooks without names are all called.
func TestInspect(t *testing.T) {
	i, err := Inspect(t.Context(), buildNaughty(t), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if len(i.Hooks) != 5 || len(i.Policies) != 0 || i.ABI != "" || i.MemoryBytes == 0 {
		t.Errorf("inspected as %+v", i)
	}
	if _, err := Inspect(t.Context(), []byte("no module"), slog.New(slog.DiscardHandler)); err == nil {
		t.Error("text was inspected")
	}
}
