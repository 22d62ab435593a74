package bpe

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// assigned reports whether every character of a text has a class in the Unicode version
// of this build. Only for other characters do versions differ.
func assigned(text string) bool {
	for i := 0; i < len(text); {
		if text[i] < utf8.RuneSelf {
			i++
			continue
		}
		r, n := utf8.DecodeRuneInString(text[i:])
		i += n
		switch {
		case r < 0x378, r >= 0x400 && r < 0x530, r >= 0x4E00 && r < 0xA000, r >= 0xAC00 && r < 0xD7A4: // most characters
		case unicode.Is(unicode.Cn, r):
			return false
		}
	}
	return true
}

// normalize returns the normal form C of text. ok is false if the tokenizers library,
// whose tables are those of Unicode 9, may return another one.
func normalize(text string) (form string, ok bool) {
	if strings.ContainsFunc(text, isRecent) {
		return "", false
	}
	form = norm.NFC.String(text)
	// x/text inserts joiners into runs of more than 30 marks (the Stream-Safe Text
	// Format of UAX 15); the library does not.
	return form, strings.Count(form, joiner) == strings.Count(text, joiner)
}

const joiner = "\u034f"

func isRecent(r rune) bool { return r >= 0x7fd && unicode.Is(recent, r) }

// recent are the characters added after Unicode 9 that normal form C reorders or
// composes: those that x/text (Unicode 15) and the tokenizers library 0.23 treat
// differently, found by comparing the two over all of Unicode, and the second half of a
// pair that only x/text composes.
var recent = &unicode.RangeTable{
	R16: []unicode.Range16{
		{0x07FD, 0x07FD, 1}, {0x0898, 0x089F, 1}, {0x08CA, 0x08D3, 1}, {0x09FE, 0x09FE, 1}, {0x0C3C, 0x0C3C, 1},
		{0x0D3B, 0x0D3C, 1}, {0x0EBA, 0x0EBA, 1}, {0x1715, 0x1715, 1}, {0x1ABF, 0x1ACE, 1}, {0x1DF6, 0x1DFA, 1},
		{0xA82C, 0xA82C, 1},
	},
	R32: []unicode.Range32{
		{0x10D24, 0x10D27, 1}, {0x10EAB, 0x10EAC, 1}, {0x10EFD, 0x10EFF, 1}, {0x10F46, 0x10F50, 1}, {0x10F82, 0x10F85, 1},
		{0x11070, 0x11070, 1}, {0x1133B, 0x1133B, 1}, {0x1145E, 0x1145E, 1}, {0x11839, 0x1183A, 1}, {0x11930, 0x11930, 1},
		{0x1193D, 0x1193E, 1}, {0x11943, 0x11943, 1}, {0x119E0, 0x119E0, 1}, {0x11A34, 0x11A34, 1}, {0x11A47, 0x11A47, 1},
		{0x11A99, 0x11A99, 1}, {0x11D42, 0x11D42, 1}, {0x11D44, 0x11D45, 1}, {0x11D97, 0x11D97, 1}, {0x11F41, 0x11F42, 1},
		{0x16FF0, 0x16FF1, 1}, {0x1E08F, 0x1E08F, 1}, {0x1E130, 0x1E136, 1}, {0x1E2AE, 0x1E2AE, 1}, {0x1E2EC, 0x1E2EF, 1},
		{0x1E4EC, 0x1E4EF, 1},
	},
}
