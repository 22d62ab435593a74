package host

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/tetratelabs/wazero/api"
)

// Callback names an export of proxy-wasm that the host calls.
type Callback uint8

// The callbacks. The list contains the callbacks of TCP streams and of gRPC calls, so that the host
// can describe a module. The host never calls them.
const (
	OnContextCreate Callback = iota
	OnVMStart
	OnConfigure
	OnTick
	OnRequestHeaders
	OnRequestBody
	OnRequestTrailers
	OnResponseHeaders
	OnResponseBody
	OnResponseTrailers
	OnHTTPCallResponse
	OnQueueReady
	OnForeignFunction
	OnDone
	OnLog
	OnDelete
	OnNewConnection
	OnDownstreamData
	OnUpstreamData
	OnDownstreamConnectionClose
	OnUpstreamConnectionClose
	OnGRPCReceiveInitialMetadata
	OnGRPCReceive
	OnGRPCReceiveTrailingMetadata
	OnGRPCClose
	callbackCount
)

// callbackNames and callbackTypes are in the order of the constants. A type is
// the number of i32 parameters, then "i" if an i32 is returned.
var callbackNames = [callbackCount]string{
	"proxy_on_context_create", "proxy_on_vm_start", "proxy_on_configure", "proxy_on_tick",
	"proxy_on_request_headers", "proxy_on_request_body", "proxy_on_request_trailers",
	"proxy_on_response_headers", "proxy_on_response_body", "proxy_on_response_trailers",
	"proxy_on_http_call_response", "proxy_on_queue_ready", "proxy_on_foreign_function",
	"proxy_on_done", "proxy_on_log", "proxy_on_delete",
	"proxy_on_new_connection", "proxy_on_downstream_data", "proxy_on_upstream_data",
	"proxy_on_downstream_connection_close", "proxy_on_upstream_connection_close",
	"proxy_on_grpc_receive_initial_metadata", "proxy_on_grpc_receive",
	"proxy_on_grpc_receive_trailing_metadata", "proxy_on_grpc_close",
}

var callbackTypes = [callbackCount]string{
	"2", "2i", "2i", "1",
	"3i", "3i", "2i",
	"3i", "3i", "2i",
	"5", "2", "3",
	"1i", "1", "1",
	"1i", "3i", "3i",
	"2", "2",
	"3", "3",
	"3", "3",
}

// String returns the callback's export name.
func (c Callback) String() string {
	if c < callbackCount {
		return callbackNames[c]
	}
	return fmt.Sprintf("callback %d", uint8(c))
}

// callbackNamed finds a callback by its export name.
func callbackNamed(name string) (Callback, bool) {
	i := slices.Index(callbackNames[:], name)
	return Callback(max(i, 0)), i >= 0
}

// checkCallback rejects an export that has the name of a callback, or of a
// function of the life cycle, but another type.
func checkCallback(name string, def api.FunctionDefinition) error {
	var allowed []string
	switch c, ok := callbackNamed(name); {
	case ok && (c == OnRequestHeaders || c == OnResponseHeaders):
		allowed = []string{"3i", "2i"} // 0.1.0 has no end_of_stream
	case ok && c < OnNewConnection: // the host calls no other callbacks
		allowed = []string{callbackTypes[c]}
	case name == "proxy_on_memory_allocate" || name == "malloc":
		allowed = []string{"1i"}
	case name == "_initialize" || name == "_start":
		allowed = []string{"0"}
	case name == "main" || name == "__main_void":
		allowed = []string{"2i", "0i", "0"}
	default:
		return nil
	}
	if !slices.Contains(allowed, shortType(def)) {
		return fmt.Errorf("load module: export %s has the wrong type %s", name, typeText(def.ParamTypes(), def.ResultTypes()))
	}
	return nil
}

// shortType writes a type in the notation of callbackTypes; "" for a type that
// the notation cannot express.
func shortType(def api.FunctionDefinition) string {
	params, results := def.ParamTypes(), def.ResultTypes()
	for _, t := range slices.Concat(params, results) {
		if t != api.ValueTypeI32 {
			return ""
		}
	}
	return fmt.Sprint(len(params)) + strings.Repeat("i", len(results))
}

// Has reports whether the guest exports a callback. When the callback is
// absent, its method costs nothing and returns its default: Continue or true.
func (vm *VM) Has(c Callback) bool {
	return c < callbackCount && vm.module.has[c]
}

// callback calls a callback for a context with up to five parameters and
// returns its result; ok is false when the guest does not have it.
func (vm *VM) callback(ctx context.Context, c Callback, id uint32, params ...uint64) (result uint32, ok bool, err error) {
	if vm.failed != nil {
		return 0, false, ErrPoisoned
	}
	if _, live := vm.contexts[id]; !live {
		return 0, false, fmt.Errorf("call %s: %w %d", c, ErrUnknownContext, id)
	}
	fn := vm.callbacks[c]
	if fn == nil {
		if !vm.module.has[c] {
			return 0, false, nil
		}
		fn = vm.exported(c.String())
		vm.callbacks[c] = fn
	}
	vm.stack[0] = uint64(id)
	n := 1 + copy(vm.stack[1:], params)
	if err := vm.call(ctx, fn, c.String(), id, vm.stack[:n]); err != nil {
		return 0, false, err
	}
	return uint32(vm.stack[0]), true, nil
}

// action calls a callback that returns an action.
func (vm *VM) action(ctx context.Context, c Callback, id uint32, params ...uint64) (Action, error) {
	result, ok, err := vm.callback(ctx, c, id, params...)
	if !ok {
		return Continue, err
	}
	return Action(result), nil
}

// truth calls a callback that returns a bool. An absent callback counts as true.
func (vm *VM) truth(ctx context.Context, c Callback, id uint32, params ...uint64) (bool, error) {
	result, ok, err := vm.callback(ctx, c, id, params...)
	if err != nil {
		return false, err
	}
	return !ok || result != 0, nil
}

// notify calls a callback that returns nothing.
func (vm *VM) notify(ctx context.Context, c Callback, id uint32, params ...uint64) error {
	_, _, err := vm.callback(ctx, c, id, params...)
	return err
}

// ContextCreate makes a context. With parent 0 it is a root context, else the
// context of one stream below the root context parent. The owner chooses the
// id: not 0, and not the id of a live context.
func (vm *VM) ContextCreate(ctx context.Context, id, parent uint32) error {
	if vm.failed != nil {
		return ErrPoisoned
	}
	if _, live := vm.contexts[id]; live || id == 0 {
		return fmt.Errorf("create context %d: the id is taken", id)
	}
	root := id
	if parent != 0 {
		if vm.contexts[parent] != parent {
			return fmt.Errorf("create context %d: %w %d", id, ErrUnknownContext, parent)
		}
		root = parent
	}
	vm.contexts[id] = root
	if parent == 0 && vm.root == 0 {
		vm.root = id
	}
	return vm.notify(ctx, OnContextCreate, id, uint64(parent))
}

// VMStart calls proxy_on_vm_start for a root context with the size of
// Env.VMConfig. When it returns false, the VM must not be used.
func (vm *VM) VMStart(ctx context.Context, root uint32) (bool, error) {
	vm.vmStarting = true
	ok, err := vm.truth(ctx, OnVMStart, root, uint64(uint32(len(vm.env.VMConfig()))))
	vm.vmStarting = false
	return ok, err
}

// Configure calls proxy_on_configure for a root context with the size of
// Env.PluginConfig. When it returns false, the plugin must not be used.
func (vm *VM) Configure(ctx context.Context, root uint32) (bool, error) {
	return vm.truth(ctx, OnConfigure, root, uint64(uint32(len(vm.env.PluginConfig()))))
}

// Tick calls proxy_on_tick for a root context.
func (vm *VM) Tick(ctx context.Context, root uint32) error {
	return vm.notify(ctx, OnTick, root)
}

// RequestHeaders calls proxy_on_request_headers with the number of header lines. end reports that
// no body follows; a 0.1.0 guest does not receive it.
func (vm *VM) RequestHeaders(ctx context.Context, id uint32, lines int, end bool) (Action, error) {
	return vm.action(ctx, OnRequestHeaders, id, uint64(lines), flag(end))
}

// RequestBody calls proxy_on_request_body with the number of bytes in the buffer HTTPRequestBody.
// end reports that no more bytes follow.
func (vm *VM) RequestBody(ctx context.Context, id uint32, size int, end bool) (Action, error) {
	return vm.action(ctx, OnRequestBody, id, uint64(uint32(size)), flag(end))
}

// RequestTrailers calls proxy_on_request_trailers with the number of lines.
func (vm *VM) RequestTrailers(ctx context.Context, id uint32, lines int) (Action, error) {
	return vm.action(ctx, OnRequestTrailers, id, uint64(lines))
}

// ResponseHeaders calls proxy_on_response_headers, as RequestHeaders.
func (vm *VM) ResponseHeaders(ctx context.Context, id uint32, lines int, end bool) (Action, error) {
	return vm.action(ctx, OnResponseHeaders, id, uint64(lines), flag(end))
}

// ResponseBody calls proxy_on_response_body, as RequestBody.
func (vm *VM) ResponseBody(ctx context.Context, id uint32, size int, end bool) (Action, error) {
	return vm.action(ctx, OnResponseBody, id, uint64(uint32(size)), flag(end))
}

// ResponseTrailers calls proxy_on_response_trailers with the number of lines.
func (vm *VM) ResponseTrailers(ctx context.Context, id uint32, lines int) (Action, error) {
	return vm.action(ctx, OnResponseTrailers, id, uint64(lines))
}

// callAnswer is the answer of an HTTP call. It exists while its callback runs.
type callAnswer struct {
	headers, trailers readOnlyMap
	body              []byte
	failed            bool
}

// HTTPCallResponse calls proxy_on_http_call_response for the answer of the call
// with this token. The maps and the body are read-only and available only
// during the callback. Empty headers mean that the call failed: the guest
// receives 0, 0, 0, and proxy_get_status returns 11 and "reset".
func (vm *VM) HTTPCallResponse(ctx context.Context, root, token uint32, headers Pairs, body []byte, trailers Pairs) error {
	vm.answer = &callAnswer{headers: readOnlyMap{headers}, body: body, trailers: readOnlyMap{trailers}, failed: len(headers) == 0}
	err := vm.notify(ctx, OnHTTPCallResponse, root, uint64(token),
		uint64(len(headers)), uint64(uint32(len(body))), uint64(len(trailers)))
	vm.answer = nil
	return err
}

// QueueReady calls proxy_on_queue_ready for the root context that registered
// the queue.
func (vm *VM) QueueReady(ctx context.Context, root, queue uint32) error {
	return vm.notify(ctx, OnQueueReady, root, uint64(queue))
}

// ForeignFunction calls proxy_on_foreign_function with an id that the embedder
// chose. During the call args is the buffer FOREIGN_FUNCTION_ARGUMENTS.
func (vm *VM) ForeignFunction(ctx context.Context, root, function uint32, args []byte) error {
	vm.foreign = &args
	err := vm.notify(ctx, OnForeignFunction, root, uint64(function), uint64(uint32(len(args))))
	vm.foreign = nil
	return err
}

// Done calls proxy_on_done. False: the guest still needs the context. It later
// calls proxy_done, which calls Stream.Done.
func (vm *VM) Done(ctx context.Context, id uint32) (bool, error) {
	return vm.truth(ctx, OnDone, id)
}

// Log calls proxy_on_log.
func (vm *VM) Log(ctx context.Context, id uint32) error {
	return vm.notify(ctx, OnLog, id)
}

// Delete calls proxy_on_delete and ends the context.
func (vm *VM) Delete(ctx context.Context, id uint32) error {
	err := vm.notify(ctx, OnDelete, id)
	delete(vm.contexts, id)
	if vm.root == id {
		vm.root = 0
	}
	return err
}

// flag returns the number that the guest receives for a bool.
func flag(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}
