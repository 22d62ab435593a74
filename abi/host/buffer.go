package host

// buffer returns the bytes of a buffer. NotFound: the buffer is not available
// now. BadArgument: the kind of buffer is unknown.
func (vm *VM) buffer(kind BufferKind) ([]byte, Status) {
	switch kind {
	case HTTPRequestBody, HTTPResponseBody:
		if stream := vm.stream(); stream != nil {
			return stream.Body(kind)
		}
	case HTTPCallResponseBody:
		if vm.answer != nil {
			return vm.answer.body, OK
		}
	case VMConfiguration:
		return vm.env.VMConfig(), OK
	case PluginConfiguration:
		return vm.env.PluginConfig(), OK
	case ForeignFunctionArguments:
		if vm.foreign != nil {
			return *vm.foreign, OK
		}
	case DownstreamData, UpstreamData, GRPCCallMessage:
		// This host has no TCP filters and no gRPC calls, so their buffers
		// never exist.
	default:
		return nil, BadArgument
	}
	return nil, NotFound
}

// getBufferBytes implements proxy_get_buffer_bytes: it returns at most max bytes from start. A
// start beyond the end gives an empty answer, as in Envoy; the specification requires BadArgument.
// BadArgument: the start is beyond the end, and start plus max exceeds 32 bits.
func getBufferBytes(vm *VM, args []uint64) Status {
	body, status := vm.buffer(BufferKind(uint32(args[0])))
	if status != OK {
		return status
	}
	size := uint64(len(body))
	if begin, most := uint32(args[1]), uint32(args[2]); uint64(begin) > size && begin+most < begin {
		return BadArgument
	}
	start := min(uint64(uint32(args[1])), size)
	end := min(start+uint64(uint32(args[2])), size)
	return vm.writeBytes(args[3], args[4], body[start:end])
}

// setBufferBytes implements proxy_set_buffer_bytes: it replaces size bytes from
// start. Start 0 with size 0 prepends; a start at or beyond the end appends.
// BadArgument: the buffer is read-only.
func setBufferBytes(vm *VM, args []uint64) Status {
	kind := BufferKind(uint32(args[0]))
	switch kind {
	case HTTPRequestBody, HTTPResponseBody, DownstreamData, UpstreamData:
	default:
		return BadArgument
	}
	body, status := vm.buffer(kind)
	if status != OK {
		return status
	}
	value, ok := vm.read(args[3], args[4])
	if !ok {
		return InvalidMemoryAccess
	}
	size := uint64(len(body))
	start := min(uint64(uint32(args[1])), size)
	length := min(uint64(uint32(args[2])), size-start)
	return vm.stream().SetBody(kind, int(start), int(length), value)
}

// getBufferStatus implements proxy_get_buffer_status: it returns the size, and
// flags that are always 0.
func getBufferStatus(vm *VM, args []uint64) Status {
	body, status := vm.buffer(BufferKind(uint32(args[0])))
	if status != OK {
		return status
	}
	if !vm.inside(args[1], args[2]) {
		return InvalidMemoryAccess
	}
	vm.writeU32(args[1], uint32(len(body)))
	return vm.writeU32(args[2], 0)
}

// getConfiguration implements proxy_get_configuration of 0.1.0: the VM's
// configuration in proxy_on_vm_start, else the plugin's.
func getConfiguration(vm *VM, args []uint64) Status {
	if vm.vmStarting {
		return vm.writeBytes(args[0], args[1], vm.env.VMConfig())
	}
	return vm.writeBytes(args[0], args[1], vm.env.PluginConfig())
}
