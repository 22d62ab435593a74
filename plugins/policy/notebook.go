package policy

import (
	"encoding/binary"
	"sync"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
)

// Notebook is the Env of one VM, and holds the data of its current decision:
// the candidates, and the notes that the guest leaves. Like its VM it is not
// safe for concurrent use, except for show.
type Notebook struct {
	host.Env
	notes []string

	mu   sync.Mutex
	rows []abi.Candidate // of a place frame, owned by the request; guarded by mu
}

// show gives the guest the candidates of a decision. After show(nil) the guest
// can read no earlier candidates. It is safe for concurrent use.
func (n *Notebook) show(rows []abi.Candidate) {
	n.mu.Lock()
	n.rows = rows
	n.mu.Unlock()
}

// Take returns the notes since its last call.
func (n *Notebook) Take() []string {
	notes := n.notes
	n.notes = nil
	return notes
}

// Foreign implements host.Env.
func (n *Notebook) Foreign(ctx uint32, name string, args []byte) ([]byte, host.Status) {
	switch name {
	case abi.ForeignNote:
		if len(n.notes) == abi.MaxNotes {
			return nil, host.InternalFailure
		}
		n.notes = append(n.notes, string(args[:min(len(args), abi.MaxNoteSize)]))
		return nil, host.OK
	case abi.ForeignPrefixMatch:
		return n.prefixMatch(args)
	}
	return n.Env.Foreign(ctx, name, args)
}

// prefixMatch returns the KV blocks of the request that the target of a row holds. BadArgument:
// there is no such row. NotFound: no index has the target.
func (n *Notebook) prefixMatch(args []byte) ([]byte, host.Status) {
	if len(args) != 4 {
		return nil, host.BadArgument
	}
	row := binary.LittleEndian.Uint32(args)
	n.mu.Lock()
	defer n.mu.Unlock()
	if uint64(row) >= uint64(len(n.rows)) {
		return nil, host.BadArgument
	}
	c := &n.rows[row]
	if c.BlockTokens == 0 {
		return nil, host.NotFound
	}
	result := binary.LittleEndian.AppendUint32(nil, c.BlocksGPU)
	result = binary.LittleEndian.AppendUint32(result, c.BlocksCPU)
	return binary.LittleEndian.AppendUint32(result, c.BlocksDisk), host.OK
}
