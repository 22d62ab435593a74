package bpe

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// file is a tokenizer.json. It lists every supported member, so that a file with an
// unknown member is rejected.
type file struct {
	Version       string          `json:"version"`
	Truncation    json.RawMessage `json:"truncation"` // the caller of the library always sets it
	Padding       json.RawMessage `json:"padding"`    // the caller of the library always sets it
	AddedTokens   []addedToken    `json:"added_tokens"`
	Normalizer    *component      `json:"normalizer"`
	PreTokenizer  *component      `json:"pre_tokenizer"`
	PostProcessor *component      `json:"post_processor"`
	Decoder       json.RawMessage `json:"decoder"`
	Model         model           `json:"model"`
}

type addedToken struct {
	ID         uint32 `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

type model struct {
	Type                    string            `json:"type"`
	Dropout                 *float64          `json:"dropout"`
	UnkToken                *string           `json:"unk_token"`     // unused, because every byte has a token
	FuseUnk                 bool              `json:"fuse_unk"`      // unused, because every byte has a token
	ByteFallback            bool              `json:"byte_fallback"` // unused, because every byte has a token
	ContinuingSubwordPrefix *string           `json:"continuing_subword_prefix"`
	EndOfWordSuffix         *string           `json:"end_of_word_suffix"`
	IgnoreMerges            bool              `json:"ignore_merges"`
	Vocab                   map[string]uint32 `json:"vocab"`
	Merges                  []mergeRule       `json:"merges"`
}

// mergeRule is written as "left right" or, by newer versions, as a list of two.
type mergeRule [2]string

func (m *mergeRule) UnmarshalJSON(raw []byte) error {
	if raw[0] == '[' {
		var two []string
		if err := json.Unmarshal(raw, &two); err != nil || len(two) != 2 {
			return errors.New("a merge is not of two tokens")
		}
		*m = mergeRule(two)
		return nil
	}
	var text string
	if err := json.Unmarshal(raw, &text); err != nil {
		return err
	}
	left, right, ok := strings.Cut(text, " ")
	if !ok || strings.Contains(right, " ") {
		return errors.New("a merge is not of two tokens")
	}
	*m = mergeRule{left, right}
	return nil
}

// component is a normalizer, pre-tokenizer or post-processor.
type component struct {
	Type          string      `json:"type"`
	Normalizers   []component `json:"normalizers"`
	PreTokenizers []component `json:"pretokenizers"`
	Processors    []component `json:"processors"`

	Pattern struct {
		Regex  *string `json:"Regex"`
		String *string `json:"String"`
	} `json:"pattern"`
	Behavior string `json:"behavior"`
	Invert   bool   `json:"invert"`

	AddPrefixSpace   bool  `json:"add_prefix_space"`
	TrimOffsets      bool  `json:"trim_offsets"` // does not affect ids
	UseRegex         *bool `json:"use_regex"`    // true if a file of an older version lacks it
	IndividualDigits bool  `json:"individual_digits"`

	Single        []templatePiece         `json:"single"`
	Pair          json.RawMessage         `json:"pair"` // unused: there is only one text
	SpecialTokens map[string]specialToken `json:"special_tokens"`
}

type templatePiece struct {
	SpecialToken *struct {
		ID     string `json:"id"`
		TypeID int    `json:"type_id"`
	} `json:"SpecialToken"`
	Sequence *struct {
		ID     string `json:"id"`
		TypeID int    `json:"type_id"`
	} `json:"Sequence"`
}

type specialToken struct {
	ID     string   `json:"id"`
	IDs    []uint32 `json:"ids"`
	Tokens []string `json:"tokens"`
}

// Parse builds a Tokenizer from the bytes of a tokenizer.json. The error names the
// unsupported component.
func Parse(raw []byte) (*Tokenizer, error) {
	var f file
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return nil, fmt.Errorf("read tokenizer: %w", err)
	}
	t := new(Tokenizer)
	for _, step := range []struct {
		name string
		read func(*file) error
	}{
		{"model", t.readModel},
		{"normalizer", t.readNormalizer},
		{"added_tokens", t.readAdded},
		{"pre_tokenizer", t.readPreTokenizer},
		{"post_processor", t.readPostProcessor},
	} {
		if err := step.read(&f); err != nil {
			return nil, fmt.Errorf("read tokenizer: %s: %w", step.name, err)
		}
	}
	return t, nil
}

func (t *Tokenizer) readModel(f *file) error {
	m := &f.Model
	switch {
	case m.Type != "BPE":
		return fmt.Errorf("type %q is not supported", m.Type)
	case m.Dropout != nil && *m.Dropout != 0:
		return errors.New("dropout is not supported")
	case m.ContinuingSubwordPrefix != nil && *m.ContinuingSubwordPrefix != "",
		m.EndOfWordSuffix != nil && *m.EndOfWordSuffix != "":
		return errors.New("affixes are not supported")
	}
	alphabet, values := byteAlphabet()
	for b, r := range alphabet {
		id, ok := m.Vocab[string(r)]
		if !ok {
			return fmt.Errorf("byte %#02x has no token: not byte-level", b)
		}
		t.bytes[b] = id
	}
	t.merges = make(map[pair]merge, len(m.Merges))
	for rank, rule := range m.Merges {
		left, ok1 := m.Vocab[rule[0]]
		right, ok2 := m.Vocab[rule[1]]
		id, ok3 := m.Vocab[rule[0]+rule[1]]
		if !ok1 || !ok2 || !ok3 {
			return fmt.Errorf("merge %d is of tokens that are not in the vocabulary", rank)
		}
		t.merges[pair{left, right}] = merge{uint32(rank), id}
	}
	if !m.IgnoreMerges {
		return nil
	}
	t.words = make(map[string]uint32, len(m.Vocab))
	for token, id := range m.Vocab {
		if word, ok := unmapped(token, values); ok {
			t.words[word] = id
		}
	}
	return nil
}

// byteAlphabet returns the character that byte-level vocabularies use for each byte, and
// the reverse mapping: printable characters of Latin-1 represent themselves, and the
// characters from 256 on represent the other bytes, in order.
func byteAlphabet() (alphabet [256]rune, values map[rune]byte) {
	values = make(map[rune]byte, 256)
	next := rune(256)
	for b := range 256 {
		r := rune(b)
		if b <= ' ' || b >= 0x7f && b <= 0xa0 || b == 0xad {
			r = next
			next++
		}
		alphabet[b], values[r] = r, byte(b)
	}
	return alphabet, values
}

// unmapped returns the bytes of a token in the byte alphabet.
func unmapped(token string, values map[rune]byte) (word string, ok bool) {
	b := make([]byte, 0, len(token))
	for _, r := range token {
		v, ok := values[r]
		if !ok {
			return "", false
		}
		b = append(b, v)
	}
	return string(b), true
}

func (t *Tokenizer) readNormalizer(f *file) error {
	n := f.Normalizer
	if n != nil && n.Type == "Sequence" {
		switch len(n.Normalizers) {
		case 0:
			return nil
		case 1:
			n = &n.Normalizers[0]
		}
	}
	switch {
	case n == nil:
	case n.Type == "NFC":
		t.nfc = true
	default:
		return fmt.Errorf("type %q is not supported", n.Type)
	}
	return nil
}

func (t *Tokenizer) readAdded(f *file) error {
	for i, a := range f.AddedTokens {
		switch {
		case a.SingleWord || a.LStrip || a.RStrip:
			return fmt.Errorf("element %d: single_word, lstrip and rstrip are not supported", i)
		case a.Content == "":
		case !a.Normalized:
			t.added.add(a.Content, a.ID)
		default:
			content := a.Content
			if t.nfc {
				content, _ = normalize(content)
			}
			t.addedNorm.add(content, a.ID)
		}
	}
	return nil
}

func (t *Tokenizer) readPreTokenizer(f *file) error {
	p := f.PreTokenizer
	if p == nil {
		return errors.New("is missing: not byte-level")
	}
	steps := []component{*p}
	if p.Type == "Sequence" {
		steps = p.PreTokenizers
	}
	for i := range steps {
		last := i == len(steps)-1
		if byteLevel := steps[i].Type == "ByteLevel"; byteLevel != last {
			return errors.New("ByteLevel is not the last of them")
		}
		s, err := steps[i].split()
		if err != nil {
			return err
		}
		if s != nil {
			t.splits = append(t.splits, *s)
		}
	}
	if len(steps) == 0 {
		return errors.New("is missing: not byte-level")
	}
	return nil
}

// split returns the split of a pre-tokenizer; nil if it does not cut.
func (p *component) split() (s *split, err error) {
	source := ""
	s = new(split)
	switch p.Type {
	case "ByteLevel":
		if p.AddPrefixSpace {
			return nil, errors.New("add_prefix_space is not supported")
		}
		if p.UseRegex != nil && !*p.UseRegex {
			return nil, nil
		}
		source = gpt2Pattern
	case "Digits":
		source = `\p{N}+`
		if p.IndividualDigits {
			source = `\p{N}`
		}
	case "Split":
		if p.Pattern.Regex == nil {
			return nil, errors.New("a Split by a plain string is not supported")
		}
		source = *p.Pattern.Regex
		switch {
		case p.Behavior == "Isolated": // a match is one piece, inverted or not
		case p.Behavior == "Removed" && p.Invert:
			s.onlyMatches = true
		default:
			return nil, fmt.Errorf("a Split with behavior %q is not supported", p.Behavior)
		}
	default:
		return nil, fmt.Errorf("type %q is not supported", p.Type)
	}
	s.pattern, err = compilePattern(source)
	return s, err
}

func (t *Tokenizer) readPostProcessor(f *file) error {
	p := f.PostProcessor
	if p == nil {
		return nil
	}
	steps := []component{*p}
	if p.Type == "Sequence" {
		steps = p.Processors
	}
	templates := 0
	for i := range steps {
		switch steps[i].Type {
		case "ByteLevel": // affects only offsets
		case "TemplateProcessing":
			if templates++; templates > 1 {
				return errors.New("more than one template")
			}
			if err := t.readTemplate(&steps[i]); err != nil {
				return err
			}
		default:
			return fmt.Errorf("type %q is not supported", steps[i].Type)
		}
	}
	return nil
}

// readTemplate reads the tokens that are put around a text.
func (t *Tokenizer) readTemplate(p *component) error {
	texts := 0
	for _, piece := range p.Single {
		switch {
		case piece.SpecialToken != nil:
			token, ok := p.SpecialTokens[piece.SpecialToken.ID]
			if !ok {
				return errors.New("the template names a token that it does not define")
			}
			if texts == 0 {
				t.first = append(t.first, token.IDs...)
			} else {
				t.end = append(t.end, token.IDs...)
			}
		case piece.Sequence != nil && piece.Sequence.ID == "A":
			texts++
		}
	}
	if texts != 1 {
		return errors.New("the template does not hold the text once")
	}
	return nil
}
