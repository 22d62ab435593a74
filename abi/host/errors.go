package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/tetratelabs/wazero/sys"

	"github.com/pdproxy/pdproxy/abi/host/meter"
)

// ErrPoisoned is the error of every call into a VM that has failed before. Its
// memory may be half-written, so only Close is allowed.
var ErrPoisoned = errors.New("vm has failed before")

// ErrBusy is the error of a call into a VM from inside one of its own calls.
var ErrBusy = errors.New("vm is in a call")

// ErrUnknownContext is the error of a callback for a context id that
// ContextCreate has not made or that Delete has ended. The guest is not called.
var ErrUnknownContext = errors.New("unknown context id")

// Failure is the reason why a call into a guest ended early.
type Failure uint8

// The failures. Each of them poisons the VM.
const (
	// Trap: an instruction that cannot be executed, a stack overflow, or a host
	// function that panicked.
	Trap Failure = iota + 1
	// Timeout: the context of the call ended (guarded modules only).
	Timeout
	// Exit: the guest called proc_exit.
	Exit
	// OutOfMemory: the guest stopped after a request for memory was refused.
	OutOfMemory
	// Forbidden: the guest called a host function that is not allowed during
	// start or allocation.
	Forbidden
)

// String names the failure as metrics do: trap, timeout, exit, out_of_memory,
// forbidden.
func (f Failure) String() string {
	switch f {
	case Trap:
		return "trap"
	case Timeout:
		return "timeout"
	case Exit:
		return "exit"
	case OutOfMemory:
		return "out_of_memory"
	case Forbidden:
		return "forbidden"
	}
	return "unknown"
}

// Error is a failed call into a guest. Its text names the export and the
// reason and holds nothing from the guest's memory.
type Error struct {
	// Export is the name of the guest's function that was called.
	Export string
	// Failure is the kind.
	Failure Failure
	// Reason is one line: the trap's name, the exit code, the forbidden function.
	Reason string
	// Stack is the guest's call stack, innermost first, one function with its
	// types a line; empty when there is none. It is meant for the guest's author.
	Stack string
	// Printed are the last lines that the guest printed during the call, at most 8 KiB; "" unless
	// VM.KeepPrinted was called. They may hold anything from the guest's memory.
	Printed string

	code uint32 // of an Exit
	err  error
}

// Error implements error.
func (e *Error) Error() string {
	return fmt.Sprintf("call %s: %s: %s", e.Export, e.Failure, e.Reason)
}

// Unwrap returns the cause: context.DeadlineExceeded or context.Canceled for a
// Timeout, nil for others.
func (e *Error) Unwrap() error { return e.err }

// Details returns the attributes for the line of l that reports the failure, in addition
// to the error itself: the printed text, and the stack if l logs at debug level.
func (e *Error) Details(l *slog.Logger) (attrs []any) {
	if e.Printed != "" {
		attrs = append(attrs, "printed", e.Printed)
	}
	if e.Stack != "" && l.Enabled(context.Background(), slog.LevelDebug) {
		attrs = append(attrs, "stack", e.Stack)
	}
	return attrs
}

// forbiddenCall is the panic of a host function called at the wrong time.
type forbiddenCall struct{ name string }

// Error implements error, so that the engine returns the value unchanged.
func (f *forbiddenCall) Error() string { return f.name + " is not allowed now" }

// callError makes the typed error of a failed call into the guest. ended is the
// error of the call's context. refused reports whether the guest asked during
// the call for more memory than it may have.
func callError(export string, err, ended error, refused bool) *Error {
	e := &Error{Export: export, Failure: Trap}
	text, stack, _ := strings.Cut(err.Error(), "\nwasm stack trace:\n")
	_, trap, trapped := strings.Cut(text, "wasm error: ")
	e.Stack = trimStack(stack)
	var (
		exit      *sys.ExitError
		forbidden *forbiddenCall
		overflow  stackOverflow
	)
	switch {
	case errors.As(err, &forbidden):
		e.Failure, e.Reason = Forbidden, forbidden.Error()
	case errors.As(err, &exit):
		switch code := exit.ExitCode(); {
		case ended != nil && (code == sys.ExitCodeDeadlineExceeded || code == sys.ExitCodeContextCanceled):
			e.Failure, e.Reason, e.err = Timeout, ended.Error(), ended
		default:
			e.Failure, e.code, e.Reason = Exit, code, fmt.Sprintf("exit code %d", code)
		}
	case errors.As(err, &overflow):
		e.Reason = overflow.Error()
	case trapped:
		e.Reason = trap
	case strings.Contains(text, "(recovered by wazero)"):
		// The panic's value may contain the guest's data.
		e.Reason = "host function panicked"
	default: // the engine's own text, such as stack overflow
		e.Reason = text
	}
	if refused && (e.Failure == Trap || e.Failure == Exit) {
		e.Failure, e.Reason = OutOfMemory, "memory limit reached, then "+e.Reason
	}
	return e
}

// trimStack keeps the guest's frames of a stack trace and drops the host's
// frames, which follow them, and the frame of the meter.
func trimStack(s string) string {
	s, _, _ = strings.Cut(s, "\n\n")
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	if strings.HasPrefix(lines[0], meter.ImportModule+".") {
		lines = lines[1:]
	}
	return strings.Join(lines, "\n")
}
