package attempt

import (
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/prompt"
	"github.com/pdproxy/pdproxy/proxy/retained"
)

// Options are the services that all attempts of a process share. All fields are needed.
type Options struct {
	Registry    *engine.Registry
	Coordinator coordinator.Coordinator
	Connector   func(name string) connector.Connector // of a name that the configuration has
	Memory      *buffer.Budget                        // counts the answers that are held
	Cleanups    *cleanup.Runner
	Retained    retained.Store
	Prompts     *prompt.Matcher
	Log         *slog.Logger
}

// Services holds the state that all attempts of a process share. It is safe for concurrent use.
type Services struct {
	Options
	Budget Budget // of retries

	process string        // 16 hex digits, random: the first half of leg ids
	ids     atomic.Uint64 // of legs
	encodes atomic.Uint64 // requests for encoders
	warned  sync.Map      // ids of the prefill engines that warnForeign has warned of
}

// NewServices returns the Services of a process.
func NewServices(o Options) *Services {
	return &Services{Options: o, process: downstream.RandomHex(8)}
}

// LegID returns a new id for one attempt: 32 lower-case hex digits. The width is fixed
// because SGLang aborts by prefix. Ids are unique over processes and restarts.
func (s *Services) LegID() string {
	var b [32]byte
	copy(b[:], s.process)
	n := s.ids.Add(1)
	for i := 31; i >= 16; i-- {
		b[i] = "0123456789abcdef"[n&15]
		n >>= 4
	}
	return string(b[:])
}

// warnForeign logs, once for each prefill engine, that its answer names a foreign host.
func (s *Services) warnForeign(prefill engine.Target) {
	if _, warned := s.warned.LoadOrStore(prefill.ID, true); !warned {
		s.Log.Warn("the answer of prefill names a host that is not known to be prefill's; decode does not connect to that host and computes the prompts itself (engine.kv_hosts lists further hosts of an engine)",
			"engine", prefill.Name())
	}
}
