package host

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
)

// levelNames and slogLevels are in the order of the log levels. Trace is one
// step (4) below slog's debug, critical one step above its error.
var (
	levelNames = [...]string{"trace", "debug", "info", "warn", "error", "critical"}
	slogLevels = [...]slog.Level{slog.LevelDebug - 4, slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError, slog.LevelError + 4}
)

// LogLevels returns the names of all levels, from the lowest to the highest.
func LogLevels() []string { return slices.Clone(levelNames[:]) }

// ParseLogLevel returns the level of a name: trace, debug, info, warn, error or
// critical.
func ParseLogLevel(name string) (LogLevel, error) {
	i := slices.Index(levelNames[:], name)
	if i < 0 {
		return 0, fmt.Errorf("%q is not trace, debug, info, warn, error or critical", name)
	}
	return LogLevel(i), nil
}

// Slog returns the level as package log/slog counts. Levels above LogCritical
// count as LogCritical.
func (l LogLevel) Slog() slog.Level { return slogLevels[min(l, LogCritical)] }

// LowestLevel returns the lowest level that log accepts. It returns LogCritical
// if log accepts none.
func LowestLevel(log *slog.Logger) LogLevel {
	for level := LogTrace; level < LogCritical; level++ {
		if log.Enabled(context.Background(), level.Slog()) {
			return level
		}
	}
	return LogCritical
}
