package cmd

import "github.com/pdproxy/pdproxy/proxy/config"

// share is cfg as one process goes by it, of so many workers of the host: what
// limits.max_exchanges and limits.queue allow is divided by them. The other limits
// are of one client or one request, and the retry budget is a share of what a
// process serves.
func (p Part) share(cfg *config.Config, workers int) *config.Config {
	if p.Role != RoleWorker {
		return cfg
	}
	own := *cfg
	own.Limits.MaxExchanges = divide(cfg.Limits.MaxExchanges, workers)
	own.Limits.Queue = divide(cfg.Limits.Queue, workers)
	return &own
}

// shareEngine is an engine as one process goes by it: its max_conns is divided
// likewise.
func (p Part) shareEngine(spec config.Engine, workers int) config.Engine {
	if p.Role == RoleWorker {
		spec.MaxConns = divide(spec.MaxConns, workers)
	}
	return spec
}

// divide rounds up: what is allowed at all is allowed to each.
func divide(n, workers int) int {
	workers = max(1, workers)
	return (n + workers - 1) / workers
}
