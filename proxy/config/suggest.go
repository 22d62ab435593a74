package config

import (
	"fmt"
	"slices"
	"strings"
)

// OneOf returns nil if value is one of allowed. Otherwise the error lists allowed and suggests
// the one that value is probably a misspelling of. For a retired connector the error names the
// replacement. Keys of a configuration and flags of the command line have the same errors.
func OneOf(value string, allowed ...string) error {
	if slices.Contains(allowed, value) {
		return nil
	}
	if err := RetiredConnector(value); err != nil {
		return err
	}
	return fmt.Errorf("must be one of %s, found %q%s", quoteAll(allowed), value, DidYouMean(value, allowed))
}

// DidYouMean returns ", did you mean X?" with the one of allowed that value is probably a
// misspelling of, or "".
func DidYouMean(value string, allowed []string) string {
	if best := nearest(value, allowed); best != "" {
		return ", did you mean " + best + "?"
	}
	return ""
}

// nearest returns the entry of allowed that value is probably a misspelling of: the same
// letters in other case or with other separators, the first or the last words of exactly one
// entry (vllm of vllm-router, nixl of vllm-nixl), or few letters changed. It returns "" if there is
// none.
func nearest(value string, allowed []string) string {
	plain := letters(value)
	if plain == "" || len(plain) > maxLetters {
		return ""
	}
	best, distance := "", min(len(plain)/4+2, len(plain)) // the least distance that is too far
	var related []string
	for _, name := range allowed {
		d := EditDistance(plain, letters(name))
		if d < distance {
			best, distance = name, d
		}
		if isPart(value, name) || isPart(name, value) {
			related = append(related, name)
		}
	}
	if distance > 0 && len(related) == 1 {
		return related[0]
	}
	return best
}

// isPart reports whether part is the first or the last words of name.
func isPart(part, name string) bool {
	more := len(name) - len(part)
	if part == "" || more <= 0 {
		return false
	}
	return isSeparator(name[len(part)]) && strings.EqualFold(name[:len(part)], part) ||
		isSeparator(name[more-1]) && strings.EqualFold(name[more:], part)
}

// isSeparator reports whether c stands between the words of a name.
func isSeparator(c byte) bool { return c == '-' || c == '_' }

// maxLetters bounds the time of EditDistance. No key or named value of the configuration
// is longer.
const maxLetters = 64

// letters returns the letters and digits of a name, in lower case.
func letters(name string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'A' && r <= 'Z' {
			return r + 'a' - 'A'
		}
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return -1
	}, name)
}

// EditDistance returns the number of letters to insert, remove or replace that make b of
// a.
func EditDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		corner := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := corner
			if a[i] != b[j] {
				replaced++
			}
			corner = row[j+1]
			row[j+1] = min(row[j]+1, row[j+1]+1, replaced)
		}
	}
	return row[len(b)]
}
