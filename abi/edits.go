package abi

// EditOp is the operation of an edit on a leg.
type EditOp uint32

// The edits. Comparison of header names ignores case. A field is a member of
// the top level of the leg's JSON body.
const (
	EditSetHeader    EditOp = 1 + iota // replaces every line of that name
	EditAddHeader                      // adds a line
	EditRemoveHeader                   // has no value
	EditSetField                       // the value is JSON
	EditRemoveField                    // has no value
)

// The limits of a list of edits. The host rejects a list that exceeds them.
const (
	MaxEdits       = 256
	MaxEditHeaders = 64 << 10 // bytes of the names and values of header lines, together
)

// Edit is one change to a leg. Its texts share the memory of the list that it
// was read from.
type Edit struct {
	Op          EditOp
	Name, Value string
}

const (
	editOp     = 0
	editName   = 4 // length
	editValue  = 8 // length
	editHeader = 12
)

// Edits builds a list of edits in memory that the caller provides. It never
// allocates: see Full.
type Edits struct {
	b    []byte
	full bool
}

// NewEdits returns an empty list that uses the memory of room.
func NewEdits(room []byte) Edits { return Edits{b: room[:0:len(room)]} }

// SetHeader replaces every line of that name by one.
func (e *Edits) SetHeader(name, value string) { e.add(EditSetHeader, name, value) }

// AddHeader adds a header line.
func (e *Edits) AddHeader(name, value string) { e.add(EditAddHeader, name, value) }

// RemoveHeader removes every line of that name.
func (e *Edits) RemoveHeader(name string) { e.add(EditRemoveHeader, name, "") }

// SetField sets a top-level member of the body to a JSON value.
func (e *Edits) SetField(name, json string) { e.add(EditSetField, name, json) }

// RemoveField removes a top-level member of the body.
func (e *Edits) RemoveField(name string) { e.add(EditRemoveField, name, "") }

// Full reports whether an edit was dropped because it did not fit. In that case
// the answer must not be LegEdited.
func (e *Edits) Full() bool { return e.full }

// Bytes returns the list in its encoding.
func (e *Edits) Bytes() []byte { return e.b }

func (e *Edits) add(op EditOp, name, value string) {
	at, size := len(e.b), editHeader+len(name)+len(value)
	if size > cap(e.b)-at {
		e.full = true
		return
	}
	e.b = e.b[:at+editHeader]
	put32(e.b, at+editOp, uint32(op))
	put32(e.b, at+editName, uint32(len(name)))
	put32(e.b, at+editValue, uint32(len(value)))
	e.b = append(append(e.b, name...), value...)
}

// NextEdit reads the first edit of a list and returns the rest. ok is false
// when the list breaks the contract. The caller stops when the list is empty.
func NextEdit(list []byte) (e Edit, rest []byte, ok bool) {
	if len(list) < editHeader {
		return Edit{}, nil, false
	}
	name, value := uint64(get32(list, editName)), uint64(get32(list, editValue))
	e.Op = EditOp(get32(list, editOp))
	if e.Op < EditSetHeader || e.Op > EditRemoveField || name == 0 || editHeader+name+value > uint64(len(list)) {
		return Edit{}, nil, false
	}
	rest = list[editHeader:]
	e.Name, e.Value, rest = textView(rest[:name]), textView(rest[name:name+value]), rest[name+value:]
	return e, rest, true
}

// MarkEdits stores the position of the list in the frame's header. The offset
// counts from the frame's beginning.
func MarkEdits(frame []byte, offset, size int) {
	put32(frame, offEdits, uint32(offset))
	put32(frame, offEditsLen, uint32(size))
}

// EditsOf returns the offset and size of the list that a guest left. It does
// not validate them: the caller checks that the list lies after the frame and
// within the scratch buffer.
func EditsOf(frame []byte) (offset, size int) {
	return int(get32(frame, offEdits)), int(get32(frame, offEditsLen))
}
