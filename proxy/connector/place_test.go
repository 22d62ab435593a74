package connector

import (
	"reflect"
	"sync/atomic"
	"unsafe"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// place gives a target on an instance that has said facts of itself. The
// registry alone publishes facts, after probes, so that a test without one
// reaches into the instance.
func place(spec config.Engine, host string, rank int, facts engine.Facts) engine.Target {
	inst := &engine.Instance{Spec: spec, Host: host}
	field := reflect.ValueOf(inst).Elem().FieldByName("facts")
	(*atomic.Pointer[engine.Facts])(unsafe.Pointer(field.UnsafeAddr())).Store(&facts)
	return engine.Target{Instance: inst, Rank: rank}
}
