package host

// continueStream implements proxy_continue_stream.
func continueStream(vm *VM, args []uint64) Status {
	return vm.onStream(StreamKind(uint32(args[0])), Stream.Continue)
}

// closeStream implements proxy_close_stream.
func closeStream(vm *VM, args []uint64) Status {
	return vm.onStream(StreamKind(uint32(args[0])), Stream.Close)
}

// continueRequest implements proxy_continue_request of 0.1.0.
func continueRequest(vm *VM, _ []uint64) Status { return vm.onStream(HTTPRequest, Stream.Continue) }

// continueResponse implements proxy_continue_response of 0.1.0.
func continueResponse(vm *VM, _ []uint64) Status { return vm.onStream(HTTPResponse, Stream.Continue) }

// onStream applies an action to one direction of the stream. BadArgument: there
// is no such direction. Unimplemented: the direction belongs to TCP filters.
// NotFound: the context has no stream.
func (vm *VM) onStream(kind StreamKind, do func(Stream, StreamKind) Status) Status {
	switch kind {
	case HTTPRequest, HTTPResponse:
		if stream := vm.stream(); stream != nil {
			return do(stream, kind)
		}
		return NotFound
	case Downstream, Upstream:
		return Unimplemented
	}
	return BadArgument
}

// clearRouteCache implements proxy_clear_route_cache of 0.1.0. It does nothing,
// because the proxy chooses the route after all filters have run.
func clearRouteCache(*VM, []uint64) Status { return OK }

// sendLocalResponse implements proxy_send_local_response. NotFound: the context
// has no stream. Details longer than MaxDetails are cut. The stream returns the
// other statuses.
func sendLocalResponse(vm *VM, args []uint64) Status {
	details, ok1 := vm.read(args[1], args[2])
	body, ok2 := vm.read(args[3], args[4])
	headers, status := vm.readPairs(args[5], args[6])
	if !ok1 || !ok2 || status != OK {
		return InvalidMemoryAccess
	}
	stream := vm.stream()
	if stream == nil {
		return NotFound
	}
	return stream.LocalResponse(&LocalResponse{
		Status:     uint32(args[0]),
		Details:    string(details[:min(len(details), MaxDetails)]),
		Body:       body,
		Headers:    headers,
		GRPCStatus: int32(uint32(args[7])),
	})
}
