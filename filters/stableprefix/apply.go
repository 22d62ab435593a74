// Package stableprefix is the built-in filter stable_prefix. It removes or moves the parts of a
// request that known agents change in every request, so that the prompt has the same beginning as
// that of the request before, and engines find its KV in their caches.
//
// Rules is the table of these parts. Apply changes a body by edits of its bytes: all other bytes
// stay as the client sent them. The package wasm below is the module that the proxy loads.
//
// The decisions behind this package are in docs/design/plugins.md.
package stableprefix

import (
	"slices"
	"strconv"
)

// Edit replaces the bytes from Start to End of a body.
type Edit struct {
	Start, End int
	Text       []byte
}

// Join returns one edit with the effect of all edits, of which there is at least one.
func Join(body []byte, edits []Edit) Edit {
	all := Edit{Start: edits[0].Start, End: edits[len(edits)-1].End}
	size := all.End - all.Start
	for _, e := range edits {
		size += len(e.Text) - (e.End - e.Start)
	}
	all.Text = make([]byte, 0, size)
	at := all.Start
	for _, e := range edits {
		all.Text = append(append(all.Text, body[at:e.Start]...), e.Text...)
		at = e.End
	}
	return all
}

// Effect is the effect of one rule on a body.
type Effect struct {
	Rule  *Rule
	Bytes int // of the body that were removed or moved
}

// Note is the text for the explanation of a request.
func (e Effect) Note() string {
	return e.Rule.Name + " " + verbs[e.Rule.Action] + " " + strconv.Itoa(e.Bytes) + " bytes"
}

// Apply returns the edits of a body, in the order of their positions and without overlaps, and the
// effects of the rules. known are the agents that sent the request, by its header; 0 if the header
// names none. A body that is not an object has no edits. The texts of the edits may be parts of
// the body.
func (c *Config) Apply(api API, known Agents, tenant string, body []byte) ([]Edit, []Effect) {
	r, ok := read(api, body)
	if !ok {
		return nil, nil
	}
	s := c.scope(word(body, r.model), tenant)
	if s == nil {
		return nil, nil
	}
	switch {
	case s.anyClient:
		known = anyAgent
	case known == 0 && len(r.system) > 0:
		known = recognize(r.system[0].text.inner().of(body))
	}
	e := editor{body: body, request: r, cuts: make([][]span, len(r.system))}
	for _, rule := range s.rules {
		if rule.Agents&known == 0 {
			continue
		}
		bytes := 0
		if rule.Action == Sort {
			bytes = e.sortTools()
		} else {
			bytes = e.cut(rule)
		}
		if bytes > 0 {
			e.effects = append(e.effects, Effect{rule, bytes})
		}
	}
	e.finish()
	return e.edits, e.effects
}

// editor collects the edits of one body.
type editor struct {
	body    []byte
	request *request
	cuts    [][]span // that the rules cut from each system text, relative to its content

	first, last []byte // the texts for the first and the last user message
	edits       []Edit
	effects     []Effect
}

// separator is between a moved text and the text before which it is put: two line feeds.
const separator = `\n\n`

// cut cuts what the rule matches, and returns the number of bytes.
func (e *editor) cut(r *Rule) (bytes int) {
	if r.Action != Remove && e.request.firstUser.none() {
		return 0 // there is no message to which the text could move
	}
	var found []span
	for i, p := range e.request.system {
		s := p.text.inner().of(e.body)
		for _, f := range r.find(s, found[:0]) {
			for _, other := range e.cuts[i] { // a text up to the end ends before a text that another rule cuts
				if r.extent == rest && other.start > f.start {
					f.end = min(f.end, other.start)
				}
			}
			if slices.ContainsFunc(e.cuts[i], func(o span) bool { return f.start < o.end && o.start < f.end }) {
				continue
			}
			e.cuts[i] = append(e.cuts[i], f)
			bytes += f.end - f.start
			text := f.of(s)
			if r.extent == line {
				end, _ := lineEnd(text, 0)
				text = text[:end]
			}
			switch r.Action {
			case MoveFirst:
				e.first = append(append(e.first, text...), separator...)
			case MoveLast:
				e.last = append(append(e.last, text...), separator...)
			}
		}
	}
	return bytes
}

// finish makes the edits of the texts and sorts all edits.
func (e *editor) finish() {
	var gone span // the last element that was removed
	for i, p := range e.request.system {
		cuts := e.cuts[i]
		if len(cuts) == 0 {
			continue
		}
		slices.SortFunc(cuts, func(a, b span) int { return a.start - b.start })
		if covered(cuts, p.text.end-p.text.start-2) && e.removeElement(p, gone) {
			gone = (*p.list)[p.k]
			continue
		}
		for _, c := range cuts {
			e.edits = append(e.edits, Edit{Start: p.text.start + 1 + c.start, End: p.text.start + 1 + c.end})
		}
	}
	first, last := e.request.firstUser, e.request.lastUser
	if first == last {
		e.first, e.last = append(e.first, e.last...), nil
	}
	e.insert(first, e.first)
	e.insert(last, e.last)
	slices.SortStableFunc(e.edits, func(a, b Edit) int { return a.Start - b.Start })
}

// insert puts a text before the text at s.
func (e *editor) insert(s span, text []byte) {
	if len(text) > 0 {
		e.edits = append(e.edits, Edit{Start: s.start + 1, End: s.start + 1, Text: text})
	}
}

// covered reports whether cuts are a whole text of that size.
func covered(cuts []span, size int) bool {
	end := 0
	for _, c := range cuts {
		if c.start != end {
			return false
		}
		end = c.end
	}
	return end == size
}

// removeElement removes the element of a place with the comma beside it. It returns false if the
// element must stay: it is the only one, it has a member cache_control, or gone is the element
// before it, whose edit has the comma. The element then keeps an empty text, which engines skip.
func (e *editor) removeElement(p place, gone span) bool {
	if p.list == nil || p.keep {
		return false
	}
	switch list := *p.list; {
	case len(list) < 2:
		return false
	case p.k == 0:
		e.edits = append(e.edits, Edit{Start: list[0].start, End: list[1].start})
	case list[p.k-1] == gone:
		return false
	default:
		e.edits = append(e.edits, Edit{Start: list[p.k-1].end, End: list[p.k].end})
	}
	return true
}
