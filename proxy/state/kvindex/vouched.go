package kvindex

// Vouched returns how many of the leading blocks t holds according to its events, in
// any tier. Blocks that are only expected do not count. It takes a lock for each block,
// so it is not for the request path.
func (x *Index) Vouched(t Target, blocks []Hash) int {
	tg := x.at(t)
	if tg == nil {
		return 0
	}
	tg.mu.Lock()
	defer tg.mu.Unlock()
	if tg.gone || tg.id == noHolder {
		return 0
	}
	for n, h := range blocks {
		if flags, _ := x.change(tg.id, h, change{}); flags&^flagGuess == 0 {
			return n
		}
	}
	return len(blocks)
}
