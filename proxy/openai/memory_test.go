package openai

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"
)

// The most that a scan of n bytes may allocate, in bytes: 600 KiB for the top-level members, 7
// bytes for each byte of a body with many keys, and never more than 5 MiB.
func maxScan(n int) uint64 { return min(600<<10+7*uint64(n), 5<<20) }

// allocated returns the bytes that f allocates, also those that the collector frees meanwhile.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// wideBodies returns bodies of about n bytes whose shapes cost a scan the most memory.
func wideBodies(n int) map[string]string {
	repeat := func(head, part, tail string) string {
		return head + strings.TrimSuffix(strings.Repeat(part, (n-len(head)-len(tail))/len(part)), ",") + tail
	}
	count := func(head, format, tail string) string {
		var b strings.Builder
		b.WriteString(head)
		for i := 0; b.Len() < n; i++ {
			fmt.Fprintf(&b, format, i)
		}
		return strings.TrimSuffix(b.String(), ",") + tail
	}
	const model = `{"model":"m","prompt":"x","messages":[{"role":"user","content":"x"}],`
	return map[string]string{
		"wide object":           count(model+`"z":{`, `"%x":1,`, `}}`),
		"escaped keys":          count(model+`"z":{`, `"\n%x":1,`, `}}`),
		"wide in an array":      count(model+`"z":[[{`, `"%x":1,`, `}]]}`),
		"wide at every depth":   count(model+`"z":{`, `"%x":1,`, `,"y":{"y":{"y":{}}}}}`),
		"depth":                 model + `"z":` + strings.Repeat(`{"":`, 250) + count(`{`, `"%x":1,`, `}`) + strings.Repeat("}", 250) + `}`,
		"empty objects":         repeat(model+`"z":[`, `{},`, `]}`),
		"objects of one key":    repeat(model+`"z":[`, `{"":{}},`, `]}`),
		"empty arrays":          repeat(model+`"z":[`, `[],`, `]}`),
		"arrays of arrays":      repeat(model+`"z":[`, `[[[[0]]]],`, `]}`),
		"long key":              repeat(model+`"z":{"`, `k`, `":1}}`),
		"long escaped key":      repeat(model+`"z":{"`, `\n`, `":1}}`),
		"long top-level key":    repeat(model+`"`, `k`, `":1}`),
		"long escaped top key":  repeat(model+`"`, `\n`, `":1}`),
		"top-level members":     count(model, `"%x":1,`, `}`),
		"escaped members":       count(model, `"\n%x":1,`, `}`),
		"long escaped model":    repeat(`{"prompt":"x","model":"`, `\n`, `"}`),
		"tokens":                repeat(`{"model":"m","prompt":[`, `1,`, `]}`),
		"token lists":           repeat(`{"model":"m","prompt":[`, `[1],`, `]}`),
		"texts":                 repeat(`{"model":"m","prompt":[`, `"",`, `]}`),
		"messages":              repeat(`{"model":"m","messages":[`, `{"role":"user","content":"x"},`, `]}`),
		"content parts":         repeat(`{"model":"m","messages":[{"role":"user","content":[`, `{"type":"text","text":""},`, `]}]}`),
		"tools":                 repeat(model+`"tools":[`, `{"type":"function","function":{"name":"f","parameters":{}}},`, `]}`),
		"sampling parameters":   repeat(`{"model":"m","text":"x","sampling_params":[`, `{"n":1},`, `]}`),
		"stream options":        count(`{"model":"m","prompt":"x","stream_options":{`, `"%x":1,`, `}}`),
		"transfer parameters":   count(model+`"vllm_xargs":{`, `"%x":1,`, `}}`),
		"wide and not finished": count(model+`"z":{`, `"%x":1,`, ``),
		"a duplicate at last":   count(model+`"z":{`, `"%x":1,`, `,"0":1}}`),
	}
}

// TestScanMemory: a body of any shape allocates little beside its own bytes, and all of it
// is counted before, except 8 KiB of keys, 72 KiB of members, and the texts of 4096 keys with escapes.
func TestScanMemory(t *testing.T) {
	for _, n := range []int{4 << 10, 32 << 10, 1 << 20} {
		for name, body := range wideBodies(n) {
			apis := []API{Completions, Chat, Messages, Responses, Generate, EngineRoute}
			if n > 64<<10 {
				apis = []API{EngineRoute} // the scan is the same for all
			}
			for _, api := range apis {
				text, meter := []byte(body), &meter{most: math.MaxInt64}
				var r Request
				r.Memory = meter
				if got := allocated(func() { _ = ParseRequest(api, text, &r) }); got > maxScan(len(text)) {
					t.Errorf("%s, %d bytes, %v: %d bytes allocated, want at most %d", name, len(text), api, got, maxScan(len(text)))
				} else if got > uint64(meter.peak)+300<<10 {
					t.Errorf("%s, %d bytes, %v: %d bytes allocated, and %d counted", name, len(text), api, got, meter.peak)
				}
				if meter.held != 0 {
					t.Errorf("%s: %d bytes are still counted after the scan", name, meter.held)
				}
			}
		}
	}
}

// meter counts up to most bytes.
type meter struct{ held, peak, most int64 }

var errMeter = errors.New("no memory")

func (m *meter) TakeScratch(n int64) error {
	if m.held+n > m.most {
		return errMeter
	}
	m.held += n
	m.peak = max(m.peak, m.held)
	return nil
}

func (m *meter) ReleaseMemory(n int64) { m.held -= n }

// TestScanWithoutMemory: a scan that gets no memory ends with the error of Memory, keeps
// nothing, and leaves the Object ready for the next body.
func TestScanWithoutMemory(t *testing.T) {
	bodies := wideBodies(300 << 10)
	for _, name := range []string{"wide object", "escaped keys", "depth", "top-level members", "stream options", "transfer parameters"} {
		for _, most := range []int64{0, 20 << 10, 100 << 10} {
			m := &meter{most: most}
			r := Request{Object: Object{Memory: m}}
			if err := ParseRequest(Completions, []byte(bodies[name]), &r); err != errMeter {
				t.Errorf("%s with %d bytes: %v, want the error of Memory", name, most, err)
			}
			if m.held != 0 || r.Len() != 0 || r.Raw() != nil {
				t.Errorf("%s with %d bytes: %d bytes counted, %d members", name, most, m.held, r.Len())
			}
			if err := ParseRequest(Completions, []byte(`{"model":"m","prompt":"x"}`), &r); err != nil || r.Model != "m" {
				t.Errorf("the next body: %v", err)
			}
		}
	}
	m := &meter{}
	r := Request{Object: Object{Memory: m}}
	form := "--b\r\nContent-Disposition: form-data; name=\"vllm_xargs\"\r\n\r\n" + bodies["wide object"] + "\r\n--b--\r\n"
	if err := ReadRequest(Transcriptions, "multipart/form-data; boundary=b", []byte(form), &r); err != errMeter {
		t.Errorf("a part of a form: %v, want the error of Memory", err)
	}
}

// TestScanReusesMemory: ordinary objects cost the scan of the next request no allocation.
func TestScanReusesMemory(t *testing.T) {
	var b bytes.Buffer
	b.WriteString(`{"model":"m","prompt":"x","logit_bias":{`)
	for i := range 300 {
		fmt.Fprintf(&b, `"%d":-100,`, i)
	}
	b.WriteString(`"x":1},"\u0061":1}`)
	var r Request
	if n := testing.AllocsPerRun(100, func() {
		if err := ParseRequest(Completions, b.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
	}); n > 2 { // for the two uses of the key with escapes
		t.Errorf("%v allocations for each scan", n)
	}
}

// FuzzScanMemory: no body makes the scan allocate more than maxScan, as JSON, as a form, and
// as a value of an engine.
func FuzzScanMemory(f *testing.F) {
	addSeeds(f)
	for _, body := range wideBodies(1 << 10) {
		f.Add([]byte(body))
	}
	var form strings.Builder
	for i := range maxFormParts {
		fmt.Fprintf(&form, "--b\r\nContent-Disposition: form-data; name=\"vllm_xargs[%d]\"\r\n\r\n{}\r\n", i)
	}
	f.Add([]byte(form.String() + "--b--\r\n"))
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, api := range []API{Completions, Chat, Generate, EngineRoute} {
			var r Request
			if got := allocated(func() { _ = ParseRequest(api, body, &r) }); got > maxScan(len(body)) {
				t.Fatalf("%v: %d bytes allocated for %d bytes", api, got, len(body))
			}
		}
		var r Request
		if got := allocated(func() { _ = ReadRequest(Transcriptions, "multipart/form-data; boundary=b", body, &r) }); got > maxScan(len(body)) {
			t.Fatalf("form: %d bytes allocated for %d bytes", got, len(body))
		}
		if got := allocated(func() { _, _, _ = Lookup(body, "a", "b") }); got > maxScan(len(body)) {
			t.Fatalf("Lookup: %d bytes allocated for %d bytes", got, len(body))
		}
	})
}
