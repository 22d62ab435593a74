package param

import (
	"errors"
	"slices"
	"strconv"

	"github.com/pdproxy/pdproxy/abi"
)

// Labels is a number for each of several labels of engines: a parameter with the name of the
// label behind a dot, such as label_micros.zone. A label without a number has the number 0.
type Labels struct {
	Names  []uint32  // abi.LabelIDs
	Values []float64 // above 0
}

// MaxLabels is the number of labels that an engine can have.
const MaxLabels = abi.OtherLabels + 3

// set stores the number of a label.
func (l *Labels) set(label string, value float64) error {
	if label == "" || len(label) > abi.MaxLabelSize {
		return errors.New("the name of a label has 1 to " + strconv.Itoa(abi.MaxLabelSize) + " bytes, found " + strconv.Quote(label))
	}
	id := abi.LabelID(label)
	if i := slices.Index(l.Names, id); i >= 0 {
		l.Names, l.Values = slices.Delete(l.Names, i, i+1), slices.Delete(l.Values, i, i+1)
	}
	if value == 0 {
		return nil
	}
	if len(l.Names) == MaxLabels {
		return errors.New("at most " + strconv.Itoa(MaxLabels) + " labels")
	}
	l.Names, l.Values = append(l.Names, id), append(l.Values, value)
	return nil
}
