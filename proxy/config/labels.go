package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
)

// Labels are the labels of an engine: names and values of the user's choice, for
// policies. The text has one label in each line, as "zone=a", ordered by name, so
// that equal labels are equal texts and an Engine is comparable. "": no labels.
type Labels string

// LabelsOf returns the labels with these names and values. CheckLabels reports
// whether a policy can get them.
func LabelsOf(labels map[string]string) Labels {
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		if text.Len() > 0 {
			text.WriteByte('\n')
		}
		text.WriteString(name + "=" + labels[name])
	}
	return Labels(text.String())
}

// Map returns the labels by their names; nil without labels.
func (l Labels) Map() map[string]string {
	if l == "" {
		return nil
	}
	labels := map[string]string{}
	for line := range strings.SplitSeq(string(l), "\n") {
		name, value, _ := strings.Cut(line, "=")
		labels[name] = value
	}
	return labels
}

// Detail returns the labels and the weight of e as policies get them, without
// counts. It leaves out labels that Check does not accept.
func (e *Engine) Detail() abi.Detail {
	d := abi.Detail{Weight: 1, Running: -1, Waiting: -1}
	if e.Weight > 0 {
		d.Weight = float32(e.Weight)
	}
	_ = d.SetLabels(e.Labels.Map())
	return d
}

// check returns why policies cannot get the labels.
func (l Labels) check() error {
	labels := l.Map()
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		if !isLabelText(name) || !isLabelText(labels[name]) {
			return fmt.Errorf("names and values have letters, digits and - _ . / : only, found %q = %q", name, labels[name])
		}
	}
	var d abi.Detail
	return d.SetLabels(labels)
}

func isLabelText(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_./:", r))
	})
}

// labels fills v from a table of texts.
func (d *decoder) labels(key string, datum any, v *Labels) {
	t, ok := datum.(map[string]any)
	if !ok {
		d.wrongType(key, "table", datum)
		return
	}
	labels := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(t)) {
		text, ok := t[name].(string)
		switch {
		case !ok:
			d.wrongType(joinKey(key, name), "string", t[name])
		case strings.ContainsAny(name+text, "=\n"):
			d.add(key, "names and values have letters, digits and - _ . / : only, found %q = %q", name, text)
		default:
			labels[name] = text
		}
	}
	*v = LabelsOf(labels)
}
