package config

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// Labels are the labels of an engine: names and values of the user's choice, for
// policies. The text has one label in each line, as "zone=a", ordered by name, so
// that equal labels are equal texts and an Engine is comparable. "": no labels.
type Labels string

// Bounds of an engine's labels, those of the contract of policies.
const (
	MaxLabelSize = 63 // bytes of a name or a value
	OtherLabels  = 5  // besides zone, revision and hardware
)

// LabelsOf returns the labels with these names and values.
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

// Same reports whether both have each of these labels, with the same value.
func (l Labels) Same(other Labels, names []string) bool {
	if len(names) == 0 {
		return true
	}
	mine, others := l.Map(), other.Map()
	return !slices.ContainsFunc(names, func(name string) bool { return mine[name] == "" || mine[name] != others[name] })
}

// check returns why policies cannot get the labels.
func (l Labels) check() error {
	labels := l.Map()
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		value := labels[name]
		switch {
		case !isLabelText(name) || !isLabelText(value):
			return fmt.Errorf("names and values have letters, digits and - _ . / : only, found %q = %q", name, value)
		case name == "" || value == "" || len(name) > MaxLabelSize || len(value) > MaxLabelSize:
			return fmt.Errorf("names and values have 1 to %d bytes, found %q = %q", MaxLabelSize, name, value)
		}
	}
	if n := others(labels); n > OtherLabels {
		return fmt.Errorf("at most %d labels besides zone, revision and hardware, found %d", OtherLabels, n)
	}
	return nil
}

// others returns the number of labels besides zone, revision and hardware.
func others(labels map[string]string) (n int) {
	for name := range labels {
		if name != "zone" && name != "revision" && name != "hardware" {
			n++
		}
	}
	return n
}

func isLabelText(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_./:", r))
	})
}

// podLabel is the form of the names of labels in Kubernetes: a name with an optional prefix.
var podLabel = regexp.MustCompile(`^([a-zA-Z0-9][-a-zA-Z0-9.]{0,252}/)?[a-zA-Z0-9]([-_.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?$`)

// PodLabel splits an entry of discovery.kubernetes.labels into the name of the engine's label and the
// name of the pod's label.
func PodLabel(entry string) (name, pod string) {
	name, pod, renamed := strings.Cut(entry, "=")
	if !renamed {
		pod = name
	}
	return name, pod
}

// podLabels checks discovery.kubernetes.labels. With the labels of each pattern, they must fit into the
// frames of policies: the values of labels in Kubernetes have at most MaxLabelSize bytes.
func (k *checker) podLabels(d DiscoveryKubernetes) {
	all := map[string]string{}
	for i, entry := range d.Labels {
		key := indexKey("discovery.kubernetes.labels", i)
		name, pod := PodLabel(entry)
		switch {
		case name == "" || len(name) > MaxLabelSize || !isLabelText(name):
			k.add(key, "must begin with the name of a label: 1 to %d letters, digits and - _ . / :, found %q", MaxLabelSize, name)
		case !podLabel.MatchString(pod):
			k.add(key, "want NAME or NAME=LABEL, with a label in the form of Kubernetes, found %q", pod)
		case all[name] != "":
			k.add(key, "occurs twice: %q", name)
		default:
			all[name] = pod
		}
	}
	for _, e := range slices.Concat([]Engine{{}}, d.Engines, d.Pools) {
		union := maps.Clone(all)
		maps.Copy(union, e.Labels.Map())
		if n := others(union); n > OtherLabels {
			k.add("discovery.kubernetes.labels", "at most %d labels besides zone, revision and hardware, found %d with those of the engine %q", OtherLabels, n, e.Name)
			return
		}
	}
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

// sameLabels checks pairs.same_labels, and that each engine which can only take one leg of two
// has these labels.
func (k *checker) sameLabels() {
	sound := true
	for i, name := range k.config.Pairs.SameLabels {
		key := indexKey("pairs.same_labels", i)
		switch {
		case name == "" || len(name) > MaxLabelSize || !isLabelText(name):
			sound = false
			k.add(key, "must be the name of a label: 1 to %d letters, digits and - _ . / :, found %q", MaxLabelSize, name)
		case slices.Contains(k.config.Pairs.SameLabels[:i], name):
			k.add(key, "occurs twice: %q", name)
		}
	}
	for i := range k.config.Engines {
		e := &k.config.Engines[i]
		if !sound || e.Role != RolePrefill && e.Role != RoleDecode { // then the names are wrong, or the engine answers alone
			continue
		}
		labels := e.Labels.Map()
		for _, name := range k.config.Pairs.SameLabels {
			if labels[name] == "" {
				k.add(indexKey("engine", i)+".labels", "lacks the label %q of pairs.same_labels, so that the engine can never serve a request", name)
			}
		}
	}
}
