package stableprefix

import (
	"strings"
	"testing"
)

// BenchmarkApply is the work of the rules without WebAssembly.
func BenchmarkApply(b *testing.B) {
	body := []byte(`{"model":"m","messages":[` + strings.Repeat(`{"role":"user","content":[{"type":"text","text":"`+strings.Repeat(`func main() { print(\"x\") }\n`, 30)+`"}]},`, 300) + `{"role":"user","content":"x"}],"system":[{"type":"text","text":"` + billing("1") + `"},{"type":"text","text":"A"}]}`)
	c, err := Parse("")
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		c.Apply(Messages, ClaudeCode, "", body)
	}
}
