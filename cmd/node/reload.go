package node

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// Reload makes new exchanges use the engines, policies, limits, API keys and
// certificates of next. If a part of next cannot be used, Reload returns an error and
// changes nothing. A log line lists the changes. Other lines name each changed key that has no
// effect, or not on all parts of the process, before a restart.
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
	n.warnFixed(old, next)
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
		n.sleep.Configure(next.Sleep)
	} else {
		var names []string
		for _, e := range next.Instances() {
			names = append(names, e.Name)
		}
		n.worker.mirror.Await(names)
	}
	n.registry.Configure(next.Health, next.Circuit, next.Pairs)
	n.registry.SetWakes(next.Sleep.Wake)
	if err := n.access.Reopen(next.Server.AccessLog, next.Server.AccessLogFormat); err != nil {
		n.log.Warn("the access log stays in the old file", "key", "server.access_log", "error", err)
	}
	f.verifier.Continue(n.verifier)
	n.verifier = f.verifier
	n.server.Reload(next, f.keys)
	n.server.SetConnectors(connector.Configured(f.trtllm))
	for _, certs := range []*edge.Certs{n.certs, n.eppCerts} {
		if certs == nil {
			continue
		}
		if err := certs.Reload(); err != nil { // server.tls may name other files now, which a restart reads
			n.log.Warn("certificate files cannot be used, the old certificates stay", "error", err)
		}
	}
	n.log.Info("configuration reloaded", "changes", listed(old.Changes(next)))
	return nil
}

// maxListed bounds the changes that a log line lists.
const maxListed = 30

// listed joins changes for a log line.
func listed(changes []string) string {
	if len(changes) == 0 {
		return "none; files that keys name were read again"
	}
	if n := len(changes) - maxListed; n > 0 {
		changes = append(changes[:maxListed:maxListed], fmt.Sprintf("and %d more", n))
	}
	return strings.Join(changes, ", ")
}
