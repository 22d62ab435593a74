package gaps

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// ending returns an answer that called these tools.
func ending(tools ...string) (e Ending) {
	for _, tool := range tools {
		e.Call([]byte(tool))
	}
	return e
}

// TestFacts: the gaps of a conversation, of a tool and of all turns are those of turns that ended
// in the same way.
func TestFacts(t *testing.T) {
	table := New()
	search, shell := Turn{1, ending("search")}, Turn{2, ending("shell")}
	for range 9 {
		table.Returned(search, 100*time.Millisecond)
		table.Returned(shell, 30*time.Second)
	}
	table.Lost(shell)
	table.Returned(Turn{Conversation: 1}, time.Minute) // an answer without a tool
	quick := abi.Gaps{Turns: 9, Back: 1, P50: 128, P75: 128, P90: 128, P95: 128, P99: 128}
	slow := abi.Gaps{Turns: 10, Back: 0.9, P50: 32768, P75: 32768, P90: 32768, P95: 32768, P99: 32768}
	all := abi.Gaps{Turns: 19, Back: float32(18) / 19, P50: 128, P75: 32768, P90: 32768, P95: 32768, P99: 32768}
	minute := abi.Gaps{Turns: 1, Back: 1, P50: 65536, P75: 65536, P90: 65536, P95: 65536, P99: 65536}
	for name, tt := range map[string]struct {
		turn Turn
		want abi.RetainFacts
	}{
		"search":               {search, abi.RetainFacts{ToolCall: true, Conversation: quick, Tools: quick, All: all}},
		"shell":                {shell, abi.RetainFacts{ToolCall: true, Conversation: slow, Tools: slow, All: all}},
		"both":                 {Turn{0, ending("search", "shell")}, abi.RetainFacts{ToolCall: true, Tools: slow, All: all}},
		"unknown":              {Turn{3, ending("other")}, abi.RetainFacts{ToolCall: true, All: all}},
		"tool without a name":  {Turn{0, ending("")}, abi.RetainFacts{ToolCall: true, All: all}},
		"text":                 {Turn{Conversation: 1}, abi.RetainFacts{Conversation: minute, All: minute}},
		"text of another name": {Turn{Conversation: 2}, abi.RetainFacts{All: minute}},
	} {
		got := abi.RetainFacts{Conversation: slow, Tools: slow}
		if table.Facts(tt.turn, &got); got != tt.want {
			t.Errorf("%s:\n%+v\nwant\n%+v", name, got, tt.want)
		}
	}
}

// TestBuckets: each gap is in the first bucket whose limit it does not exceed, except that the last
// bucket has no limit.
func TestBuckets(t *testing.T) {
	for ms := range 70_000 {
		gap := time.Duration(ms) * time.Millisecond
		b := bucketOf(gap)
		if float32(ms) > limitMillis(b) || b > 0 && float32(ms) <= limitMillis(b-1) {
			t.Fatalf("a gap of %v is in bucket %d, up to %v ms", gap, b, limitMillis(b))
		}
	}
	for gap, want := range map[time.Duration]int{-time.Second: 0, 16*time.Millisecond + 1: 1, 500 * time.Second: 30, 24 * time.Hour: buckets - 1} {
		if got := bucketOf(gap); got != want {
			t.Errorf("a gap of %v is in bucket %d, want %d", gap, got, want)
		}
	}
}

// TestOldTurnsFade: after a change of the gaps, the new gaps soon decide.
func TestOldTurnsFade(t *testing.T) {
	table := New()
	turn := Turn{7, ending("build")}
	for range 10_000 {
		table.Returned(turn, time.Minute)
	}
	var f abi.RetainFacts
	for range 3 * limitOfAll {
		table.Returned(turn, time.Second)
	}
	table.Facts(turn, &f)
	for name, g := range map[string]abi.Gaps{"conversation": f.Conversation, "tools": f.Tools, "all": f.All} {
		if g.P90 != 1024 {
			t.Errorf("%s: %+v", name, g)
		}
	}
	if f.Conversation.Turns >= limitOfConversation || f.Tools.Turns >= limitOfTool || f.All.Turns >= limitOfAll {
		t.Errorf("the counts are not bounded: %+v", f)
	}
}

// TestBounds: a table forgets the conversations and tools that were not used for the longest time.
func TestBounds(t *testing.T) {
	table := New()
	for i := range uint64(MaxConversations) {
		table.Lost(Turn{i + 1, Ending{true, []uint64{i + 1}}})
	}
	table.Lost(Turn{Conversation: 1})
	table.Lost(Turn{Conversation: MaxConversations + 1})
	if n := len(table.conversations.items); n != MaxConversations || table.conversations.order.Len() != n {
		t.Errorf("%d conversations", n)
	}
	if n := len(table.tools.items); n != MaxTools {
		t.Errorf("%d tools", n)
	}
	if table.conversations.find(1) == nil || table.conversations.find(2) != nil || table.conversations.find(MaxConversations+1) == nil {
		t.Error("the table does not keep the most recently used conversations")
	}
	e := ending("a", "b", "c", "a", "d", "e")
	if len(e.Tools) != MaxNames {
		t.Errorf("%d tools of an answer", len(e.Tools))
	}
}

func TestConversationOf(t *testing.T) {
	numbers := map[uint64]bool{}
	for _, key := range [][2]string{{"m", "a"}, {"n", "a"}, {"m", "b"}, {"m", "a"}} {
		numbers[ConversationOf(key[0], key[1])] = true
	}
	if len(numbers) != 3 || numbers[0] || ConversationOf("m", "") != 0 {
		t.Errorf("numbers %v", numbers)
	}
}

func TestConcurrentUse(t *testing.T) {
	table := New()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			var f abi.RetainFacts
			for n := range uint64(2000) {
				turn := Turn{n % 50, ending(fmt.Sprint(n % 7))}
				table.Returned(turn, time.Duration(i)*time.Second)
				table.Facts(turn, &f)
			}
		})
	}
	wg.Wait()
	var f abi.RetainFacts
	if table.Facts(Turn{1, ending("1")}, &f); f.All.Back != 1 || f.Conversation.Turns == 0 || f.Tools.Turns == 0 {
		t.Errorf("%+v", f)
	}
}
