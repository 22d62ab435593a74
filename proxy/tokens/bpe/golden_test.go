package bpe

import (
	"bufio"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// golden is one line of the output of testdata/golden.py: a text and its ids from the
// tokenizers library, with and without the special tokens.
type golden struct {
	Text       string
	IDs, Plain []uint32
}

func load(t testing.TB, name string) *Tokenizer {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	tk, err := Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return tk
}

func goldens(t testing.TB, file string) []golden {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var all []golden
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var g golden
		if err := json.Unmarshal(lines.Bytes(), &g); err != nil {
			t.Fatal(err)
		}
		all = append(all, g)
	}
	if err := lines.Err(); err != nil || len(all) == 0 {
		t.Fatalf("%d lines of %s: %v", len(all), file, err)
	}
	return all
}

var families = []string{"gpt2", "llama3", "qwen", "o200k", "deepseek", "starcoder"}

func TestIDsAreThoseOfTheLibrary(t *testing.T) {
	for _, name := range families {
		t.Run(name, func(t *testing.T) {
			tk := load(t, name)
			all := goldens(t, filepath.Join("testdata", name+".golden"))
			if more := os.Getenv("BPE_GOLDEN"); more != "" {
				all = append(all, goldens(t, filepath.Join(more, name+".golden"))...)
			}
			for range 2 { // the second round uses the cache of words
				for _, g := range all {
					ids, err := tk.Append(nil, g.Text, true)
					if err == errMarks && name == "qwen" && strings.ContainsFunc(g.Text, isRecent) {
						continue
					}
					if err != nil || !slices.Equal(ids, g.IDs) {
						t.Fatalf("%q (%v)\n got %d\nwant %d", g.Text, err, ids, g.IDs)
					}
					if ids, err = tk.Append(ids, g.Text, false); err != nil || !slices.Equal(ids[len(g.IDs):], g.Plain) {
						t.Fatalf("%q without special tokens (%v)\n got %d\nwant %d", g.Text, err, ids[len(g.IDs):], g.Plain)
					}
				}
			}
		})
	}
}

func TestMergesByScanAndByQueueAgree(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	tk := load(t, "deepseek")
	for range 3000 {
		word := make([]byte, 2+r.IntN(80))
		for i := range word {
			word[i] = "  aethionrs="[r.IntN(12)]
		}
		var ids [2][]uint32
		for i, merge := range []func(*encoder){(*encoder).mergeByScan, (*encoder).mergeByQueue} {
			e := encoder{t: tk}
			e.start(string(word))
			merge(&e)
			e.finish()
			ids[i] = e.dst
		}
		if !slices.Equal(ids[0], ids[1]) {
			t.Fatalf("%q: %d by scan, %d by queue", word, ids[0], ids[1])
		}
	}
}

func TestTextsOfUncertainIDsAreRefused(t *testing.T) {
	tk := load(t, "qwen")
	for _, tt := range []struct {
		name, text string
		want       error
	}{
		{"broken UTF-8", "a\xffb", errUTF8},
		{"cut off", "caf\xc3", errUTF8},
		{"a surrogate", "\xed\xa0\x80", errUTF8},
		{"not assigned", "a\u0378b", errUnknown},
		{"a noncharacter", "\U0010ffff", errUnknown},
		{"a wall of marks", "e" + strings.Repeat("\u0301", 40), errMarks},
		{"a mark of Unicode 14", "a\u0c3c", errMarks},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if ids, err := tk.Append([]uint32{1}, tt.text, true); err != tt.want || len(ids) != 1 {
				t.Errorf("got %d, %v", ids, err)
			}
		})
	}
	if ids, err := tk.Append(nil, "a\u034fb", true); err != nil || len(ids) == 0 {
		t.Errorf("a text with a grapheme joiner: got ids %v, error %v", ids, err)
	}
}

func TestFilesThatAreNotUnderstoodAreRefused(t *testing.T) {
	raw, err := os.ReadFile("testdata/llama3.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, old, new, want string }{
		{"a normalizer", `"normalizer":null`, `"normalizer":{"type":"Lowercase"}`, "Lowercase"},
		{"a sentencepiece file", `"type":"ByteLevel","add_prefix_space":false`, `"type":"Metaspace","add_prefix_space":false`, "ByteLevel is not the last"},
		{"a prefix space", `"add_prefix_space":false`, `"add_prefix_space":true`, "add_prefix_space"},
		{"another model", `"type":"BPE"`, `"type":"Unigram"`, "Unigram"},
		{"dropout", `"dropout":null`, `"dropout":0.1`, "dropout"},
		{"an affix", `"end_of_word_suffix":null`, `"end_of_word_suffix":"</w>"`, "affixes"},
		{"an option of the future", `"ignore_merges":true`, `"ignore_merges":true,"magic":1`, "magic"},
		{"a missing byte", `"vocab":{"!":0`, `"vocab":{"!x":0`, "byte 0x21"},
		{"a strip", `"lstrip":false`, `"lstrip":true`, "lstrip"},
		{"a behaviour", `"behavior":"Isolated"`, `"behavior":"MergedWithPrevious"`, "MergedWithPrevious"},
		{"a lookbehind", `\\s+(?!\\S)`, `(?<=a)b`, "group"},
		{"another lookahead", `\\s+(?!\\S)`, `\\s+(?!a)`, "group"},
		{"a possessive quantifier", `\\p{L}+`, `\\p{L}++`, "nested repetition"},
		{"a lazy quantifier", `\\p{L}+`, `\\p{L}+?`, "lazy"},
		{"an escape", `\\p{L}+`, `\\w+`, `\w`},
		{"an anchor", `\\p{L}+`, `^a`, "not supported"},
		{"a pattern of nothing", `\\s+(?!\\S)|`, `|`, "nothing"},
		{"a post-processor", `"type":"TemplateProcessing"`, `"type":"RobertaProcessing"`, "RobertaProcessing"},
		{"no JSON", `{"version"`, `{`, "read tokenizer"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			changed := strings.Replace(string(raw), tt.old, tt.new, 1)
			if changed == string(raw) {
				t.Fatalf("the replaced text does not occur in the file")
			}
			if _, err := Parse([]byte(changed)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func FuzzAppend(f *testing.F) {
	for _, g := range goldens(f, "testdata/qwen.golden") {
		f.Add(g.Text)
	}
	gpt2, qwen := load(f, "gpt2"), load(f, "qwen")
	text := make(map[uint32]string)
	_, values := byteAlphabet()
	raw, _ := os.ReadFile("testdata/gpt2.json")
	var file file
	if err := json.Unmarshal(raw, &file); err != nil {
		f.Fatal(err)
	}
	for token, id := range file.Model.Vocab {
		text[id], _ = unmapped(token, values)
	}
	for _, a := range file.AddedTokens {
		text[a.ID] = a.Content
	}
	f.Fuzz(func(t *testing.T, s string) {
		if _, err := qwen.Append(nil, s, true); err != nil && err != errUTF8 && err != errUnknown && err != errMarks {
			t.Fatal(err)
		}
		ids, err := gpt2.Append(nil, s, true)
		if err != nil {
			return
		}
		var b strings.Builder
		for _, id := range ids {
			b.WriteString(text[id])
		}
		if b.String() != s {
			t.Fatalf("%q is decoded as %q", s, b.String())
		}
	})
}

// FuzzParse: a file is rejected, or its tokenizer encodes any text, and always with the
// same result.
func FuzzParse(f *testing.F) {
	for _, name := range []string{"gpt2", "llama3", "qwen", "deepseek", "o200k", "starcoder"} {
		raw, err := os.ReadFile("testdata/" + name + ".json")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw, "It's 1234 words:\n\n\u65e5\u672c <|endoftext|>")
	}
	f.Add([]byte(`{"model":{"type":"BPE","vocab":{"a":0},"merges":["a a",["a","a"]]}}`), "aa")
	f.Fuzz(func(t *testing.T, raw []byte, text string) {
		tk, err := Parse(raw)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "read tokenizer: ") {
				t.Errorf("got error %q", err)
			}
			return
		}
		ids, err := tk.Append([]uint32{1}, text, true)
		again, errAgain := tk.Append([]uint32{1}, text, true)
		if !errors.Is(errAgain, err) || !slices.Equal(ids, again) || len(ids) == 0 || ids[0] != 1 || err != nil && len(ids) != 1 {
			t.Errorf("%d, %v, then %d, %v", ids, err, again, errAgain)
		}
	})
}

func BenchmarkAppend(b *testing.B) {
	for _, name := range []string{"gpt2", "llama3", "qwen", "deepseek"} {
		b.Run(name, func(b *testing.B) {
			tk := load(b, name)
			raw, err := os.ReadFile("golden_test.go")
			if err != nil {
				b.Fatal(err)
			}
			text := string(raw)
			ids, err := tk.Append(nil, text, true)
			if err != nil {
				b.Fatal(err)
			}
			n := len(ids)
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			for b.Loop() {
				ids, _ = tk.Append(ids[:0], text, true)
			}
			b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}
