// Package bpe encodes text with the byte-level BPE of a Hugging Face tokenizer.json: the
// family of GPT-2, Llama 3, Qwen and DeepSeek. The result is exact, or there is an error:
// the package rejects a file with a component, an option or a split pattern that it does
// not implement, because nearly correct ids match no block of any engine.
//
// It does not implement chat templates, nor tokenizer_config.json, with which some model
// classes add a first token that tokenizer.json does not contain.
//
// The decisions behind this package are in docs/design/placement.md.
package bpe

import (
	"errors"
	"sync"
	"unicode/utf8"
)

// Tokenizer encodes text. It is safe for concurrent use.
type Tokenizer struct {
	added      added // matched in the original text
	addedNorm  added // matched in the normalized text
	nfc        bool
	splits     []split
	merges     map[pair]merge
	bytes      [256]uint32       // ids of single bytes
	words      map[string]uint32 // whole words that need no merges; may be nil
	first, end []uint32          // special tokens around a text

	cache cache
}

type pair struct{ left, right uint32 }

type merge struct{ rank, id uint32 }

// The reasons for rejecting a text. Engines reject the first too. The ids of the others
// depend on the version of Unicode.
var (
	errUTF8    = errors.New("text is not UTF-8")
	errUnknown = errors.New("text has a character that Unicode does not assign")
	errMarks   = errors.New("text has combining marks whose order is uncertain")
)

// Append appends the ids of text. special: also append the tokens that the file puts
// before and after a text. Append returns an error for text that is not UTF-8, or whose
// ids could differ from those of an engine. The error contains no part of the text.
func (t *Tokenizer) Append(dst []uint32, text string, special bool) ([]uint32, error) {
	if !utf8.ValidString(text) {
		return dst, errUTF8
	}
	if !assigned(text) {
		return dst, errUnknown
	}
	start := len(dst)
	if special {
		dst = append(dst, t.first...)
	}
	e := encoder{t: t, dst: dst}
	t.added.cut(text, e.id, func(piece string) {
		if t.nfc {
			var ok bool
			piece, ok = normalize(piece)
			e.refused = e.refused || !ok
		}
		t.addedNorm.cut(piece, e.id, func(piece string) { e.split(piece, t.splits) })
	})
	if e.refused {
		return e.dst[:start], errMarks
	}
	if special {
		e.dst = append(e.dst, t.end...)
	}
	return e.dst, nil
}

// encoder is one call of Append.
type encoder struct {
	t     *Tokenizer
	dst   []uint32
	parts []part
	queue queue
	// refused: the normalized form of a piece is uncertain.
	refused bool
}

func (e *encoder) id(id uint32) { e.dst = append(e.dst, id) }

// split cuts a piece by the first of the splits, and the results by the next ones, down
// to words.
func (e *encoder) split(piece string, splits []split) {
	if piece == "" {
		return
	}
	if len(splits) == 0 {
		e.word(piece)
		return
	}
	s := &splits[0]
	from := 0
	for i := 0; i < len(piece); {
		end := s.pattern.match(piece, i)
		if end < 0 {
			_, n := utf8.DecodeRuneInString(piece[i:])
			i += n
			continue
		}
		if !s.onlyMatches {
			e.split(piece[from:i], splits[1:])
		}
		e.split(piece[i:end], splits[1:])
		i, from = end, end
	}
	if !s.onlyMatches {
		e.split(piece[from:], splits[1:])
	}
}

// word appends the ids of one word.
func (e *encoder) word(w string) {
	if id, ok := e.t.words[w]; ok {
		e.dst = append(e.dst, id)
		return
	}
	if len(w) == 1 {
		e.dst = append(e.dst, e.t.bytes[w[0]])
		return
	}
	if ids, ok := e.t.cache.get(w); ok {
		e.dst = append(e.dst, ids...)
		return
	}
	start := len(e.dst)
	e.merge(w)
	e.t.cache.put(w, e.dst[start:])
}

// cache keeps the ids of words. When it is full it is cleared: frequent words return
// quickly.
type cache struct {
	mu    sync.RWMutex
	words map[string][]uint32 // guarded by mu
}

const (
	cacheWords = 1 << 15
	cacheBytes = 32 // longest cached word, in bytes
)

func (c *cache) get(w string) ([]uint32, bool) {
	if len(w) > cacheBytes {
		return nil, false
	}
	c.mu.RLock()
	ids, ok := c.words[w]
	c.mu.RUnlock()
	return ids, ok
}

func (c *cache) put(w string, ids []uint32) {
	if len(w) > cacheBytes {
		return
	}
	// key and value are copies. Otherwise the whole prompt and the whole list would stay
	// in memory.
	key, value := string([]byte(w)), append([]uint32(nil), ids...)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.words == nil || len(c.words) >= cacheWords {
		c.words = make(map[string][]uint32, 1024)
	}
	c.words[key] = value
}
