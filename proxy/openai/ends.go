package openai

// AppendPromptEnds appends, in ascending order, the positions in PromptText at which an
// earlier prompt of the same conversation may have ended: after each message, after
// each token id, between two words of a text. The last position is the end of the
// prompt. For token ids and texts, which have many positions, those below from are left
// out. It appends nothing if PromptText is empty.
func (r *Request) AppendPromptEnds(dst []int32, from int) []int32 {
	text := r.PromptText()
	switch {
	case len(text) == 0:
		return dst
	case r.Prompt == PromptMessages:
		return appendElementEnds(dst, text)
	case text[0] == '[' && (r.Prompt == PromptTokens || r.Prompt == PromptTokenLists):
		return appendNumberEnds(dst, text, from)
	}
	return appendWordEnds(dst, text, from)
}

// appendElementEnds appends the end of each element of a list without its closing
// bracket.
func appendElementEnds(dst []int32, list []byte) []int32 {
	c := Cursor{Text: list}
	for c.Open('['); c.Next(']'); {
		c.Skip()
		dst = append(dst, int32(c.at))
	}
	return dst
}

// appendNumberEnds appends the end of each number of a list, from position from on.
func appendNumberEnds(dst []int32, list []byte, from int) []int32 {
	for i := max(from, 1); i < len(list); i++ {
		if isDigit(list[i-1]) && !isDigit(list[i]) {
			dst = append(dst, int32(i))
		}
	}
	return append(dst, int32(len(list)))
}

// appendWordEnds appends positions of a string's raw text, beginning with position from.
// It appends a position unless it is inside a word of ASCII letters and digits or inside
// a character.
func appendWordEnds(dst []int32, text []byte, from int) []int32 {
	from = max(from, 1)
	if from < len(text) {
		word, escape := inWord[text[from-1]], from > 1 && text[from-2] == '\\' // of the byte before position i
		for i, c := range text[from:] {
			now := inWord[c]
			if (!word || !now || escape) && c&0xC0 != 0x80 {
				dst = append(dst, int32(from+i))
			}
			word, escape = now, text[from+i-1] == '\\'
		}
	}
	return append(dst, int32(len(text)))
}

func isDigit(c byte) bool { return c-'0' <= 9 }

// inWord has the ASCII letters and digits.
var inWord = func() (set [256]bool) {
	for c := range set {
		set[c] = isDigit(byte(c)) || byte(c)|0x20-'a' < 26
	}
	return set
}()
