package meter

// The subsections of the name section.
const (
	namesModule    = 0
	namesFunctions = 1
)

// names returns the name section with the new indices of functions, without names of local
// variables, which nothing shows. r is behind the section's own name. A section that cannot be read
// is dropped, as the specification of WebAssembly says.
func (w *rewriter) names(r *reader) []byte {
	out := appendName(nil, "name")
	helpers := w.helpers
	for r.more() {
		id := r.byte()
		body := &reader{data: r.bytes()}
		if r.err != nil {
			return nil
		}
		var data []byte
		switch id {
		case namesFunctions:
			data, helpers = w.functionNames(body, helpers), nil
		case namesModule:
			body.bytes()
			data = body.data[:body.pos]
		default:
			continue
		}
		if body.err != nil || body.more() {
			return nil
		}
		out = appendSection(out, id, data)
	}
	return out
}

// functionNames returns the names of functions, and names of the helpers.
func (w *rewriter) functionNames(r *reader, helpers []helper) []byte {
	n := r.count()
	out := appendUint(make([]byte, 0, len(r.data)+5), n+len(helpers))
	for i := 0; i < n && r.err == nil; i++ {
		out = appendUint(out, w.shift(r.u32()))
		out = appendName(out, string(r.bytes()))
	}
	for i, h := range helpers {
		out = appendUint(out, w.Imports+imports+len(w.Functions)+i)
		out = appendName(out, h.name)
	}
	return out
}
