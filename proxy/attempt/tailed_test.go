package attempt

import (
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/continuation"
)

// TestTailed: a stream may leave an engine that drains when its last events have enough content to
// find a seam, and an unresponsive engine, if that is permitted, as soon as it has content.
func TestTailed(t *testing.T) {
	const content, thought = `data: {"choices":[{"index":0,"delta":{"content":"x"},"token_ids":[5]}]}` + "\n\n", `data: {"choices":[{"index":0,"delta":{"reasoning":"x"},"token_ids":[5]}]}` + "\n\n"
	many := tailSize/len(content) + 1
	for _, moves := range []bool{false, true} {
		k := keptForTest(t)
		k.Moves = moves
		feed := func(events string) {
			for event := range strings.SplitAfterSeq(events, "\n\n") {
				if event != "" {
					k.keep([]byte(event))
				}
			}
		}
		check := func(when string, tailed, movable bool) {
			t.Helper()
			if k.tailed() != tailed || k.movable() != movable {
				t.Errorf("moves %v, %s: tailed %v, movable %v", moves, when, k.tailed(), k.movable())
			}
		}
		feed(strings.Repeat(content, 2*many))
		check("not open", false, false)
		k.content, k.written, k.before = false, 0, 0
		k.open.Store(isOpen)
		feed(strings.Repeat(thought, 2*many))
		check("reasoning", false, false)
		feed(content)
		check("its first content", false, moves)
		feed(strings.Repeat(content, many))
		check("much content", true, moves)
		k.Resume(new(continuation.Splicer), 0)
		k.splicer = nil
		check("broken off", false, false)
		k.open.Store(isOpen)
		k.written, k.before = 0, 0
		feed(strings.Repeat(content, many+1))
		check("continued", true, moves)
		k.Lose(continuation.ToolCalls)
		check("lost", false, false)
	}
	if (*Kept)(nil).tailed() {
		t.Error("a stream of which nothing is kept may move")
	}
}
