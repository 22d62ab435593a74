package connector

import (
	"reflect"
	"sync/atomic"
	"unsafe"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// place returns a target on an instance with the given facts. Only the registry
// publishes facts, after probes, so this test helper writes the private field.
func place(spec config.Engine, host string, rank int, facts engine.Facts) engine.Target {
	inst := &engine.Instance{Spec: spec, Host: host, KVLease: spec.KVLease()}
	field := reflect.ValueOf(inst).Elem().FieldByName("facts")
	(*atomic.Pointer[engine.Facts])(unsafe.Pointer(field.UnsafeAddr())).Store(&facts)
	return engine.Target{Instance: inst, Rank: rank}
}
