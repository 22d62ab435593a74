package bpe

import (
	"errors"
	"fmt"
	"regexp/syntax"
	"strings"
	"unicode"
	"unicode/utf8"
)

// split cuts a piece at the matches of a pattern.
type split struct {
	pattern     *pattern
	onlyMatches bool // the text between matches is dropped
}

// gpt2Pattern is the split pattern of a ByteLevel pre-tokenizer with use_regex.
const gpt2Pattern = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

// The white space that \s matches in Unicode text in Oniguruma, the engine of the
// tokenizers library, in the syntax of a class without its brackets. Go's own \s
// matches only ASCII.
const space = `\t-\r \x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}`

// The only lookahead in the patterns, and the noncharacter that replaces it for Go's
// parser, which does not support it.
const (
	lookahead = `(?!\S)`
	stand     = '\U0010FFFE'
)

// compilePattern compiles a pattern of the subset in which Oniguruma and Go's parser
// agree, or can be made to agree: literals, classes, groups, (?i:, greedy quantifiers,
// alternatives of which the first match wins, and (?!\S).
func compilePattern(source string) (*pattern, error) {
	rewritten, err := rewrite(source)
	if err != nil {
		return nil, err
	}
	tree, err := syntax.Parse(rewritten, syntax.Perl)
	if err != nil {
		return nil, fmt.Errorf("read pattern: %w", err)
	}
	c := compiler{}
	if err := c.emit(tree); err != nil {
		return nil, err
	}
	if leastWidth(tree) == 0 {
		return nil, errors.New("the pattern matches nothing at all")
	}
	c.code = append(c.code, instruction{op: opMatch})
	return &pattern{c.code}, nil
}

// rewrite converts a pattern to Go's syntax, and rejects parts that the two engines
// interpret differently.
func rewrite(source string) (string, error) {
	if strings.ContainsRune(source, stand) || strings.Contains(source, "&&") || strings.Contains(source, "[:") {
		return "", errors.New("a class of the pattern is not supported")
	}
	var b strings.Builder
	class := false
	for i := 0; i < len(source); i++ {
		switch c := source[i]; {
		case c == '\\':
			if i++; i == len(source) {
				return "", errors.New("the pattern ends in a backslash")
			}
			switch c := source[i]; {
			case c == 's' && class:
				b.WriteString(space)
			case c == 's':
				b.WriteString("[" + space + "]")
			case c == 'S' && !class:
				b.WriteString("[^" + space + "]")
			case strings.IndexByte("pPrnt", c) >= 0, c < utf8.RuneSelf && unicode.In(rune(c), unicode.P, unicode.S):
				b.WriteByte('\\')
				b.WriteByte(c)
			default:
				return "", fmt.Errorf("the pattern's escape \\%c is not supported", c)
			}
		case class:
			if c == '[' {
				return "", errors.New("a class of the pattern is nested")
			}
			class = c != ']'
			b.WriteByte(c)
		case strings.HasPrefix(source[i:], lookahead):
			b.WriteRune(stand)
			i += len(lookahead) - 1
		case strings.HasPrefix(source[i:], "(?") && !strings.HasPrefix(source[i:], "(?i:") && !strings.HasPrefix(source[i:], "(?:"):
			return "", errors.New("a group of the pattern is not supported")
		default:
			class = c == '['
			b.WriteByte(c)
			if class && strings.HasPrefix(source[i+1:], "^") {
				b.WriteByte('^')
				i++
			}
			if class && strings.HasPrefix(source[i+1:], "]") {
				return "", errors.New("a class of the pattern begins with ]")
			}
		}
	}
	return b.String(), nil
}

// compiler turns a tree into instructions.
type compiler struct{ code []instruction }

func (c *compiler) emit(re *syntax.Regexp) error {
	if re.Flags&syntax.NonGreedy != 0 && re.Op != syntax.OpConcat && re.Op != syntax.OpAlternate {
		return errors.New("the pattern has a lazy quantifier")
	}
	switch re.Op {
	case syntax.OpEmptyMatch:
	case syntax.OpLiteral:
		for _, r := range re.Rune {
			if r == stand {
				c.code = append(c.code, instruction{op: opNoTextAhead})
				continue
			}
			c.code = append(c.code, instruction{op: opSet, set: literalSet(r, re.Flags&syntax.FoldCase != 0)})
		}
	case syntax.OpCharClass:
		c.code = append(c.code, instruction{op: opSet, set: newSet(re.Rune)})
	case syntax.OpCapture:
		return c.emit(re.Sub[0])
	case syntax.OpConcat:
		for _, sub := range re.Sub {
			if err := c.emit(sub); err != nil {
				return err
			}
		}
	case syntax.OpAlternate:
		return c.emitAlternate(re.Sub)
	case syntax.OpStar:
		return c.emitLoop(re.Sub[0], 0, -1)
	case syntax.OpPlus:
		return c.emitLoop(re.Sub[0], 1, -1)
	case syntax.OpQuest:
		return c.emitLoop(re.Sub[0], 0, 1)
	case syntax.OpRepeat:
		return c.emitLoop(re.Sub[0], re.Min, re.Max)
	default:
		return fmt.Errorf("the pattern's %v is not supported", re.Op)
	}
	return nil
}

// emitAlternate emits a choice. All alternatives continue after the last one.
func (c *compiler) emitAlternate(subs []*syntax.Regexp) error {
	choice := len(c.code)
	c.code = append(c.code, instruction{op: opChoice})
	var targets, jumps []int
	for _, sub := range subs {
		targets = append(targets, len(c.code))
		if err := c.emit(sub); err != nil {
			return err
		}
		jumps = append(jumps, len(c.code))
		c.code = append(c.code, instruction{op: opJump})
	}
	c.code[choice].targets = targets
	for _, at := range jumps {
		c.code[at].targets = []int{len(c.code)}
	}
	return nil
}

// emitLoop emits a repetition. For anything but one character it supports only the
// optional form.
func (c *compiler) emitLoop(sub *syntax.Regexp, least, most int) error {
	var body compiler
	if err := body.emit(sub); err != nil {
		return err
	}
	if len(body.code) == 1 && body.code[0].op == opSet {
		c.code = append(c.code, instruction{op: opLoop, set: body.code[0].set, least: least, most: most})
		return nil
	}
	if least != 0 || most != 1 {
		return errors.New("the pattern repeats more than one character")
	}
	return c.emitAlternate([]*syntax.Regexp{sub, {Op: syntax.OpEmptyMatch}})
}

// leastWidth returns a lower bound of the number of characters in a match. It is used
// to detect patterns that may match the empty text.
func leastWidth(re *syntax.Regexp) int {
	switch re.Op {
	case syntax.OpLiteral:
		n := 0
		for _, r := range re.Rune {
			if r != stand {
				n++
			}
		}
		return n
	case syntax.OpCharClass:
		return 1
	case syntax.OpCapture, syntax.OpPlus:
		return leastWidth(re.Sub[0])
	case syntax.OpRepeat:
		return re.Min * leastWidth(re.Sub[0])
	case syntax.OpConcat:
		n := 0
		for _, sub := range re.Sub {
			n += leastWidth(sub)
		}
		return n
	case syntax.OpAlternate:
		n := leastWidth(re.Sub[0])
		for _, sub := range re.Sub[1:] {
			n = min(n, leastWidth(sub))
		}
		return n
	}
	return 0
}
