package policy

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
)

// Notebook is the Env of one VM, and where its guest leaves notes on the
// decision under way. Like its VM it is not safe for concurrent use.
type Notebook struct {
	host.Env
	notes []string
}

// Take returns the notes since it was called last.
func (n *Notebook) Take() []string {
	notes := n.notes
	n.notes = nil
	return notes
}

// Foreign implements host.Env.
func (n *Notebook) Foreign(ctx uint32, name string, args []byte) ([]byte, host.Status) {
	switch {
	case name != abi.ForeignNote:
		return n.Env.Foreign(ctx, name, args)
	case len(n.notes) == abi.MaxNotes:
		return nil, host.InternalFailure
	}
	n.notes = append(n.notes, string(args[:min(len(args), abi.MaxNoteSize)]))
	return nil, host.OK
}

// notes takes the notes of the call, under the policy's name.
func (c *call) notes() []string {
	notes := c.vm.notes.Take()
	for i := range notes {
		notes[i] = c.p.Label + ": " + notes[i]
	}
	return notes
}
