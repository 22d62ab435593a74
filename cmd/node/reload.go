package node

import (
	"errors"
	"reflect"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// Reload makes new exchanges use the engines, policies, limits, API keys and
// certificates of next. If a part of next cannot be used, Reload returns an error and
// changes nothing. Keys that are read at the start only keep their values, and a log
// line names each of them that differs.
func (n *Node) Reload(next *config.Config) error {
	err := n.reload(next)
	n.metrics.ConfigLoaded(err == nil, time.Now())
	return err
}

// ReloadRefused notes that a new configuration was refused before Reload.
func (n *Node) ReloadRefused() { n.metrics.ConfigLoaded(false, time.Now()) }

func (n *Node) reload(next *config.Config) error {
	f, err := loadFiles(next, n.log)
	if err != nil {
		return err
	}
	old := n.cfg.Load()
	for _, key := range []struct {
		name    string
		changed bool
	}{
		{"server.listen", old.Server.Listen != next.Server.Listen},
		{"server.http3", old.Server.HTTP3 != next.Server.HTTP3},
		{"server.tls", old.Server.TLS != next.Server.TLS},
		{"server.max_header", old.Server.MaxHeader != next.Server.MaxHeader},
		{"server.read_header_timeout", old.Server.ReadHeaderTimeout != next.Server.ReadHeaderTimeout},
		{"server.idle_timeout of HTTP connections", old.Server.IdleTimeout != next.Server.IdleTimeout},
		{"server.write_timeout of TCP connections", old.Server.WriteTimeout != next.Server.WriteTimeout},
		{"admin.listen", old.Admin.Listen != next.Admin.Listen},
		{"admin.token_file", old.Admin.TokenFile != next.Admin.TokenFile},
		{"admin.allowed_hosts", !slices.Equal(old.Admin.AllowedHosts, next.Admin.AllowedHosts)},
		{"discovery", !reflect.DeepEqual(old.Discovery, next.Discovery)},
		{"metrics.listen", old.Metrics.Listen != next.Metrics.Listen},
		{"epp.listen", old.EPP.Listen != next.EPP.Listen},
		{"epp.tls", old.EPP.TLS != next.EPP.TLS},
		{"fleet", !reflect.DeepEqual(old.Fleet, next.Fleet)},
		{"kv_index", old.KVIndex != next.KVIndex},
		{"tokens", !reflect.DeepEqual(old.Tokens, next.Tokens)},
		{"recording", old.Recording != next.Recording},
		{"timeouts.dial of known engines", old.Timeouts.Dial != next.Timeouts.Dial},
		{"transport of known engines", old.Transport != next.Transport},
		{"conversation.capacity", old.Conversation.Capacity != next.Conversation.Capacity},
	} {
		if key.changed {
			n.log.Warn("this key is read only at the start; the old value stays until a restart", "key", key.name)
		}
	}
	next = n.options.share(next, n.started.Fleet.Workers)
	if err := applyPlugins(n.plugins, next, n.options.Role, n.memory); err != nil {
		return err
	}
	n.cfg.Store(next) // before Apply, which builds the clients of new engines from it
	if n.options.Role != RoleWorker {
		if err := n.registry.Apply(engine.SourceStatic, next.Instances(), time.Duration(next.Server.DrainTimeout)); err != nil {
			n.cfg.Store(old)
			return errors.Join(err, applyPlugins(n.plugins, old, n.options.Role, n.memory))
		}
		n.registry.Know(configuredModels(next))
		n.reapplyRegistrations()
		n.loads.Configure(next.Health)
	}
	n.registry.Configure(next.Health, next.Circuit, next.Pairs)
	if err := n.access.Reopen(next.Server.AccessLog); err != nil {
		n.log.Warn("the access log stays in the old file", "key", "server.access_log", "error", err)
	}
	f.verifier.Continue(n.verifier)
	n.verifier = f.verifier
	n.server.Reload(next, f.keys)
	n.server.SetTRTLLM(f.trtllm)
	for _, certs := range []*edge.Certs{n.certs, n.eppCerts} {
		if certs == nil {
			continue
		}
		if err := certs.Reload(); err != nil { // server.tls may name other files now, which a restart reads
			n.log.Warn("certificate files cannot be used, the old certificates stay", "error", err)
		}
	}
	return nil
}
