package main

import "unsafe"

// The callbacks. Those for headers differ by version and are in files of their
// own.

//go:wasmexport proxy_on_memory_allocate
func allocate(size uint32) unsafe.Pointer {
	b := make([]byte, max(size, 1))
	keep = append(keep, b)
	return unsafe.Pointer(unsafe.SliceData(b))
}

//go:wasmexport proxy_on_context_create
func onContextCreate(ctx, parent uint32) {
	if parent == 0 {
		root = ctx
		return
	}
	if streams[ctx] != nil {
		panic("context exists")
	}
	streams[ctx] = &streamState{section: "main", calls: map[string]int{}}
	live++
	run(&call{ctx: ctx, script: "main", name: "create"})
}

//go:wasmexport proxy_on_vm_start
func onVMStart(ctx, size uint32) bool {
	parse(configuration(6))
	c := &call{ctx: ctx, script: "main", name: "vm_start", size: size, result: 1}
	run(c)
	return c.result != 0
}

//go:wasmexport proxy_on_configure
func onConfigure(ctx, size uint32) bool {
	parse(configuration(7))
	c := &call{ctx: ctx, script: "main", name: "configure", size: size, result: 1}
	run(c)
	return c.result != 0
}

//go:wasmexport proxy_on_tick
func onTick(ctx uint32) {
	counts["tick"]++
	run(&call{ctx: ctx, script: "main", name: "tick", nth: counts["tick"]})
}

//go:wasmexport proxy_on_request_body
func onRequestBody(ctx, size, end uint32) uint32 { return stream(ctx, "request_body", size, end != 0) }

//go:wasmexport proxy_on_response_body
func onResponseBody(ctx, size, end uint32) uint32 {
	return stream(ctx, "response_body", size, end != 0)
}

//go:wasmexport proxy_on_request_trailers
func onRequestTrailers(ctx, count uint32) uint32 {
	return stream(ctx, "request_trailers", count, false)
}

//go:wasmexport proxy_on_response_trailers
func onResponseTrailers(ctx, count uint32) uint32 {
	return stream(ctx, "response_trailers", count, false)
}

//go:wasmexport proxy_on_http_call_response
func onHTTPCallResponse(ctx, token, headers, size, trailers uint32) {
	caller := callers[token]
	delete(callers, token)
	section := "main"
	if s := streams[caller]; s != nil {
		section = s.section
	}
	counts["http_call_response"]++
	run(&call{ctx: ctx, script: section, name: "http_call_response", size: size, id: headers, caller: caller, nth: counts["http_call_response"]})
}

//go:wasmexport proxy_on_queue_ready
func onQueueReady(ctx, queue uint32) {
	run(&call{ctx: ctx, script: "main", name: "queue_ready", id: queue})
}

//go:wasmexport proxy_on_done
func onDone(ctx uint32) bool {
	c := &call{ctx: ctx, script: "main", name: "root_done", result: 1}
	if s := streams[ctx]; s != nil {
		c.script, c.name = s.section, "done"
	}
	run(c)
	return c.result != 0
}

//go:wasmexport proxy_on_log
func onLog(ctx uint32) {
	if s := streams[ctx]; s != nil {
		run(&call{ctx: ctx, script: s.section, name: "log"})
	}
}

//go:wasmexport proxy_on_delete
func onDelete(ctx uint32) {
	s := streams[ctx]
	if s == nil {
		run(&call{ctx: ctx, script: "main", name: "root_delete"})
		return
	}
	delete(streams, ctx)
	live--
	run(&call{ctx: ctx, script: s.section, name: "delete"})
}

//go:wasmimport wasi_snapshot_preview1 random_get
func randomGet(ptr unsafe.Pointer, size uint32) uint32

//go:wasmimport wasi_snapshot_preview1 environ_sizes_get
func environSizesGet(count, size unsafe.Pointer) uint32

//go:wasmimport wasi_snapshot_preview1 clock_time_get
func clockTimeGet(id uint32, precision uint64, out unsafe.Pointer) uint32

//go:wasmimport wasi_snapshot_preview1 proc_exit
func procExit(code uint32)
