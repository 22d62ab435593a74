package conversation

import (
	"fmt"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

var epoch = time.UnixMilli(1_700_000_000_000)

const blockBytes = 4

// chain cuts a text into whole blocks, as the proxy does.
func chain(text string) []kvindex.Hash {
	return kvindex.AppendText(nil, kvindex.Seed("m", "", ""), []byte(text), blockBytes)
}

func prompt(text string) Query { return Query{Chain: chain(text)} }

func at(instance uint32) Target { return Target{Instance: instance, Rank: int32(instance) - 1} }

// serve calls Look and Record, and returns the result of Look.
func serve(t *Table, q Query, prefill, decode Target) Turn {
	turn := t.Look(q)
	t.Record(turn, prefill, decode, epoch)
	return turn
}

const system = "You are a helpful assistant, and brief. " // ten blocks

func TestTurnsByPrompt(t *testing.T) {
	table := New(100)
	first := system + "What is the capital of France?"
	second := first + " Paris." + " And of Spain?"
	third := second + " Madrid." + " And of Portugal?"

	a := serve(table, prompt(first), at(1), at(5))
	if a.Key == 0 || a.Number != 1 || a.Prefill != (Target{}) || a.Decode != (Target{}) || a.LastUse != 0 {
		t.Errorf("first turn %+v", a)
	}
	b := serve(table, prompt(second), at(1), at(6))
	if b.Key != a.Key || b.Number != 2 || b.Prefill != at(1) || b.Decode != at(5) || b.LastUse != epoch.UnixMilli() {
		t.Errorf("second turn %+v", b)
	}
	c := table.Look(prompt(third))
	if c.Key != a.Key || c.Number != 3 || c.Prefill != at(1) || c.Decode != at(6) {
		t.Errorf("third turn %+v", c)
	}
	if table.Len() != 1 {
		t.Errorf("got %d conversations", table.Len())
	}
}

func TestWhatNamesNothing(t *testing.T) {
	first := system + "What is the capital of France?"
	for _, tt := range []struct {
		name, earlier string
		query         Query
		number        int32
	}{
		{"shared blocks", first, prompt(system + "How tall is the Eiffel tower?"), 1},
		{"shared blocks, shorter", first, prompt(system + "How?"), 1},
		{"less than the earlier prompt", first, prompt(system + "What is the"), 1},
		{"another beginning", first, prompt("Now. " + first + " Paris. And Spain?"), 1},
		{"another model", first, Query{Chain: kvindex.AppendText(nil, kvindex.Seed("n", "", ""), []byte(first+" Paris. And of Spain?"), blockBytes)}, 1},
		{"an earlier prompt of one block", "Hi! ", prompt("Hi! How are you?"), 1},
		{"the form of a first turn", system, Query{Chain: chain(first), First: true}, 1},
		{"the same again", first, prompt(first), 1},
		{"the same again but for the partial block", first, prompt(first + "!"), 1},
		{"a block alone", first, prompt("Hi! "), 1},
		{"nothing whole", first, prompt("Hi"), 0},
		{"nothing whole in the form of a first turn", first, Query{First: true}, 1},
		{"nothing", first, Query{}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			table := New(10)
			serve(table, prompt(tt.earlier), at(1), at(2))
			got := table.Look(tt.query)
			if got.Number != tt.number || got.Prefill != (Target{}) || got.Decode != (Target{}) || got.LastUse != 0 {
				t.Errorf("got %+v, want turn %d without a home", got, tt.number)
			}
		})
	}
}

// Look must find the end of the earlier prompt at any position: at both sides of a
// window's border, and far from the end of the later prompt.
func TestPromptOfAnyLength(t *testing.T) {
	text := strings.Repeat("abcdefghijklmnopqrstuvwxyz.,", 200) // 1,400 blocks
	for _, n := range []int{1, 2, 3, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193, 640, 1000} {
		for _, more := range []int{1, 2, 63, 64, 65, 200} {
			table := New(10)
			serve(table, prompt(text[:n*blockBytes+1]), at(1), at(2))
			want := int32(2)
			if n < LeastBlocks {
				want = 1
			}
			if got := table.Look(prompt(text[:(n+more)*blockBytes])); got.Number != want {
				t.Errorf("%d blocks and %d more: got turn %d, want %d", n, more, got.Number, want)
			}
		}
	}
}

func TestTheLongestPromptCounts(t *testing.T) {
	table := New(10)
	serve(table, prompt(system), at(1), at(1))
	deep := system + "What is the capital of France?"
	branch := table.Look(Query{Chain: chain(deep), First: true})
	table.Record(branch, at(3), at(3), epoch)
	if got := table.Look(prompt(deep + " Paris. And of Spain?")); got.Key != branch.Key || got.Number != 2 || got.Prefill != at(3) {
		t.Errorf("got %+v, want turn 2 of %x", got, branch.Key)
	}
}

func TestTurnsByID(t *testing.T) {
	table := New(10)
	q := Query{Scope: 1, ID: "c-1", Chain: chain(system + "What is the capital?")}
	a := serve(table, q, at(1), at(2))
	if a.Key&1 == 0 || a.Number != 1 || a.Prefill != (Target{}) {
		t.Errorf("first turn %+v", a)
	}
	// With an id the prompt does not matter.
	b := serve(table, Query{Scope: 1, ID: "c-1"}, Target{}, at(4))
	if b.Key != a.Key || b.Number != 2 || b.Prefill != at(1) || b.Decode != at(2) {
		t.Errorf("second turn %+v", b)
	}
	c := table.Look(q)
	if c.Number != 3 || c.Prefill != at(1) || c.Decode != at(4) {
		t.Errorf("third turn %+v: a phase without a target must keep its home", c)
	}
	for name, other := range map[string]Query{
		"another id":              {Scope: 1, ID: "c-12"},
		"another model":           {Scope: 2, ID: "c-1"},
		"the prompt without id":   {Chain: q.Chain},
		"going on without the id": prompt(system + "What is the capital? Paris. And Spain?"),
	} {
		if got := table.Look(other); got.Number != 1 || got.Key == a.Key || got.Prefill != (Target{}) {
			t.Errorf("%s: table.Look(other) = %+v", name, got)
		}
	}
}

func TestRecordTwice(t *testing.T) {
	for name, first := range map[string]Query{"id": {ID: "c"}, "prompt": prompt(system + "What is the capital?")} {
		t.Run(name, func(t *testing.T) {
			table := New(10)
			turn := table.Look(first)
			table.Record(turn, at(1), at(2), epoch)
			table.Record(turn, at(3), at(4), epoch.Add(time.Second)) // the second placement of the same turn
			next := first
			if first.ID == "" {
				next = prompt(system + "What is the capital? Paris. And Spain?")
			}
			if got := table.Look(next); got.Number != 2 || got.Prefill != at(3) || got.Decode != at(4) || got.LastUse != epoch.UnixMilli()+1000 {
				t.Errorf("table.Look(next) = %+v", got)
			}
		})
	}
	t.Run("nothing known", func(t *testing.T) {
		table := New(10)
		turn := table.Look(Query{})
		table.Record(turn, at(1), at(2), epoch)
		turn = table.Look(prompt("Hi! "))
		table.Record(turn, at(1), at(2), epoch)
		if table.Len() != 0 {
			t.Error("a turn without id and blocks was recorded")
		}
	})
}

// A repeated later turn has the same number and has a home.
func TestSameTurnAgain(t *testing.T) {
	table := New(10)
	first := system + "What is the capital of France?"
	second := prompt(first + " Paris. And of Spain?")
	serve(table, prompt(first), at(1), at(2))
	serve(table, second, at(3), at(4))
	for range 3 {
		if got := serve(table, second, at(3), at(4)); got.Number != 2 || got.Prefill != at(3) || got.Decode != at(4) {
			t.Errorf("serve(table, second, at(3), at(4)) = %+v", got)
		}
	}
}

func TestBranches(t *testing.T) {
	table := New(100)
	first := system + "Tell me a joke."
	root := serve(table, prompt(first), at(1), at(2))
	for i := range MaxBranches {
		answer := fmt.Sprintf("%s Joke number %d. Another?", first, i)
		got := serve(table, prompt(answer), at(uint32(10+i)), at(2))
		if got.Key != root.Key || got.Number != 2 || got.Prefill != at(1) {
			t.Errorf("branch %d: %+v", i, got)
		}
		// Each branch continues from its own home.
		if got := table.Look(prompt(answer + " Oh. And one more?")); got.Number != 3 || got.Prefill != at(uint32(10+i)) {
			t.Errorf("continuation of branch %d: %+v", i, got)
		}
	}
	for i := range 3 {
		got := serve(table, prompt(fmt.Sprintf("%s A joke too many: %d.", first, i)), at(9), at(2))
		if got.Key == root.Key || got.Number != 1 || got.Prefill != (Target{}) {
			t.Errorf("branch %d above the limit: %+v", i, got)
		}
	}
	// A prompt that was continued before can be continued again.
	if got := table.Look(prompt(first + " Joke number 2. Another? Yes.")); got.Number != 3 {
		t.Errorf("continuation of a known branch: %+v", got)
	}
}

// After a warm-up request with only the shared system prompt, the first turns of other
// clients must not all get the home of that request.
func TestSharedPromptAlone(t *testing.T) {
	for _, first := range []bool{false, true} {
		table := New(1000)
		serve(table, prompt(system), at(1), at(1))
		homes := 0
		for i := range 96 {
			q := prompt(fmt.Sprintf("%sQuestion %03d of many.", system, i))
			q.First = first
			if got := serve(table, q, at(uint32(i%8)+1), at(1)); got.Prefill != (Target{}) {
				homes++
			}
		}
		if want := map[bool]int{false: MaxBranches, true: 0}[first]; homes != want {
			t.Errorf("First %v: %d of 96 first turns were given a home, want %d", first, homes, want)
		}
	}
}

func TestLeastRecentlyUsed(t *testing.T) {
	table := New(3)
	id := func(s string) Query { return Query{ID: s} }
	for _, s := range []string{"a", "b", "c", "a", "d"} { // b is dropped
		serve(table, id(s), at(1), at(1))
	}
	for s, want := range map[string]int32{"a": 3, "b": 1, "c": 2, "d": 2} {
		if got := table.Look(id(s)); got.Number != want {
			t.Errorf("%s: turn %d, want %d", s, got.Number, want)
		}
	}
	if table.Len() != 3 {
		t.Errorf("got %d conversations", table.Len())
	}
}

// A long conversation uses one entry and displaces no other conversation.
func TestLongConversationTakesOnePlace(t *testing.T) {
	table := New(3)
	serve(table, Query{ID: "a"}, at(1), at(1))
	serve(table, Query{ID: "b"}, at(1), at(1))
	text := system
	for turn := range 50 {
		text += fmt.Sprintf("This is what turn %d says. ", turn)
		if got := serve(table, prompt(text), at(1), at(1)); got.Number != int32(turn)+1 {
			t.Fatalf("turn %d has number %d", turn+1, got.Number)
		}
	}
	if a, b := table.Look(Query{ID: "a"}), table.Look(Query{ID: "b"}); a.Number != 2 || b.Number != 2 || table.Len() != 3 {
		t.Errorf("turns %+v, %+v; %d conversations", a, b, table.Len())
	}
}

func TestKeyText(t *testing.T) {
	for k, want := range map[Key]string{0: "", 1: "0000000000000001", 0xFEDCBA9876543210: "fedcba9876543210"} {
		got := string(k.AppendText(nil))
		if got != want {
			t.Errorf("%d: string(k.AppendText(nil)) = %q, want %q", uint64(k), got, want)
		}
	}
}

func TestValues(t *testing.T) {
	table := New(2)
	get := func(key string) string {
		v, ok := table.Value([]byte("+"), key)
		if !ok {
			v = []byte("none")
		}
		return string(v)
	}
	set := func(key, value string) {
		if err := table.SetValue(key, []byte(value)); err != nil {
			t.Error(err)
		}
	}
	set("a", strings.Repeat("x", MaxValue))
	set("a", "1")
	set("b", "")
	if a, b, c := get("a"), get("b"), get("c"); a != "+1" || b != "+" || c != "none" {
		t.Errorf("%s %s %s", a, b, c)
	}
	get("a")
	set("c", "3") // b is the least recently used
	if a, b, c := get("a"), get("b"), get("c"); a != "+1" || b != "none" || c != "+3" {
		t.Errorf("%s %s %s", a, b, c)
	}
	if err := table.SetValue("a", make([]byte, MaxValue+1)); err != ErrValueSize || get("a") != "+1" {
		t.Errorf(`table.SetValue("a", make([]byte, MaxValue+1)) = %v, %s`, err, get("a"))
	}
}

func TestBytesPerEntry(t *testing.T) {
	for _, capacity := range []int{1, 1000, 1 << 16, DefaultCapacity} {
		table := New(capacity)
		for i := range 3 * capacity {
			serve(table, Query{Chain: []kvindex.Hash{1, kvindex.Hash(3*i + 7)}}, at(1), at(1))
			serve(table, Query{Chain: []kvindex.Hash{1, kvindex.Hash(3*i + 7), kvindex.Hash(3*i + 8)}}, at(1), at(1))
		}
		bytes := cap(table.entries)*int(unsafe.Sizeof(entry{})) + cap(table.lists.links)*int(unsafe.Sizeof(link{})) +
			8*(len(table.index.cells)+len(table.marks.cells)+len(table.blocks.cells)+cap(table.free)/2)
		if capacity > 1 && bytes > 2*capacity*BytesPerEntry+1024 {
			t.Errorf("%d conversations take %d bytes, more than %d an entry", capacity, bytes, BytesPerEntry)
		}
		if len(table.entries) > 2*capacity+lists || table.Len() != capacity {
			t.Errorf("capacity %d: %d entries, %d conversations", capacity, len(table.entries), table.Len())
		}
	}
}

func TestNothingIsAllocated(t *testing.T) {
	table := New(64)
	long := make([]kvindex.Hash, 2048)
	for i := range long {
		long[i] = kvindex.Hash(i + 1)
	}
	round := func() {
		for i := range 100 {
			c := long[:1024+i]
			serve(table, Query{Chain: c, ID: "c"}, at(1), at(2))
			serve(table, Query{Chain: c}, at(1), at(2))
			serve(table, Query{Chain: c, First: true}, at(1), at(2))
		}
	}
	round()
	if n := testing.AllocsPerRun(5, round); n != 0 {
		t.Errorf("got %v allocations", n)
	}
}

// TestParents: the first turn of a conversation with an id has the home of its parent. It
// stays turn 1 with a key of its own, and later turns have their own home.
func TestParents(t *testing.T) {
	table := New(10)
	parent := serve(table, Query{Scope: 1, ID: "root"}, at(1), at(2))
	child := Query{Scope: 1, ID: "child", Parent: "root"}
	got := table.Look(child)
	if got.Number != 1 || got.Prefill != at(1) || got.Decode != at(2) || got.LastUse != 0 || got.Key == parent.Key {
		t.Errorf("child: got %+v", got)
	}
	table.Record(got, at(3), at(4), epoch)
	if got := table.Look(child); got.Number != 2 || got.Prefill != at(3) || got.Decode != at(4) {
		t.Errorf("second turn of the child: got %+v", got)
	}
	if got := table.Look(Query{Scope: 1, ID: "root"}); got.Number != 2 || got.Prefill != at(1) {
		t.Errorf("parent after its child: got %+v", got)
	}
	for name, q := range map[string]Query{
		"unknown parent":           {Scope: 1, ID: "a", Parent: "b"},
		"its own parent":           {Scope: 1, ID: "a", Parent: "a"},
		"parent of another model":  {Scope: 2, ID: "a", Parent: "root"},
		"no parent":                {Scope: 1, ID: "a"},
		"parent without an own id": {Scope: 1, Parent: "root", First: true},
	} {
		if got := table.Look(q); got.Prefill != (Target{}) || got.Decode != (Target{}) || got.Number > 1 {
			t.Errorf("%s: got %+v", name, got)
		}
	}
	for n := range 10 {
		serve(table, Query{ID: string(rune('a' + n))}, at(5), at(5))
	}
	if got := table.Look(Query{Scope: 1, ID: "late", Parent: "root"}); got.Prefill != (Target{}) {
		t.Errorf("parent that the table has dropped: got %+v", got)
	}
}
