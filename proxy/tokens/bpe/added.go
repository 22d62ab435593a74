package bpe

// added is a set of tokens that are matched in a text before anything else. The leftmost
// match counts; if several begin there, the longest one counts. The zero value matches
// nothing.
type added struct {
	nodes []node // a trie of bytes; nodes[0] is its root
}

type node struct {
	next map[byte]int32
	id   uint32
	leaf bool // a token ends here
}

func (a *added) add(content string, id uint32) {
	if len(a.nodes) == 0 {
		a.nodes = append(a.nodes, node{})
	}
	at := int32(0)
	for i := range len(content) {
		next, ok := a.nodes[at].next[content[i]]
		if !ok {
			next = int32(len(a.nodes))
			a.nodes = append(a.nodes, node{})
			if a.nodes[at].next == nil {
				a.nodes[at].next = make(map[byte]int32)
			}
			a.nodes[at].next[content[i]] = next
		}
		at = next
	}
	a.nodes[at].id, a.nodes[at].leaf = id, true
}

// cut calls token for each token in text and piece for each non-empty text between
// tokens, in order.
func (a *added) cut(text string, token func(uint32), piece func(string)) {
	from := 0
	if len(a.nodes) > 0 {
		for i := 0; i < len(text); {
			id, n := a.longest(text[i:])
			if n == 0 {
				i++
				continue
			}
			if i > from {
				piece(text[from:i])
			}
			token(id)
			i += n
			from = i
		}
	}
	if from < len(text) {
		piece(text[from:])
	}
}

// longest returns the longest token at the start of text; n is 0 if there is none.
func (a *added) longest(text string) (id uint32, n int) {
	at := int32(0)
	for i := range len(text) {
		next, ok := a.nodes[at].next[text[i]]
		if !ok {
			break
		}
		at = next
		if a.nodes[at].leaf {
			id, n = a.nodes[at].id, i+1
		}
	}
	return id, n
}
