package cmd

import (
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// share is cfg as one process goes by it, of so many workers of the host: what
// limits.max_exchanges, limits.max_reading, limits.queue and limits.buffer_memory
// allow is divided by them. The other limits are of one client or one request, and
// the retry budget is a share of what a process serves.
func (p Part) share(cfg *config.Config, workers int) *config.Config {
	if p.Role != RoleWorker {
		return cfg
	}
	own := *cfg
	memory := int64(cfg.Limits.BufferMemory)
	if memory == 0 {
		memory = buffer.DefaultLimit()
	}
	own.Limits = cfg.Limits.Share(workers, config.ByteSize(max(1, memory/int64(max(1, workers)))))
	return &own
}

// shareEngine is an engine as one process goes by it: its max_conns is divided
// likewise.
func (p Part) shareEngine(spec config.Engine, workers int) config.Engine {
	if p.Role == RoleWorker {
		spec.MaxConns = config.Divide(spec.MaxConns, workers)
	}
	return spec
}
