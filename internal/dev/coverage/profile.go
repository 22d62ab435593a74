package main

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// profile holds the blocks of coverage profiles, by file and position. A block
// of several test programs is covered if one of them has run it.
type profile map[string]block

type block struct {
	pkg        string
	statements int
	ran        bool
}

// tally is a number of statements.
type tally struct{ all, ran int }

func (t *tally) add(u tally) { t.all, t.ran = t.all+u.all, t.ran+u.ran }

func (t tally) percent() float64 {
	if t.all == 0 {
		return 100
	}
	return 100 * float64(t.ran) / float64(t.all)
}

func (t tally) String() string { return fmt.Sprintf("%.1f %%", t.percent()) }

// add adds the text of a coverage profile.
func (p profile) add(text string) error {
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "mode:") {
			continue
		}
		file, rest, found := strings.Cut(line, ":")
		var place string
		var statements, count int
		if _, err := fmt.Sscanf(rest, "%s %d %d", &place, &statements, &count); err != nil || !found {
			return fmt.Errorf("no line of a coverage profile: %q", line)
		}
		key := file + ":" + place
		p[key] = block{pkg: path.Dir(file), statements: statements, ran: p[key].ran || count > 0}
	}
	return nil
}

// packages returns the import paths of the blocks, in order.
func (p profile) packages() []string {
	paths := make(map[string]bool)
	for _, b := range p {
		paths[b.pkg] = true
	}
	return slices.Sorted(maps.Keys(paths))
}

// tally counts the statements of a package.
func (p profile) tally(pkg string) (t tally) {
	for _, b := range p {
		if b.pkg != pkg {
			continue
		}
		t.all += b.statements
		if b.ran {
			t.ran += b.statements
		}
	}
	return t
}
