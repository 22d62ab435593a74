package host

// getSharedData implements proxy_get_shared_data. NotFound: no such key.
func getSharedData(vm *VM, args []uint64) Status {
	key, ok := vm.read(args[0], args[1])
	if !ok || !vm.inside(args[2], args[3], args[4]) {
		return InvalidMemoryAccess
	}
	if len(key) > MaxName {
		return NotFound
	}
	value, cas, status := vm.env.SharedData(string(key))
	if status != OK {
		return status
	}
	if status := vm.writeBytes(args[2], args[3], value); status != OK {
		return status
	}
	return vm.writeU32(args[4], cas)
}

// setSharedData implements proxy_set_shared_data. CASMismatch: cas is not 0 and
// differs from the value's. BadArgument: the key is longer than MaxName.
func setSharedData(vm *VM, args []uint64) Status {
	key, value, ok := vm.readTwo(args)
	if !ok {
		return InvalidMemoryAccess
	}
	if len(key) > MaxName {
		return BadArgument
	}
	return vm.env.SetSharedData(string(key), value, uint32(args[4]))
}

// registerSharedQueue implements proxy_register_shared_queue for the root of
// the context. BadArgument: there is no context, or the name is longer than
// MaxName. InternalFailure: the vm_id has too many queues.
func registerSharedQueue(vm *VM, args []uint64) Status {
	name, ok := vm.read(args[0], args[1])
	if !ok || !vm.inside(args[2]) {
		return InvalidMemoryAccess
	}
	root := vm.rootID()
	if root == 0 || len(name) > MaxName {
		return BadArgument
	}
	queue := vm.env.RegisterQueue(root, string(name))
	if queue == 0 {
		return InternalFailure
	}
	return vm.writeU32(args[2], queue)
}

// resolveSharedQueue implements proxy_resolve_shared_queue. NotFound: no such
// queue.
func resolveSharedQueue(vm *VM, args []uint64) Status {
	vmID, name, ok := vm.readTwo(args)
	if !ok || !vm.inside(args[4]) {
		return InvalidMemoryAccess
	}
	if len(name) > MaxName || len(vmID) > MaxName {
		return NotFound
	}
	queue, status := vm.env.ResolveQueue(string(vmID), string(name))
	if status != OK {
		return status
	}
	return vm.writeU32(args[4], queue)
}

// enqueueSharedQueue implements proxy_enqueue_shared_queue. NotFound: no such
// queue.
func enqueueSharedQueue(vm *VM, args []uint64) Status {
	value, ok := vm.read(args[1], args[2])
	if !ok {
		return InvalidMemoryAccess
	}
	return vm.env.Enqueue(uint32(args[0]), value)
}

// dequeueSharedQueue implements proxy_dequeue_shared_queue. NotFound: no such
// queue. Empty: the queue has no item.
func dequeueSharedQueue(vm *VM, args []uint64) Status {
	if !vm.inside(args[1], args[2]) {
		return InvalidMemoryAccess
	}
	value, status := vm.env.Dequeue(uint32(args[0]))
	if status != OK {
		return status
	}
	return vm.writeBytes(args[1], args[2], value)
}
