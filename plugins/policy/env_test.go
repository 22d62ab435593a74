package policy

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/shared"
)

// TestWorldForeign: counters are the plugin's metrics. Functions and objects
// that do not exist give the same statuses as in other hosts.
func TestWorldForeign(t *testing.T) {
	w := NewWorld(Setting{Store: new(shared.Store), Metrics: shared.NewMetricTable(nil)})
	defer w.Close()
	for name, want := range map[string]host.Status{
		abi.ForeignCounter:      host.InternalFailure, // no metric can be defined here
		"pdproxy.v1.unheard_of": host.NotFound,
	} {
		if _, status := w.Foreign(0, name, []byte("12345678turns")); status != want {
			t.Errorf("%s: status %d, want %d", name, status, want)
		}
	}
}

func TestNotebook(t *testing.T) {
	n := &Notebook{}
	for range abi.MaxNotes {
		if _, status := n.Foreign(0, abi.ForeignNote, make([]byte, abi.MaxNoteSize+1)); status != host.OK {
			t.Fatal(status)
		}
	}
	if _, status := n.Foreign(0, abi.ForeignNote, nil); status != host.InternalFailure {
		t.Errorf("status of a note above the limit: %d", status)
	}
	notes := n.Take()
	if len(notes) != abi.MaxNotes || len(notes[0]) != abi.MaxNoteSize || len(n.Take()) != 0 {
		t.Errorf("%d notes, the first of %d bytes", len(notes), len(notes[0]))
	}
}
