package host

import (
	"bytes"
	"time"
)

// maxLine is the length in bytes at which the host logs a printed line that has
// not ended yet. maxMessage is the length at which the host cuts a message of
// proxy_log.
const (
	maxLine    = 8 << 10
	maxMessage = 64 << 10
)

// log implements proxy_log. BadArgument: the level is unknown.
func log(vm *VM, args []uint64) Status {
	level := LogLevel(uint32(args[0]))
	if level > LogCritical {
		return BadArgument
	}
	message, ok := vm.read(args[1], args[2])
	if !ok {
		return InvalidMemoryAccess
	}
	if level >= vm.env.LogLevel() {
		vm.env.Log(level, string(message[:min(len(message), maxMessage)]))
	}
	return OK
}

// getLogLevel implements proxy_get_log_level.
func getLogLevel(vm *VM, args []uint64) Status {
	return vm.writeU32(args[0], uint32(vm.env.LogLevel()))
}

// getCurrentTime implements proxy_get_current_time_nanoseconds: nanoseconds of
// Unix time.
func getCurrentTime(vm *VM, args []uint64) Status {
	return vm.writeU64(args[0], uint64(time.Now().UnixNano()))
}

// lineBuffer splits the text that a guest prints into lines for its log.
type lineBuffer struct {
	level LogLevel
	line  []byte // the current line without its end
}

// write takes printed bytes and logs each line that they complete.
func (b *lineBuffer) write(env Env, p []byte) {
	for len(p) > 0 {
		line, rest, ended := bytes.Cut(p, []byte{'\n'})
		if room := maxLine - len(b.line); len(line) > room {
			line, rest, ended = p[:room], p[room:], true
		}
		b.line = append(b.line, line...)
		if ended {
			b.flush(env)
		}
		p = rest
	}
}

// flush logs the current, incomplete line.
func (b *lineBuffer) flush(env Env) {
	if len(b.line) > 0 && b.level >= env.LogLevel() {
		env.Log(b.level, string(b.line))
	}
	b.line = b.line[:0]
}
