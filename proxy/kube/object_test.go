package kube

import (
	"io"
	"strings"
	"testing"
)

// repeated is a reader of a text between a start and an end.
func repeated(start, text string, n int, end string) io.Reader {
	return io.MultiReader(strings.NewReader(start), strings.NewReader(strings.Repeat(text, n)), strings.NewReader(end))
}

// TestListIsBounded: a listing with more objects, or objects with more parts, than the limits
// is refused without memory for all of them.
func TestListIsBounded(t *testing.T) {
	const start, end = `{"metadata":{"resourceVersion":"1"},"items":[`, `{}]}`
	for name, r := range map[string]io.Reader{
		"objects":    repeated(start, "{},", maxObjects+1, end),
		"endpoints":  repeated(start+`{"endpoints":[`, "{},", 1_000_000, `{}]}`+","+end),
		"ports":      repeated(start+`{"ports":[`, "{},", 1_000_000, `{}]}`+","+end),
		"rules":      repeated(start+`{"spec":{"rules":[{"targets":[`, "{},", 1_000_000, `{}]}]}}`+","+end),
		"conditions": repeated(start+`{"status":{"conditions":[`, "{},", 1_000_000, `{}]}}`+","+end),
		"all parts":  repeated(start, `{"endpoints":[`+strings.Repeat("{},", 10_000)+`{}]},`, 60, end),
		"null parts": repeated(start, `{"endpoints":[`+strings.Repeat("null,", 100_000)+`null]},`, 10, end),
		"one object": repeated(start+`{"metadata":{"name":"`, "a", maxEvent+1, `"}},`+end),
	} {
		var list list
		if err := list.read(r); err == nil || !strings.Contains(err.Error(), "more than") {
			t.Errorf("%s: got %d objects, %v", name, len(list.Items), err)
		}
		if len(list.Items) > maxObjects {
			t.Errorf("%s: %d objects", name, len(list.Items))
		}
	}
}

// TestListForms: members may come in any order, and unknown ones are ignored. Other JSON is an
// error.
func TestListForms(t *testing.T) {
	for text, want := range map[string]int{
		`{"kind":"List","items":[{"metadata":{"name":"a"}},{"metadata":{"name":"b"}}],"other":[{}],"metadata":{"resourceVersion":"7"}}`: 2,
		`{"metadata":{"resourceVersion":"7"},"items":null}`:                                                                             0,
		`{"metadata":{"resourceVersion":"7"}}`:                                                                                          0,
		`[]`:                                                                                                                            -1,
		`{"items":{}}`:                                                                                                                  -1,
		`{"items":[1]}`:                                                                                                                 -1,
		`{"items":[{}`:                                                                                                                  -1,
		`null`:                                                                                                                          -1,
		``:                                                                                                                              -1,
	} {
		var list list
		err := list.read(strings.NewReader(text))
		if got := len(list.Items); (err != nil) != (want < 0) || err == nil && (got != want || list.Metadata.ResourceVersion != "7") {
			t.Errorf("%s: %d objects, version %q, %v", text, got, list.Metadata.ResourceVersion, err)
		}
	}
}
