package core

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestVocabulary(t *testing.T) {
	if want := len(wordStarts) * len(wordEnds); len(WordTokens) != want || want != 1024 {
		t.Fatalf("%d different words of %d", len(WordTokens), want)
	}
	multibyte := 0
	for i := range 1024 {
		text := WordText(i)
		if !utf8.ValidString(text) || text[0] != ' ' || strings.ContainsAny(text[1:], " \n\t") {
			t.Errorf("invalid text of word %q", text)
		}
		if len(text) > utf8.RuneCountInString(text) {
			multibyte++
		}
	}
	if multibyte < 300 {
		t.Errorf("only %d words have multibyte letters", multibyte)
	}
}

func TestTokenize(t *testing.T) {
	tests := []struct {
		name, text string
		tokens     []Token
	}{
		{"empty", "", []Token{}},
		{"one byte", "a", []Token{'a'}},
		{"two bytes", "ab", []Token{1<<16 | 'a'<<8 | 'b'}},
		{"four bytes", "abcd", []Token{1<<24 | 'a'<<16 | 'b'<<8 | 'c', 'd'}},
		{"word of the vocabulary", " baban", []Token{1000}},
		{"the same without its space", "baban", []Token{1<<24 | 'b'<<16 | 'a'<<8 | 'b', 1<<16 | 'a'<<8 | 'n'}},
		{"words", " baban bacor\n babanx", []Token{1000, 1001, '\n', 1<<24 | ' '<<16 | 'b'<<8 | 'a', 1<<24 | 'b'<<16 | 'a'<<8 | 'n', 'x'}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := Tokenize(tt.text)
			if len(got) != len(tt.tokens) {
				t.Fatalf("tokenize(tt.text) = %v, want %v", got, tt.tokens)
			}
			for i := range got {
				if got[i] != tt.tokens[i] || !got[i].Valid() {
					t.Fatalf("got %v, want %v", got, tt.tokens)
				}
			}
		})
	}
}

// FuzzTokenize: decoding an encoded text gives the same text, and the encoding
// of a history does not change when a turn is added.
func FuzzTokenize(f *testing.F) {
	f.Add("", "")
	f.Add("hello  world\n", " baban 世界\t\xff")
	f.Add("<|user|>é\n<|assistant|> pakirx", "\n<|user|>more")
	f.Fuzz(func(t *testing.T, a, b string) {
		history := Tokenize(a)
		if got := Detokenize(history); got != a {
			t.Fatalf("%q is decoded as %q", a, got)
		}
		for _, id := range history {
			if !id.Valid() {
				t.Fatalf("token %d of %q", id, a)
			}
		}
		longer := Tokenize(a + "\n" + b)
		for i, id := range history {
			if longer[i] != id {
				t.Fatalf("token %d of %q is %d, then %d", i, a, id, longer[i])
			}
		}
	})
}

func TestEOSMark(t *testing.T) {
	for prompt, want := range map[string]int{
		"": 0, "hello": 0, "<eos1>": 1, "a <eos12> b": 12, "<eos3> <eos4>": 4, "<eos>": 0, "<eos0>": 0, "<eos-1>": 0, "<eos7": 0, "<eosx>": 0,
	} {
		if got := eosMark(prompt); got != want {
			t.Errorf("%q: eosMark(prompt) = %d, want %d", prompt, got, want)
		}
	}
}

// TestKVDependsOnEverything: one changed token changes the KV of all later
// ones, one changed KV entry the choice of the next token (with room for the
// 1024 words to coincide).
func TestKVDependsOnEverything(t *testing.T) {
	w := newWeights("sim")
	if w == newWeights("other") {
		t.Error("models share weights")
	}
	const n = 64
	chain := func(change int) (entries []Kv) {
		last := w.Root()
		for i := range n {
			id := Token(i)
			if i == change {
				id += 300
			}
			last = w.Next(last, id)
			entries = append(entries, last)
		}
		return entries
	}
	right := chain(-1)
	same := 0
	for change := range n {
		wrong := chain(change)
		for i := range n {
			if (right[i] == wrong[i]) != (i < change) {
				t.Fatalf("token %d changed, KV %d", change, i)
			}
		}
		var a, b attention
		for i := range n {
			a = a.add(right[i])
			entry := right[i]
			if i == change {
				entry ^= 1
			}
			b = b.add(entry)
		}
		if a == b {
			t.Errorf("KV %d is not seen", change)
		}
		if word(a.sample(0, 0)) == word(b.sample(0, 0)) {
			same++
		}
	}
	if same > 2 {
		t.Errorf("%d of %d wrong entries gave the same token", same, n)
	}
}

func TestWholeRunes(t *testing.T) {
	for text, want := range map[string]int{
		"": 0, "a": 1, "é": 2, "é"[:1]: 0, "a世": 4, "a世"[:3]: 1, "🙂"[:3]: 0, "x🙂"[:2]: 1, "\xff": 1, "a\x80\x80\x80\x80": 5,
	} {
		if got := wholeRunes([]byte(text)); got != want {
			t.Errorf("%q: wholeRunes([]byte(text)) = %d, want %d", text, got, want)
		}
	}
}
