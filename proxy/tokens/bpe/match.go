package bpe

import (
	"sort"
	"unicode"
	"unicode/utf8"
)

// pattern is a compiled pattern. It matches by backtracking, like the engine for which these
// patterns are written: the first alternative that matches is taken.
type pattern struct{ code []instruction }

type op uint8

const (
	opMatch       op = iota
	opSet            // one character of the set
	opLoop           // as many characters of the set as possible, least to most
	opChoice         // the first of the targets that leads to a match
	opJump           // to the target
	opNoTextAhead    // (?!\S)
)

type instruction struct {
	op          op
	set         *set
	least, most int // most < 0: no limit
	targets     []int
}

// match returns the end of the match that begins at i; -1 if there is none.
func (p *pattern) match(text string, i int) int { return p.run(text, 0, i) }

func (p *pattern) run(text string, at, i int) int {
	for {
		in := &p.code[at]
		switch in.op {
		case opMatch:
			return i
		case opSet:
			n := in.set.width(text, i)
			if n == 0 {
				return -1
			}
			i += n
			at++
		case opLoop:
			return p.loop(text, at, i)
		case opChoice:
			last := len(in.targets) - 1
			for _, target := range in.targets[:last] {
				if end := p.run(text, target, i); end >= 0 {
					return end
				}
			}
			at = in.targets[last]
		case opJump:
			at = in.targets[0]
		case opNoTextAhead:
			if r, n := utf8.DecodeRuneInString(text[i:]); n > 0 && !unicode.IsSpace(r) {
				return -1
			}
			at++
		}
	}
}

// loop takes as many characters as possible, and gives back one character at a time while the rest
// does not match.
func (p *pattern) loop(text string, at, i int) int {
	in := &p.code[at]
	count := 0
	for count != in.most {
		n := in.set.width(text, i)
		if n == 0 {
			break
		}
		i += n
		count++
	}
	for count >= in.least {
		if end := p.run(text, at+1, i); end >= 0 {
			return end
		}
		if count == 0 {
			break
		}
		_, n := utf8.DecodeLastRuneInString(text[:i])
		i -= n
		count--
	}
	return -1
}

// set is a set of characters.
type set struct {
	ascii  [2]uint64
	ranges []rune // pairs of first and last, in order
}

// newSet builds a set of pairs of first and last character, in order.
func newSet(ranges []rune) *set {
	s := &set{ranges: ranges}
	for r := range rune(utf8.RuneSelf) {
		if s.search(r) {
			s.ascii[r>>6] |= 1 << (r & 63)
		}
	}
	return s
}

// literalSet returns the set of one character, with those that fold to it.
func literalSet(r rune, fold bool) *set {
	rs := []rune{r}
	if fold {
		for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
			rs = append(rs, f)
		}
		sort.Slice(rs, func(i, j int) bool { return rs[i] < rs[j] })
	}
	var ranges []rune
	for _, r := range rs {
		ranges = append(ranges, r, r)
	}
	return newSet(ranges)
}

func (s *set) search(r rune) bool {
	lo, hi := 0, len(s.ranges)/2
	for lo < hi {
		m := int(uint(lo+hi) >> 1)
		switch {
		case r < s.ranges[2*m]:
			hi = m
		case r > s.ranges[2*m+1]:
			lo = m + 1
		default:
			return true
		}
	}
	return false
}

// width returns the number of bytes of the character at i if it is in the set, else 0.
// text must be UTF-8.
func (s *set) width(text string, i int) int {
	if i >= len(text) {
		return 0
	}
	if c := text[i]; c < utf8.RuneSelf {
		return int(s.ascii[c>>6] >> (c & 63) & 1)
	}
	r, n := utf8.DecodeRuneInString(text[i:])
	if !s.search(r) {
		return 0
	}
	return n
}
