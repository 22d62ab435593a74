package sidecar

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net/textproto"
	"reflect"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/sidecar/extproc"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// CoordinatedByPicker is the coordination policy of requests whose engines an ext_proc picker has
// chosen. The configuration does not list it.
const CoordinatedByPicker = "picker"

// Reasons why a choice of the picker cannot be used, besides those of package extproc.
const (
	PickNoDestination = "no_destination" // the answer names no endpoint
	PickNotAllowed    = "not_allowed"    // no named endpoint is a known engine that can take the phase
	PickNotReady      = "not_ready"      // the named decode engine is not ready
	PickHasFailed     = "has_failed"     // the named decode engine has failed in this exchange
	PickNoTarget      = "no_target"      // the request could not be placed on the named decode engine
)

// PickerClient is the client of an ext_proc picker: the picker chooses the engines of all requests of
// this proxy, which is its picker client. Safe for concurrent use.
type PickerClient struct {
	cfg       config.Sidecar
	maxBody   config.ByteSize
	registry  *engine.Registry
	client    *extproc.Client
	addresses directory
}

// NewPickerClient returns the picker client of a configuration; nil for one without an ext_proc picker. It
// returns old if the configuration of the picker is the same. It connects to nothing.
func NewPickerClient(cfg *config.Config, registry *engine.Registry, old *PickerClient, log *slog.Logger) *PickerClient {
	address, _ := cfg.Sidecar.ExtProcPicker()
	if address == "" {
		return nil
	}
	if old != nil && reflect.DeepEqual(old.cfg, cfg.Sidecar) && old.maxBody == cfg.Server.MaxBody {
		return old
	}
	secure, err := PickerTLS(cfg.Sidecar)
	if err != nil { // the file has changed after the check
		log.Error("a file cannot be used: the proxy trusts no new certificate of the endpoint picker", "error", err)
		if old != nil {
			return old
		}
		secure = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: x509.NewCertPool()} // each request fails as the configuration says
	}
	client, err := extproc.New(extproc.Options{Address: address, TLS: secure, Timeout: time.Duration(cfg.Sidecar.PickerTimeout), MaxBody: int(cfg.Server.MaxBody)})
	if err != nil {
		log.Error("the endpoint picker cannot be called", "error", err)
		return old
	}
	return &PickerClient{cfg: cfg.Sidecar, maxBody: cfg.Server.MaxBody, registry: registry, client: client, addresses: directory{endpoints: true}}
}

// Close closes the connection to the picker as soon as no request uses it. A nil PickerClient is
// allowed.
func (c *PickerClient) Close() {
	if c != nil {
		c.client.Close()
	}
}

// FailsOpen reports whether the policies of this proxy place a request without a choice of the
// picker.
func (c *PickerClient) FailsOpen() bool { return c.cfg.PickerFailureModeAllow }

// Ask asks the picker for its choice. The errors are those of extproc.Client.Pick.
func (c *PickerClient) Ask(ctx context.Context, r *extproc.Request) (*extproc.Stream, *extproc.Decision, error) {
	if c.cfg.PickerSubset && r.Subset == nil {
		r.Subset = []string{}
		for _, i := range c.registry.Snapshot().Instances {
			if i.State() == engine.Ready {
				r.Subset = append(r.Subset, endpointOf(i))
			}
		}
	}
	return c.client.Pick(ctx, r)
}

// endpointOf returns the address by which pickers know an engine.
func endpointOf(i *engine.Instance) string {
	if at, ok := i.Spec.GatewayEndpoint(); ok {
		return at.String()
	}
	return i.Spec.Address()
}

// Follow makes the route that of a picker's choice. Like a header of a sidecar, a picker can name
// only known engines: Follow counts others and leaves them out. The reason is not "" if no
// destination is left; the choice then has no effect.
func (r *Route) Follow(c *PickerClient, request Request, d *extproc.Decision) (reason string) {
	r.Request = request
	snapshot := c.registry.Snapshot()
	lookup := func(list []*engine.Instance, addresses []string, fits func(*engine.Instance) bool) ([]*engine.Instance, bool) {
		all := true
		for _, address := range addresses {
			i := c.addresses.find(snapshot, withoutScheme(address))
			if i == nil || !fits(i) {
				all = false
			} else if !slices.Contains(list, i) {
				list = append(list, i)
			}
		}
		return list, all
	}
	var known bool
	r.destinations, known = lookup(r.destinations[:0], d.Destinations, func(i *engine.Instance) bool { return i.Role&abi.RoleDecode != 0 || servesWhole(i) })
	r.Restricted = len(r.destinations) > 0
	switch {
	case len(d.Destinations) == 0:
		return PickNoDestination
	case len(r.destinations) == 0:
		return PickNotAllowed
	case !known:
		r.Journal.Fallback("picker_destination", PickNotAllowed)
	}
	if r.named, known = lookup(r.named[:0], d.Prefill, func(i *engine.Instance) bool { return i.Role&abi.RolePrefill != 0 }); !known {
		r.Journal.Fallback("picker_prefill", PickNotAllowed)
	}
	if r.encode, known = lookup(r.encode[:0], d.Encoders, func(i *engine.Instance) bool { return i.Role&abi.RoleEncode != 0 }); !known {
		r.Journal.Fallback("picker_encoder", PickNotAllowed)
	}
	return ""
}

// nextDestination lets the decode leg move to the next destination of the picker on which no
// attempt has failed.
func (r *Route) nextDestination() {
	for _, i := range r.destinations {
		if !r.failedOn(i) && i.Role&abi.RoleDecode != 0 && i.Spec.Connector == r.local[0].Spec.Connector {
			r.local[0] = i
			r.Ask.Within.Decode = r.local[:]
			return
		}
	}
}

// Mutate applies the changes of a picker to the header lines that every leg carries. Lines that
// the proxy sets itself, and PD lines unless trust is set, stay as they are.
func Mutate(fields []upstream.Field, m *extproc.HeaderMutation, trust bool) []upstream.Field {
	change(m, func(name string) bool {
		return !downstream.Proxied(name) && !downstream.OwnLine(name) && (trust || !connector.PDHeader(name))
	}, lines{
		has:    func(name string) bool { return hasField(fields, name) },
		remove: func(name string) { fields = downstream.Without(fields, name) },
		add:    func(name, value string) { fields = append(fields, upstream.Field{Name: name, Value: value}) },
	})
	return fields
}

func hasField(fields []upstream.Field, name string) bool {
	return slices.ContainsFunc(fields, func(f upstream.Field) bool { return textproto.CanonicalMIMEHeaderKey(f.Name) == name })
}

// lines are header lines that change. The names are in canonical form.
type lines struct {
	has    func(name string) bool
	remove func(name string)
	add    func(name, value string)
}

// change applies a picker's changes to those lines whose name is allowed.
func change(m *extproc.HeaderMutation, allowed func(name string) bool, to lines) {
	for _, name := range m.Remove {
		if name = textproto.CanonicalMIMEHeaderKey(name); allowed(name) {
			to.remove(name)
		}
	}
	for _, l := range m.Set {
		name := textproto.CanonicalMIMEHeaderKey(l.Name)
		if !allowed(name) {
			continue
		}
		has := to.has(name)
		if has && l.Action == extproc.AddIfAbsent || !has && l.Action == extproc.OverwriteOld {
			continue
		}
		if l.Action == extproc.Overwrite || l.Action == extproc.OverwriteOld {
			to.remove(name)
		}
		to.add(name, l.Value)
	}
}
