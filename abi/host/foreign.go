package host

// callForeignFunction implements proxy_call_foreign_function. NotFound: there
// is no function of that name. The host writes the result only if the function
// answers OK, and only where the guest gives an address that is not 0.
func callForeignFunction(vm *VM, args []uint64) Status {
	name, ok1 := vm.read(args[0], args[1])
	arguments, ok2 := vm.read(args[2], args[3])
	if !ok1 || !ok2 || !vm.inside(args[4], args[5]) {
		return InvalidMemoryAccess
	}
	if len(name) > MaxName {
		return NotFound
	}
	result, status := vm.env.Foreign(vm.contextID(), string(name), arguments)
	if status != OK {
		return status
	}
	valuePtr, sizePtr := uint32(args[4]), uint32(args[5])
	switch {
	case valuePtr != 0 && sizePtr != 0:
		return vm.writeBytes(args[4], args[5], result)
	case sizePtr != 0:
		return vm.writeU32(args[5], uint32(len(result)))
	}
	// The guest gave no place for the address or for the size. Each is useless without
	// the other.
	return OK
}
