package connector

import "github.com/pdproxy/pdproxy/proxy/engine"

var byName = func() map[string]Connector {
	m := make(map[string]Connector)
	for _, c := range All() {
		m[c.Name()] = c
	}
	return m
}()

// Of returns the connector of an instance. It returns nil for a name that does not exist,
// which the checks of the configuration exclude.
func Of(i *engine.Instance) Connector { return byName[i.Spec.Connector] }
