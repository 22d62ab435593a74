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
	Text        *string  // instead of Value: words; SetText sets it
	Default     float64
	DefaultText string  // of Text
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
		switch {
		case t[i].Labels != nil:
			*t[i].Labels = Labels{}
		case t[i].Text != nil:
			*t[i].Text = t[i].DefaultText
		default:
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
		if p.Name != field || dotted != (p.Labels != nil) || p.Text != nil {
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
	return t.unknown(name)
}

// unknown is the error for a parameter that the table does not have.
func (t Table) unknown(name string) error {
	if len(t) == 0 {
		return errors.New("no parameter " + strconv.Quote(name) + "; there is none")
	}
	return errors.New("no parameter " + strconv.Quote(name) + "; there are " + t.names())
}

// maxText bounds a text in bytes.
const maxText = 256

// SetText sets the field of that name from a text, which has a number if the parameter is no Text. On
// an error nothing changes.
func (t Table) SetText(name, text string) error {
	for i := range t {
		p := &t[i]
		switch {
		case p.Name != name:
		case p.Text == nil:
			number, err := strconv.ParseFloat(text, 64)
			if err != nil {
				return errors.New(name + " is a number, not " + strconv.Quote(text))
			}
			return t.Set(name, number)
		case len(text) > maxText || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' || strings.ContainsRune("&=,?", r) }):
			return errors.New(name + " has at most " + strconv.Itoa(maxText) + " bytes of ASCII without & = , and ?, not " + strconv.Quote(text))
		default:
			*p.Text = strings.Join(strings.Fields(text), " ")
			return nil
		}
	}
	return t.unknown(name)
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
