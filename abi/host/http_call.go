package host

import "time"

// httpCall implements proxy_http_call for the root of the context. BadArgument:
// :method, :path or :authority is missing, the upstream's name is longer than
// MaxName, the timeout is negative, or there is no context. Env returns the
// other statuses.
func httpCall(vm *VM, args []uint64) Status {
	upstream, ok1 := vm.read(args[0], args[1])
	headers, status1 := vm.readPairs(args[2], args[3])
	body, ok2 := vm.read(args[4], args[5])
	trailers, status2 := vm.readPairs(args[6], args[7])
	if !ok1 || !ok2 || status1 != OK || status2 != OK || !vm.inside(args[9]) {
		return InvalidMemoryAccess
	}
	root := vm.rootID()
	timeout := int32(uint32(args[8]))
	if root == 0 || timeout < 0 || len(upstream) > MaxName {
		return BadArgument
	}
	for _, key := range []string{":method", ":path", ":authority"} {
		if _, ok := (readOnlyMap{headers}).Value(key); !ok {
			return BadArgument
		}
	}
	token, status := vm.env.HTTPCall(root, &HTTPCall{
		Upstream: string(upstream),
		Headers:  headers,
		Body:     body,
		Trailers: trailers,
		Timeout:  time.Duration(timeout) * time.Millisecond,
	})
	if status != OK {
		return status
	}
	return vm.writeU32(args[9], token)
}

// getStatus implements proxy_get_status for the HTTP call whose callback runs.
// It returns 0 and no text, or 11 and "reset" when the call failed.
func getStatus(vm *VM, args []uint64) Status {
	if !vm.inside(args[0], args[1], args[2]) {
		return InvalidMemoryAccess
	}
	code, message := OK, ""
	if vm.answer != nil && vm.answer.failed {
		code, message = BrokenConnection, "reset"
	}
	if status := vm.writeString(args[1], args[2], message); status != OK {
		return status
	}
	return vm.writeU32(args[0], uint32(code))
}
