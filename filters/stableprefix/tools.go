package stableprefix

import (
	"bytes"
	"slices"
)

// tool is one element of the list of tools.
type tool struct {
	element span
	name    []byte
	cache   span // the member cache_control, none without one
}

// sortTools sorts the tools by their names and returns the number of bytes that have another
// place. A member cache_control stays at its place in the list, because it says how much of the
// list a cache shall keep.
func (e *editor) sortTools() (moved int) {
	if e.request.tools.none() {
		return 0
	}
	c := cursor{b: e.body, i: e.request.tools.start}
	var tools []tool
	c.array(func(*[]span) { tools = append(tools, c.tool()) })
	if c.bad || slices.ContainsFunc(tools, func(t tool) bool { return e.body[t.element.start] != '{' }) {
		return 0
	}
	sorted := slices.Clone(tools)
	slices.SortStableFunc(sorted, func(a, b tool) int { return bytes.Compare(a.name, b.name) })
	var out []byte
	for i, t := range sorted {
		if t.element != tools[i].element {
			moved += t.element.end - t.element.start
		}
		out = e.appendTool(out, t, tools[i].cache)
		if i+1 < len(tools) {
			out = append(out, e.body[tools[i].element.end:tools[i+1].element.start]...) // comma and white space
		}
	}
	if moved > 0 {
		e.edits = append(e.edits, Edit{Start: tools[0].element.start, End: tools[len(tools)-1].element.end, Text: out})
	}
	return moved
}

// tool reads a tool. Its name is a member, or a member of the member function; a tool of the
// server has only a type.
func (c *cursor) tool() tool {
	var t tool
	var kind []byte
	start := c.i
	c.object(func(name []byte, at int) {
		switch string(name) {
		case "name":
			t.name = c.string().of(c.b)
		case "type":
			kind = c.string().of(c.b)
		case "function":
			c.object(func(name []byte, _ int) {
				if v := c.value(); string(name) == "name" {
					t.name = v.of(c.b)
				}
			})
		case "cache_control":
			c.value()
			t.cache = span{at, c.i}
		default:
			c.value()
		}
	})
	if t.element = (span{start, c.i}); len(t.name) == 0 {
		t.name = kind
	}
	return t
}

// appendTool appends a tool with another member cache_control, or with none.
func (e *editor) appendTool(out []byte, t tool, cache span) []byte {
	if t.cache == cache || t.cache.none() && cache.none() {
		return append(out, t.element.of(e.body)...)
	}
	from, to := t.element.end-1, t.element.end-1 // no member: before the closing brace
	if !t.cache.none() {
		from, to = t.cache.start, t.cache.end
	}
	out = append(out, e.body[t.element.start:from]...)
	switch {
	case t.cache.none():
		out = append(append(out, ','), cache.of(e.body)...)
	case !cache.none():
		out = append(out, cache.of(e.body)...)
	default:
		out, to = e.withoutComma(out, to)
	}
	return append(out, e.body[to:t.element.end]...)
}

// withoutComma removes the comma beside a member that ends at i and is left out: the comma after
// it, or the one before it, at the end of out.
func (e *editor) withoutComma(out []byte, i int) ([]byte, int) {
	c := cursor{b: e.body, i: i}
	if c.next() == ',' {
		c.i++
		c.next()
		return out, c.i
	}
	return bytes.TrimSuffix(bytes.TrimRight(out, " \n\t\r"), []byte(",")), i
}
