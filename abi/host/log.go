package host

import (
	"bytes"
	"strings"
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
		printer{vm}.release()
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

// maxPrinted is the number of bytes of printed lines that the host keeps during a call.
const maxPrinted = 8 << 10

// KeepPrinted makes the host keep the lines that the guest prints until the end of the call. If the
// call fails, they are in the Error, so that the panic of a guest with its stack is part of the line
// that reports the failure; else they are logged then. The owner calls it between calls, and reports
// every Error from then on.
func (vm *VM) KeepPrinted() { vm.keeps = true }

// printedLine is a line that the guest has printed and the host has not logged yet.
type printedLine struct {
	level LogLevel
	text  string
}

// printer logs the printed lines of a VM.
type printer struct{ vm *VM }

// line logs or keeps a line.
func (p printer) line(level LogLevel, text string) {
	vm := p.vm
	if !vm.keeps || !vm.busy {
		vm.env.Log(level, text)
		return
	}
	if vm.keptSize += len(text) + 1; vm.keptSize > maxPrinted {
		p.release()
		vm.keptSize = len(text) + 1
	}
	vm.kept = append(vm.kept, printedLine{level, text})
}

// release logs the kept lines.
func (p printer) release() {
	for _, l := range p.vm.kept {
		p.vm.env.Log(l.level, l.text)
	}
	p.vm.kept, p.vm.keptSize = p.vm.kept[:0], 0
}

// take returns the kept lines as one text.
func (p printer) take() string {
	var b strings.Builder
	for i, l := range p.vm.kept {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(l.text)
	}
	p.vm.kept, p.vm.keptSize = nil, 0
	return b.String()
}

// lineBuffer splits the text that a guest prints into lines for its log.
type lineBuffer struct {
	level LogLevel
	line  []byte // the current line without its end
}

// write takes printed bytes and logs each line that they complete.
func (b *lineBuffer) write(to printer, p []byte) {
	for len(p) > 0 {
		line, rest, ended := bytes.Cut(p, []byte{'\n'})
		if room := maxLine - len(b.line); len(line) > room {
			line, rest, ended = p[:room], p[room:], true
		}
		b.line = append(b.line, line...)
		if ended {
			b.flush(to)
		}
		p = rest
	}
}

// flush logs the current, incomplete line.
func (b *lineBuffer) flush(to printer) {
	if len(b.line) > 0 && b.level >= to.vm.env.LogLevel() {
		to.line(b.level, string(b.line))
	}
	b.line = b.line[:0]
}
