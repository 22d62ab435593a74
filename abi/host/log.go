package host

import "bytes"

// maxLine is the length at which a line that does not end is logged as it is.
const maxLine = 8 << 10

// lineBuffer cuts what a guest prints into lines for its log.
type lineBuffer struct {
	level LogLevel
	line  []byte // begun, without its end
}

// write takes printed bytes and logs the lines that they complete.
func (b *lineBuffer) write(env Env, p []byte) {
	for len(p) > 0 {
		line, rest, ended := bytes.Cut(p, []byte{'\n'})
		b.line = append(b.line, line...)
		if ended || len(b.line) >= maxLine {
			b.flush(env)
		}
		p = rest
	}
}

// flush logs the line that was begun.
func (b *lineBuffer) flush(env Env) {
	if len(b.line) > 0 && b.level >= env.LogLevel() {
		env.Log(b.level, string(b.line))
	}
	b.line = b.line[:0]
}
