package stableprefix

import (
	"strings"
	"testing"
)

// BenchmarkApply is the work of the rules on 256 KB without WebAssembly.
func BenchmarkApply(b *testing.B) {
	const line = `\tif err := build(ctx, \"target\", options.Verbose); err != nil {\n`
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat(line, 256<<10/len(line)) + `"}],"system":[{"type":"text","text":"` + billing("1") + `"},{"type":"text","text":"Be brief."}]}`)
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
