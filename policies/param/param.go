// Package param describes, sets and checks the parameters of a policy. The
// configuration, the documents and the policy itself use the same table.
package param

import (
	"errors"
	"strconv"
	"strings"
)

// Param is one parameter: a field of a policy's Params with its description. A parameter with
// Labels has a number for each label instead of one Value, and the default 0.
type Param struct {
	Name        string
	Value       *float64 // the field
	Labels      *Labels  // instead of Value
	Default     float64
	Least, Most float64 // the bounds, both included
	Unit        string  // "" for a plain number
	Meaning     string  // description for operators, without a verb and a full stop
}

// Table describes the parameters of one policy. It points to the fields of one
// Params.
type Table []Param

// Reset sets every field to its default.
func (t Table) Reset() {
	for i := range t {
		if t[i].Labels != nil {
			*t[i].Labels = Labels{}
		} else {
			*t[i].Value = t[i].Default
		}
	}
}

// Set sets the field of that name, which is followed by a dot and the name of a label if the
// parameter has Labels. On an error, which names the unknown
// parameter or the bounds that the value exceeds, nothing changes.
func (t Table) Set(name string, value float64) error {
	field, label, dotted := strings.Cut(name, ".")
	for i := range t {
		p := &t[i]
		if p.Name != field || dotted != (p.Labels != nil) {
			continue
		}
		if !(value >= p.Least && value <= p.Most) { // false for NaN, too
			return errors.New(name + " is " + Format(p.Least) + " to " + Format(p.Most) + ", not " + Format(value))
		}
		if p.Labels != nil {
			return p.Labels.set(label, value)
		}
		*p.Value = value
		return nil
	}
	return errors.New("no parameter " + strconv.Quote(name) + "; there are " + t.names())
}

// Key returns the name of the parameter in lists, with .LABEL if it has Labels.
func (p *Param) Key() string {
	if p.Labels != nil {
		return p.Name + ".LABEL"
	}
	return p.Name
}

func (t Table) names() string {
	var names []string
	for i := range t {
		names = append(names, t[i].Key())
	}
	return strings.Join(names, ", ")
}

// Format writes a value so that strconv.ParseFloat reads the same one.
func Format(value float64) string { return strconv.FormatFloat(value, 'g', -1, 64) }
