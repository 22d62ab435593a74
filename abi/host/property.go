package host

import "strings"

// maxPath is the longest property path; no property has a longer one.
const maxPath = 4 << 10

// getProperty implements proxy_get_property. NotFound: no such property.
func getProperty(vm *VM, args []uint64) Status {
	path, ok := vm.read(args[0], args[1])
	if !ok || !vm.inside(args[2], args[3]) {
		return InvalidMemoryAccess
	}
	segments, ok := splitPath(path)
	if !ok {
		return NotFound
	}
	value, status := vm.env.Property(vm.contextID(), segments)
	if status != OK {
		return status
	}
	return vm.writeBytes(args[2], args[3], value)
}

// setProperty implements proxy_set_property. NotFound: no such property.
func setProperty(vm *VM, args []uint64) Status {
	path, value, ok := vm.readTwo(args)
	if !ok {
		return InvalidMemoryAccess
	}
	segments, ok := splitPath(path)
	if !ok {
		return NotFound
	}
	return vm.env.SetProperty(vm.contextID(), segments, value)
}

// splitPath splits a path at its NUL bytes. It drops one NUL at the end, which
// C++ guests write.
func splitPath(path []byte) (segments []string, ok bool) {
	if len(path) == 0 || len(path) > maxPath {
		return nil, false
	}
	return strings.Split(strings.TrimSuffix(string(path), "\x00"), "\x00"), true
}
