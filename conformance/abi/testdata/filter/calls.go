package main

// The host functions without a wrapper: numbers as parameters, a status as
// result. The signatures are those of section 2 of the specification
// (proxy-wasm/spec, abi-versions/v0.2.1).

//go:wasmimport env proxy_log
func proxyLog(a0, a1, a2 uint32) uint32

//go:wasmimport env proxy_set_tick_period_milliseconds
func proxySetTickPeriodMilliseconds(a0 uint32) uint32

//go:wasmimport env proxy_set_effective_context
func proxySetEffectiveContext(a0 uint32) uint32

//go:wasmimport env proxy_done
func proxyDone() uint32

//go:wasmimport env proxy_get_current_time_nanoseconds
func proxyGetCurrentTimeNanoseconds(a0 uint32) uint32

//go:wasmimport env proxy_get_buffer_bytes
func proxyGetBufferBytes(a0, a1, a2, a3, a4 uint32) uint32

//go:wasmimport env proxy_set_buffer_bytes
func proxySetBufferBytes(a0, a1, a2, a3, a4 uint32) uint32

//go:wasmimport env proxy_get_buffer_status
func proxyGetBufferStatus(a0, a1, a2 uint32) uint32

//go:wasmimport env proxy_get_header_map_size
func proxyGetHeaderMapSize(a0, a1 uint32) uint32

//go:wasmimport env proxy_get_header_map_pairs
func proxyGetHeaderMapPairs(a0, a1, a2 uint32) uint32

//go:wasmimport env proxy_set_header_map_pairs
func proxySetHeaderMapPairs(a0, a1, a2 uint32) uint32

//go:wasmimport env proxy_get_header_map_value
func proxyGetHeaderMapValue(a0, a1, a2, a3, a4 uint32) uint32

//go:wasmimport env proxy_add_header_map_value
func proxyAddHeaderMapValue(a0, a1, a2, a3, a4 uint32) uint32

//go:wasmimport env proxy_replace_header_map_value
func proxyReplaceHeaderMapValue(a0, a1, a2, a3, a4 uint32) uint32

//go:wasmimport env proxy_remove_header_map_value
func proxyRemoveHeaderMapValue(a0, a1, a2 uint32) uint32

//go:wasmimport env proxy_send_local_response
func proxySendLocalResponse(a0, a1, a2, a3, a4, a5, a6, a7 uint32) uint32

//go:wasmimport env proxy_http_call
func proxyHttpCall(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9 uint32) uint32

//go:wasmimport env proxy_grpc_call
func proxyGrpcCall(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11 uint32) uint32

//go:wasmimport env proxy_grpc_stream
func proxyGrpcStream(a0, a1, a2, a3, a4, a5, a6, a7, a8 uint32) uint32

//go:wasmimport env proxy_grpc_send
func proxyGrpcSend(a0, a1, a2, a3 uint32) uint32

//go:wasmimport env proxy_grpc_cancel
func proxyGrpcCancel(a0 uint32) uint32

//go:wasmimport env proxy_grpc_close
func proxyGrpcClose(a0 uint32) uint32

//go:wasmimport env proxy_get_status
func proxyGetStatus(a0, a1, a2 uint32) uint32

//go:wasmimport env proxy_set_shared_data
func proxySetSharedData(a0, a1, a2, a3, a4 uint32) uint32

//go:wasmimport env proxy_get_shared_data
func proxyGetSharedData(a0, a1, a2, a3, a4 uint32) uint32

//go:wasmimport env proxy_register_shared_queue
func proxyRegisterSharedQueue(a0, a1, a2 uint32) uint32

//go:wasmimport env proxy_resolve_shared_queue
func proxyResolveSharedQueue(a0, a1, a2, a3, a4 uint32) uint32

//go:wasmimport env proxy_enqueue_shared_queue
func proxyEnqueueSharedQueue(a0, a1, a2 uint32) uint32

//go:wasmimport env proxy_dequeue_shared_queue
func proxyDequeueSharedQueue(a0, a1, a2 uint32) uint32

//go:wasmimport env proxy_define_metric
func proxyDefineMetric(a0, a1, a2, a3 uint32) uint32

//go:wasmimport env proxy_record_metric
func proxyRecordMetric(a0 uint32, v int64) uint32

//go:wasmimport env proxy_increment_metric
func proxyIncrementMetric(a0 uint32, v int64) uint32

//go:wasmimport env proxy_get_metric
func proxyGetMetric(a0, a1 uint32) uint32

//go:wasmimport env proxy_get_property
func proxyGetProperty(a0, a1, a2, a3 uint32) uint32

//go:wasmimport env proxy_set_property
func proxySetProperty(a0, a1, a2, a3 uint32) uint32

//go:wasmimport env proxy_call_foreign_function
func proxyCallForeignFunction(a0, a1, a2, a3, a4, a5 uint32) uint32

// hostcall is one host function with its number of arguments.
type hostcall struct {
	args int
	call func(a []uint64) uint32
}

var hostcalls = map[string]hostcall{
	"proxy_log":                          {3, func(a []uint64) uint32 { return proxyLog(uint32(a[0]), uint32(a[1]), uint32(a[2])) }},
	"proxy_set_tick_period_milliseconds": {1, func(a []uint64) uint32 { return proxySetTickPeriodMilliseconds(uint32(a[0])) }},
	"proxy_set_effective_context":        {1, func(a []uint64) uint32 { return proxySetEffectiveContext(uint32(a[0])) }},
	"proxy_done":                         {0, func(a []uint64) uint32 { return proxyDone() }},
	"proxy_get_current_time_nanoseconds": {1, func(a []uint64) uint32 { return proxyGetCurrentTimeNanoseconds(uint32(a[0])) }},
	"proxy_get_buffer_bytes": {5, func(a []uint64) uint32 {
		return proxyGetBufferBytes(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]), uint32(a[4]))
	}},
	"proxy_set_buffer_bytes": {5, func(a []uint64) uint32 {
		return proxySetBufferBytes(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]), uint32(a[4]))
	}},
	"proxy_get_buffer_status":    {3, func(a []uint64) uint32 { return proxyGetBufferStatus(uint32(a[0]), uint32(a[1]), uint32(a[2])) }},
	"proxy_get_header_map_size":  {2, func(a []uint64) uint32 { return proxyGetHeaderMapSize(uint32(a[0]), uint32(a[1])) }},
	"proxy_get_header_map_pairs": {3, func(a []uint64) uint32 { return proxyGetHeaderMapPairs(uint32(a[0]), uint32(a[1]), uint32(a[2])) }},
	"proxy_set_header_map_pairs": {3, func(a []uint64) uint32 { return proxySetHeaderMapPairs(uint32(a[0]), uint32(a[1]), uint32(a[2])) }},
	"proxy_get_header_map_value": {5, func(a []uint64) uint32 {
		return proxyGetHeaderMapValue(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]), uint32(a[4]))
	}},
	"proxy_add_header_map_value": {5, func(a []uint64) uint32 {
		return proxyAddHeaderMapValue(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]), uint32(a[4]))
	}},
	"proxy_replace_header_map_value": {5, func(a []uint64) uint32 {
		return proxyReplaceHeaderMapValue(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]), uint32(a[4]))
	}},
	"proxy_remove_header_map_value": {3, func(a []uint64) uint32 { return proxyRemoveHeaderMapValue(uint32(a[0]), uint32(a[1]), uint32(a[2])) }},
	"proxy_send_local_response": {8, func(a []uint64) uint32 {
		return proxySendLocalResponse(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]), uint32(a[4]), uint32(a[5]), uint32(a[6]), uint32(a[7]))
	}},
	"proxy_http_call": {10, func(a []uint64) uint32 {
		return proxyHttpCall(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]), uint32(a[4]), uint32(a[5]), uint32(a[6]), uint32(a[7]), uint32(a[8]), uint32(a[9]))
	}},
	"proxy_grpc_call": {12, func(a []uint64) uint32 {
		return proxyGrpcCall(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]), uint32(a[4]), uint32(a[5]), uint32(a[6]), uint32(a[7]), uint32(a[8]), uint32(a[9]), uint32(a[10]), uint32(a[11]))
	}},
	"proxy_grpc_stream": {9, func(a []uint64) uint32 {
		return proxyGrpcStream(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]), uint32(a[4]), uint32(a[5]), uint32(a[6]), uint32(a[7]), uint32(a[8]))
	}},
	"proxy_grpc_send":   {4, func(a []uint64) uint32 { return proxyGrpcSend(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3])) }},
	"proxy_grpc_cancel": {1, func(a []uint64) uint32 { return proxyGrpcCancel(uint32(a[0])) }},
	"proxy_grpc_close":  {1, func(a []uint64) uint32 { return proxyGrpcClose(uint32(a[0])) }},
	"proxy_get_status":  {3, func(a []uint64) uint32 { return proxyGetStatus(uint32(a[0]), uint32(a[1]), uint32(a[2])) }},
	"proxy_set_shared_data": {5, func(a []uint64) uint32 {
		return proxySetSharedData(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]), uint32(a[4]))
	}},
	"proxy_get_shared_data": {5, func(a []uint64) uint32 {
		return proxyGetSharedData(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]), uint32(a[4]))
	}},
	"proxy_register_shared_queue": {3, func(a []uint64) uint32 { return proxyRegisterSharedQueue(uint32(a[0]), uint32(a[1]), uint32(a[2])) }},
	"proxy_resolve_shared_queue": {5, func(a []uint64) uint32 {
		return proxyResolveSharedQueue(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]), uint32(a[4]))
	}},
	"proxy_enqueue_shared_queue": {3, func(a []uint64) uint32 { return proxyEnqueueSharedQueue(uint32(a[0]), uint32(a[1]), uint32(a[2])) }},
	"proxy_dequeue_shared_queue": {3, func(a []uint64) uint32 { return proxyDequeueSharedQueue(uint32(a[0]), uint32(a[1]), uint32(a[2])) }},
	"proxy_define_metric": {4, func(a []uint64) uint32 {
		return proxyDefineMetric(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]))
	}},
	"proxy_record_metric":    {2, func(a []uint64) uint32 { return proxyRecordMetric(uint32(a[0]), int64(a[1])) }},
	"proxy_increment_metric": {2, func(a []uint64) uint32 { return proxyIncrementMetric(uint32(a[0]), int64(a[1])) }},
	"proxy_get_metric":       {2, func(a []uint64) uint32 { return proxyGetMetric(uint32(a[0]), uint32(a[1])) }},
	"proxy_get_property": {4, func(a []uint64) uint32 {
		return proxyGetProperty(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]))
	}},
	"proxy_set_property": {4, func(a []uint64) uint32 {
		return proxySetProperty(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]))
	}},
	"proxy_call_foreign_function": {6, func(a []uint64) uint32 {
		return proxyCallForeignFunction(uint32(a[0]), uint32(a[1]), uint32(a[2]), uint32(a[3]), uint32(a[4]), uint32(a[5]))
	}},
}
