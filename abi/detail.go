package abi

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"unsafe"
)

// Detail holds facts about one candidate in addition to its row. Its layout in
// memory is that of a row of the details table, as that of Candidate. A label
// value is the LabelID of its text; 0: the engine does not have the label.
type Detail struct {
	Zone, Revision, Hardware uint32             // values of the labels of these names
	Weight                   float32            // as configured; 1 without a configuration
	Running, Waiting         int32              // requests, or sequences, in the engine's last report; -1: not known
	Labels                   [OtherLabels]Label // the other labels, ordered by their names; unused entries are zero
	// ContextLeast and ContextMost are the lengths of prompts in tokens that the engine is for, by its
	// label context_length or llm-d.ai/context-length-range with a value such as 0-4096; both 0: it does
	// not have the label, or the value is no range.
	ContextLeast, ContextMost int32
}

// Label is the name and the value of a label as LabelIDs.
type Label struct{ Name, Value uint32 }

// OtherLabels is the number of labels that an engine may have besides zone,
// revision and hardware.
const OtherLabels = 5

// MaxLabelSize bounds the names and values of labels in bytes.
const MaxLabelSize = 63

// DetailSize is the size of a row of the details table. Older hosts have rows of leastDetailSize.
const DetailSize = 72

const leastDetailSize = 64

// The compiler checks the layout: an index out of range does not build.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(Detail{})-DetailSize]
	_ = [1]struct{}{}[unsafe.Offsetof(Detail{}.Zone)-detailZone]
	_ = [1]struct{}{}[unsafe.Offsetof(Detail{}.Revision)-detailRevision]
	_ = [1]struct{}{}[unsafe.Offsetof(Detail{}.Hardware)-detailHardware]
	_ = [1]struct{}{}[unsafe.Offsetof(Detail{}.Weight)-detailWeight]
	_ = [1]struct{}{}[unsafe.Offsetof(Detail{}.Running)-detailRunning]
	_ = [1]struct{}{}[unsafe.Offsetof(Detail{}.Waiting)-detailWaiting]
	_ = [1]struct{}{}[unsafe.Offsetof(Detail{}.Labels)-detailLabels]
	_ = [1]struct{}{}[unsafe.Offsetof(Detail{}.ContextLeast)-detailContext]
	_ = [1]struct{}{}[unsafe.Offsetof(Detail{}.ContextMost)-detailContext-4]
	_ = [1]struct{}{}[unsafe.Sizeof(Label{})-labelSize]
)

// LabelID returns the number that frames have in place of the name or value of a
// label: the 32-bit FNV-1a hash of its bytes. It is the same in every process, so
// a policy compares a candidate's label with a text without a call to the host.
// It is 0 only for "".
func LabelID(text string) uint32 {
	if text == "" {
		return 0
	}
	id := uint32(2166136261)
	for i := range len(text) {
		id = (id ^ uint32(text[i])) * 16777619
	}
	return max(id, 1)
}

// SetLabels sets the labels of d to these names and values. The error reports
// labels that frames cannot carry: names or values that are empty or longer than
// MaxLabelSize bytes, or more than OtherLabels besides zone, revision and
// hardware. Then d has no labels.
func (d *Detail) SetLabels(labels map[string]string) error {
	*d = Detail{Weight: d.Weight, Running: d.Running, Waiting: d.Waiting}
	names := make([]string, 0, len(labels))
	for name, value := range labels {
		if name == "" || value == "" || len(name) > MaxLabelSize || len(value) > MaxLabelSize {
			return errors.New("name and value of a label have 1 to " + strconv.Itoa(MaxLabelSize) + " bytes, found " + strconv.Quote(name) + " = " + strconv.Quote(value))
		}
		if name != "zone" && name != "revision" && name != "hardware" {
			names = append(names, name)
		}
	}
	if len(names) > OtherLabels {
		return errors.New("at most " + strconv.Itoa(OtherLabels) + " labels besides zone, revision and hardware, found " + strconv.Itoa(len(names)))
	}
	slices.Sort(names)
	d.Zone, d.Revision, d.Hardware = LabelID(labels["zone"]), LabelID(labels["revision"]), LabelID(labels["hardware"])
	for i, name := range names {
		d.Labels[i] = Label{LabelID(name), LabelID(labels[name])}
		if name == "context_length" || name == "llm-d.ai/context-length-range" {
			d.ContextLeast, d.ContextMost = contextRange(labels[name])
		}
	}
	return nil
}

// contextRange reads a range of lengths of prompts, such as 0-4096; both 0: the text is no range.
func contextRange(text string) (least, most int32) {
	low, high, _ := strings.Cut(text, "-")
	from, err := strconv.ParseInt(low, 10, 32)
	to, err2 := strconv.ParseInt(high, 10, 32)
	if err != nil || err2 != nil || from < 0 || from > to {
		return 0, 0
	}
	return int32(from), int32(to)
}

// Value returns the value of the label whose name has that LabelID; 0: the engine
// does not have the label.
func (d *Detail) Value(name uint32) uint32 {
	switch name {
	case zoneID:
		return d.Zone
	case revisionID:
		return d.Revision
	case hardwareID:
		return d.Hardware
	}
	for i := range d.Labels {
		if d.Labels[i].Name == name {
			return d.Labels[i].Value
		}
	}
	return 0
}

var zoneID, revisionID, hardwareID = LabelID("zone"), LabelID("revision"), LabelID("hardware")

// appendDetails appends the rows in the frame's layout.
func appendDetails(dst []byte, rows []Detail) []byte {
	if len(rows) == 0 {
		return dst
	}
	if !littleEndian {
		return appendDetailFields(dst, rows)
	}
	return append(dst, unsafe.Slice((*byte)(unsafe.Pointer(&rows[0])), len(rows)*DetailSize)...)
}

// appendDetailFields appends the rows field by field.
func appendDetailFields(dst []byte, rows []Detail) []byte {
	for i := range rows {
		d := &rows[i]
		at := len(dst)
		dst = append(dst, make([]byte, DetailSize)...)
		row := dst[at:]
		put32(row, detailZone, d.Zone)
		put32(row, detailRevision, d.Revision)
		put32(row, detailHardware, d.Hardware)
		putFloat(row, detailWeight, d.Weight)
		put32(row, detailRunning, uint32(d.Running))
		put32(row, detailWaiting, uint32(d.Waiting))
		for n := range d.Labels {
			put32(row, detailLabels+n*labelSize, d.Labels[n].Name)
			put32(row, detailLabels+n*labelSize+4, d.Labels[n].Value)
		}
		put32(row, detailContext, uint32(d.ContextLeast))
		put32(row, detailContext+4, uint32(d.ContextMost))
	}
	return dst
}

// decodeDetails returns the details table of a frame of version 2 with the given
// number of candidates. ok is false if it has another number of rows, except none.
func decodeDetails(b, facts []byte, candidates int) (rows []Detail, ok bool) {
	const at = placeSize + identitySize + moreDetails
	from, n, stride := int(get32(facts, at)), int(get32(facts, at+4)), int(get32(facts, at+8))
	switch {
	case n == 0:
		return nil, true
	case n != candidates || stride < leastDetailSize || from > len(b) || n > (len(b)-from)/stride:
		return nil, false
	case stride == DetailSize && littleEndian && aligned(b, from):
		return unsafe.Slice((*Detail)(unsafe.Pointer(&b[from])), n), true
	}
	rows = make([]Detail, n)
	for i := range rows {
		rows[i] = decodeDetail(b[from+i*stride:][:stride])
	}
	return rows, true
}

func decodeDetail(row []byte) Detail {
	d := Detail{
		Zone: get32(row, detailZone), Revision: get32(row, detailRevision), Hardware: get32(row, detailHardware),
		Weight:  getFloat(row, detailWeight),
		Running: int32(get32(row, detailRunning)), Waiting: int32(get32(row, detailWaiting)),
	}
	for n := range d.Labels {
		d.Labels[n] = Label{get32(row, detailLabels+n*labelSize), get32(row, detailLabels+n*labelSize+4)}
	}
	if len(row) >= DetailSize {
		d.ContextLeast, d.ContextMost = int32(get32(row, detailContext)), int32(get32(row, detailContext+4))
	}
	return d
}
