// Package exit defines the codes with which the program ends, and the error that
// carries one. The commands, the supervisor and its children use the same codes.
package exit

// Exit codes of every command.
const (
	OK        = 0
	Failure   = 1 // the command failed at run time
	Usage     = 2 // the configuration or the command line is wrong
	SlotTaken = 3 // a child of a fleet found its slot in use; its supervisor tries the next slot
	Unusable  = 4 // a child of a fleet cannot use the configuration. Not Usage: Go ends a process that crashes with 2
	Warnings  = 5 // pdproxy doctor found only warnings
)

// Error is an error with an exit code. An error without one means Usage, because the
// errors of the command line library and of the configuration have none.
type Error struct {
	Code int
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Failed gives err the code Failure. It returns nil for nil.
func Failed(err error) error {
	if err == nil {
		return nil
	}
	return &Error{Failure, err}
}
