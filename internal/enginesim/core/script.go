package core

import (
	"slices"
	"strconv"
	"strings"
)

// Special tokens of reasoning and of calls. Tokenize never returns them.
const (
	TokenThink    Token = 257 + iota // begins reasoning
	TokenThinkEnd                    // ends it
	TokenCall                        // begins a call of a tool
	TokenCallEnd                     // ends it
)

// specials are their texts.
var specials = [...]string{"<think>", "</think>", "<tool_call>", "</tool_call>"}

// CallTokens is the number of tokens of the argument of a call.
const CallTokens = 4

// Script is the structure of a chat answer, by marks in its prompt: "<reason N>" makes it begin
// with N tokens of reasoning, "<tool N>" makes it call a tool after N tokens of content and end
// behind the call. The tokens between the special ones are those of any answer. The zero value has
// no structure.
type Script struct {
	// Reason is the number of tokens of reasoning, 0 for none.
	Reason int
	// call is the number of tokens of content before the call, -1 for none.
	call   int
	begins int // index of the first token of the answer in all tokens
}

// scriptOf reads the marks of a prompt. An answer begins behind the last opening of an assistant's
// turn, also if the prompt has the first part of the answer.
func scriptOf(text string, prompt []Token) (sc Script) {
	number := func(mark string) int {
		i := strings.LastIndex(text, mark)
		if i < 0 {
			return -1
		}
		digits, _, _ := strings.Cut(text[i+len(mark):], ">")
		n, err := strconv.Atoi(digits)
		if err != nil {
			return -1
		}
		return n
	}
	sc.Reason, sc.call = max(0, number("<reason ")), number("<tool ")
	if sc.Reason == 0 && sc.call < 0 {
		return Script{}
	}
	opening := Tokenize("\n<|assistant|>")
	for i := len(prompt) - len(opening); i >= 0; i-- {
		if slices.Equal(prompt[i:i+len(opening)], opening) {
			sc.begins = i + len(opening)
			return sc
		}
	}
	return Script{}
}

// next returns the special token that follows the first n of all tokens, false for none.
func (sc Script) next(n int) (Token, bool) {
	at := n - sc.begins
	if sc == (Script{}) || at < 0 {
		return 0, false
	}
	if sc.Reason > 0 {
		switch at {
		case 0:
			return TokenThink, true
		case sc.Reason + 1:
			return TokenThinkEnd, true
		}
		at -= sc.Reason + 2
	}
	if sc.call < 0 {
		return 0, false
	}
	switch at - sc.call {
	case 0:
		return TokenCall, true
	case CallTokens + 1:
		return TokenCallEnd, true
	case CallTokens + 2:
		return TokenEOS, true
	}
	return 0, false
}

// WithoutSpecials is a text without the texts of special tokens.
func WithoutSpecials(text string) string {
	for _, s := range specials {
		text = strings.ReplaceAll(text, s, "")
	}
	return text
}
