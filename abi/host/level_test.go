package host

import (
	"io"
	"log/slog"
	"testing"
)

func TestLogLevels(t *testing.T) {
	for level, name := range levelNames {
		l := LogLevel(level)
		if got, err := ParseLogLevel(name); got != l || err != nil {
			t.Errorf("%s is level %d (%v)", name, got, err)
		}
		if l > LogTrace && l.Slog() <= (l-1).Slog() {
			t.Errorf("level %s is not above the previous level", name)
		}
		log := slog.New(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: l.Slog()}))
		if got := LowestLevel(log); got != l {
			t.Errorf("a log with the level %s has the lowest level %d", name, got)
		}
	}
	if LogInfo.Slog() != slog.LevelInfo || LogLevel(99).Slog() != LogCritical.Slog() {
		t.Error("want LogInfo equal to slog's level, and no level above critical")
	}
	if _, err := ParseLogLevel("loud"); err == nil {
		t.Error("loud is a level")
	}
	if got := LowestLevel(slog.New(slog.DiscardHandler)); got != LogCritical {
		t.Errorf("a log that discards everything has the lowest level %d", got)
	}
}
