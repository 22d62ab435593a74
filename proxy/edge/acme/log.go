package acme

import (
	"context"
	"log/slog"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// silent are the errors of certmagic (config.go, async.go, handshake.go) that event logs too, or
// that any client can cause.
var silent = map[string]bool{
	"could not get certificate from issuer": true,
	"will retry":                            true,
	"tls-alpn challenge":                    true,
}

// zapLogger returns a logger for certmagic that passes on errors until ctx ends: later errors
// say only that work was given up.
func zapLogger(ctx context.Context, log *slog.Logger) *zap.Logger {
	return zap.New(&core{LevelEnabler: zapcore.ErrorLevel, ctx: ctx, log: log})
}

// core writes entries of zap to log, as warnings.
type core struct {
	zapcore.LevelEnabler
	ctx context.Context
	log *slog.Logger
}

// With implements zapcore.Core.
func (c *core) With(fields []zapcore.Field) zapcore.Core {
	return &core{c.LevelEnabler, c.ctx, c.log.With(attributes(fields)...)}
}

// Check implements zapcore.Core.
func (c *core) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) && c.ctx.Err() == nil && !silent[e.Message] {
		return ce.AddCore(e, c)
	}
	return ce
}

// Write implements zapcore.Core.
func (c *core) Write(e zapcore.Entry, fields []zapcore.Field) error {
	c.log.Warn("ACME: "+e.Message, attributes(fields)...)
	return nil
}

// Sync implements zapcore.Core.
func (c *core) Sync() error { return nil }

// attributes returns the fields for slog.
func attributes(fields []zapcore.Field) []any {
	m := zapcore.NewMapObjectEncoder()
	var list []any
	for _, f := range fields {
		f.AddTo(m)
		if v, ok := m.Fields[f.Key]; ok {
			list = append(list, slog.Any(f.Key, v))
		}
	}
	return list
}
