package host

// The gRPC functions exist so that modules that import them load. Each one
// checks its pointers and then returns Unimplemented.

// grpcCall implements proxy_grpc_call.
func grpcCall(vm *VM, args []uint64) Status {
	return vm.unimplemented(args[:10], args[11])
}

// grpcStream implements proxy_grpc_stream.
func grpcStream(vm *VM, args []uint64) Status {
	return vm.unimplemented(args[:8], args[8])
}

// grpcSend implements proxy_grpc_send.
func grpcSend(vm *VM, args []uint64) Status {
	if _, ok := vm.read(args[1], args[2]); !ok {
		return InvalidMemoryAccess
	}
	return Unimplemented
}

// grpcEnd implements proxy_grpc_cancel and proxy_grpc_close.
func grpcEnd(*VM, []uint64) Status { return Unimplemented }

// unimplemented checks the pairs of address and size, and the address of the
// result.
func (vm *VM) unimplemented(ranges []uint64, out uint64) Status {
	for i := 0; i < len(ranges); i += 2 {
		if _, ok := vm.read(ranges[i], ranges[i+1]); !ok {
			return InvalidMemoryAccess
		}
	}
	if !vm.inside(out) {
		return InvalidMemoryAccess
	}
	return Unimplemented
}
