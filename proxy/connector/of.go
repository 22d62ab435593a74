package connector

import "github.com/pdproxy/pdproxy/proxy/engine"

var byName = func() map[string]Connector {
	m := make(map[string]Connector)
	for _, c := range All() {
		m[c.Name()] = c
	}
	return m
}()

// Of returns the connector of an instance; nil if the configuration, which checks the
// name, has let one pass that does not exist.
func Of(i *engine.Instance) Connector { return byName[i.Spec.Connector] }
