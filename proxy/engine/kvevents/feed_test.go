package kvevents

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// notes is a feed that records each call as one line.
type notes struct{ lines []string }

func (n *notes) add(format string, args ...any) {
	n.lines = append(n.lines, fmt.Sprintf(format, args...))
}

func (n *notes) Stored(e *kvindex.Stored) (applied, refused int) {
	parent := "root"
	if e.HasParent {
		parent = fmt.Sprint(e.Parent)
	}
	line := fmt.Sprintf("store %s after %s: %v tokens %v by %d", tierName(e.Tier), parent, e.Hashes, e.Tokens, e.BlockTokens)
	if e.Lora != "" {
		line += " lora " + e.Lora
	}
	if e.Salt != "" {
		line += " salt " + e.Salt
	}
	n.lines = append(n.lines, line)
	return len(e.Hashes), 0
}

func (n *notes) Removed(tier kvindex.Tier, hashes []uint64) {
	n.add("remove %s: %v", tierName(tier), hashes)
}

func (n *notes) Moved(from, to kvindex.Tier, hashes []uint64) (refused int) {
	n.add("move %s to %s: %v", tierName(from), tierName(to), hashes)
	return 0
}

func (n *notes) Cleared() { n.add("clear") }

func (n *notes) take() []string {
	lines := n.lines
	n.lines = nil
	return lines
}

func tierName(t kvindex.Tier) string { return [...]string{"gpu", "cpu", "disk"}[t] }

// expect compares want with the lines recorded since the last call of expect.
func (n *notes) expect(t *testing.T, want ...string) {
	t.Helper()
	if got := n.take(); !slices.Equal(got, want) {
		t.Errorf("noted\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}
