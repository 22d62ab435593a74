package core

import (
	"hash/fnv"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Token is an id of the simulator's vocabulary:
//
//	0..255                single bytes
//	256                   end of sequence, no text
//	257..260              begin and end of reasoning and of a call, see Script
//	1000..1000+1023       words, each with its leading space
//	1<<16 | b0<<8 | b1    two bytes
//	1<<24 | b0<<16 | …    three bytes
//
// Every text has one encoding, without special tokens, and decoding it returns the same text.
type Token int32

const (
	TokenEOS  Token = 256
	TokenWord Token = 1000
	twoBytes  Token = 1 << 16
	threeByte Token = 1 << 24
	vocabSize       = 1 << 25
)

// The 32x32 words that decode picks from, several with multibyte letters.
var (
	wordStarts = strings.Fields("ba ké do fu ga hi jo ku la mé no pi ra sü to va wi xe yo za 光 бo ça dñ é gλ 水 ix 山 ☕ 🙂 Δa")
	wordEnds   = strings.Fields("ban cor dil fem gus hax jal kir lom mur nev pax qui rus sol tam ulo vek wan xil yar zon été õl 語 ня ür mß nø 🚀 ŝi tą")
)

// WordTokens maps a word with its leading space to its token.
var WordTokens = func() map[string]Token {
	m := make(map[string]Token, len(wordStarts)*len(wordEnds))
	for i := range len(wordStarts) * len(wordEnds) {
		m[WordText(i)] = TokenWord + Token(i)
	}
	return m
}()

// WordText is the text of word i, with its leading space.
func WordText(i int) string {
	return " " + wordStarts[i/len(wordEnds)] + wordEnds[i%len(wordEnds)]
}

// Valid reports whether t is in the vocabulary.
func (t Token) Valid() bool {
	switch {
	case t < 0:
		return false
	case t <= TokenCallEnd, t >= TokenWord && int(t-TokenWord) < len(WordTokens):
		return true
	case t >= twoBytes && t < 2*twoBytes:
		return true
	}
	return t >= threeByte && t < 2*threeByte
}

// Text is the token's text; empty for the end of sequence.
func (t Token) Text() string {
	switch {
	case t < 256:
		return string([]byte{byte(t)})
	case t == TokenEOS:
		return ""
	case t <= TokenCallEnd:
		return specials[t-TokenThink]
	case t >= threeByte:
		return string([]byte{byte(t >> 16), byte(t >> 8), byte(t)})
	case t >= twoBytes:
		return string([]byte{byte(t >> 8), byte(t)})
	}
	return WordText(int(t - TokenWord))
}

// Tokenize encodes text. A known word becomes one token; other runs become
// tokens of up to three bytes. Runs end before each space, tab or newline. So
// the encoding of a text that ends before one of these does not change when
// text is added.
func Tokenize(text string) []Token {
	tokens := make([]Token, 0, len(text)/3+1)
	for len(text) > 0 {
		n := 1 + strings.IndexAny(text[1:], " \t\n")
		if n == 0 {
			n = len(text)
		}
		run := text[:n]
		text = text[n:]
		if t, ok := WordTokens[run]; ok {
			tokens = append(tokens, t)
			continue
		}
		for len(run) > 3 {
			tokens = append(tokens, chunkToken(run[:3]))
			run = run[3:]
		}
		tokens = append(tokens, chunkToken(run))
	}
	return tokens
}

// chunkToken is the token of one to three bytes.
func chunkToken(s string) Token {
	switch len(s) {
	case 1:
		return Token(s[0])
	case 2:
		return twoBytes | Token(s[0])<<8 | Token(s[1])
	}
	return threeByte | Token(s[0])<<16 | Token(s[1])<<8 | Token(s[2])
}

// Detokenize is the text of tokens.
func Detokenize(tokens []Token) string {
	var b strings.Builder
	for _, t := range tokens {
		b.WriteString(t.Text())
	}
	return b.String()
}

// weights stand for the model's parameters of a real engine: engines with the
// same model name compute the same KV and the same text.
type weights uint64

func newWeights(model string) weights {
	h := fnv.New64a()
	h.Write([]byte(model))
	return weights(Mix(h.Sum64()))
}

// Mix is a bijection of 64-bit words whose output bits depend on all input bits.
func Mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// Kv is the KV content of one token.
type Kv uint64

// BytesPerKV is the size of one token's KV on the wire.
const BytesPerKV = 8

// Next returns the KV of token t after a token whose KV is prev (root for the
// first). It depends on every token so far.
func (w weights) Next(prev Kv, t Token) Kv {
	return Kv(Mix(uint64(prev) ^ Mix(uint64(t)+uint64(w))))
}

// Root is the KV before the first token.
func (w weights) Root() Kv { return Kv(w) }

// attention summarises all KV that a sequence holds, in order. One wrong entry
// changes all following text.
type attention uint64

func (a attention) add(v Kv) attention {
	return attention(Mix(uint64(a)*0x9e3779b97f4a7c15 + uint64(v)))
}

// sample is the random word from which the next token is picked, from the KV that the
// sequence holds. choice separates the n samples of one prompt; seed is the request's, and 0
// for a greedy answer.
func (a attention) sample(seed uint64, choice int) uint64 {
	return Mix(uint64(a) ^ Mix(seed) ^ uint64(choice)*0xd6e8feb86659fd93)
}

// word is the token of a sample: one of the words.
func word(h uint64) Token { return TokenWord + Token(h%uint64(len(WordTokens))) }

// splitMark in a prompt makes a quarter of the tokens between words parts of letters, as with
// a byte-level tokenizer. So a text can be cut inside a letter.
const splitMark = "<split>"

// splitLetters are the letters of such tokens. The first byte determines the letter.
var splitLetters = []string{"é", "語", "🙂"}

// splitToken is the token of a sample in an answer with split letters. open are the bytes of
// a letter that the sequence ends in, "" for none.
func splitToken(h uint64, open string) Token {
	pick := int(h >> 40)
	if open != "" {
		for _, letter := range splitLetters {
			if rest, ok := strings.CutPrefix(letter, open); ok {
				return chunkToken(rest[:1+pick%len(rest)])
			}
		}
	}
	if h>>32%4 != 0 || open != "" {
		return word(h)
	}
	letter := splitLetters[pick%len(splitLetters)]
	begin := letter[:1+pick/4%(len(letter)-1)]
	if len(begin) < 3 && pick/16%2 == 0 {
		begin = " " + begin
	}
	return chunkToken(begin)
}

// openLetter returns the bytes of an incomplete letter at the end of the text of a and b.
func openLetter(a, b []Token) string {
	text := ""
	for i := len(a) + len(b) - 1; i >= 0 && len(text) < utf8.UTFMax; i-- {
		if i >= len(a) {
			text = b[i-len(a)].Text() + text
		} else {
			text = a[i].Text() + text
		}
	}
	return text[wholeRunes([]byte(text)):]
}

// generated returns the number of tokens at the end of a prompt that greedy decode would have
// generated from the tokens before them. An answer that is continued ends where the whole
// answer would have ended.
func (w weights) generated(prompt []Token, split bool, sc Script) int {
	run := 0
	var sight attention
	last := w.Root()
	for i, t := range prompt {
		next := Token(-1)
		if special, ok := sc.next(i); ok {
			next = special
		} else if h := sight.sample(0, 0); i > 0 && split {
			next = splitToken(h, openLetter(prompt[:i], nil))
		} else if i > 0 {
			next = word(h)
		}
		if run++; t != next {
			run = 0
		}
		last = w.Next(last, t)
		sight = sight.add(last)
	}
	return run
}

// Logprob is the log probability of token t at a position after the token prev.
func Logprob(position int, prev, t Token) float64 {
	h := uint64(position)*0x9e3779b97f4a7c15 ^ uint64(t)<<20 ^ uint64(prev)
	return -float64(h%4096) / 512
}

// eosMark returns N when the prompt has a mark "<eosN>" (the last one counts), else 0:
// output token N is then the end of the sequence. So a test can request a first token
// that ends the answer.
func eosMark(prompt string) int {
	i := strings.LastIndex(prompt, "<eos")
	if i < 0 {
		return 0
	}
	digits, _, ok := strings.Cut(prompt[i+len("<eos"):], ">")
	n, err := strconv.Atoi(digits)
	if !ok || err != nil || n < 1 {
		return 0
	}
	return n
}

// naturalLength returns the number of tokens of an answer without a token
// limit: 48 to 111. It depends only on the prompt.
func naturalLength(prompt []Token) int {
	var h uint64
	for _, t := range prompt {
		h = Mix(h ^ uint64(t))
	}
	return 48 + int(h%64)
}

// wholeRunes returns the length of the longest prefix of s that does not end
// inside a UTF-8 sequence.
func wholeRunes(s []byte) int {
	for i := 1; i <= 3 && i <= len(s); i++ {
		b := s[len(s)-i]
		if b < utf8.RuneSelf {
			return len(s)
		}
		if utf8.RuneStart(b) {
			if utf8.FullRune(s[len(s)-i:]) {
				return len(s)
			}
			return len(s) - i
		}
	}
	return len(s)
}
