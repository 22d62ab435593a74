package host

import "time"

// RootEnv is an optional interface of an Env. It gets a call when a root context ends
// whose Done returned false.
type RootEnv interface {
	// RootDone reports that the guest called proxy_done for a root context. It
	// returns NotFound when no Done of that context is pending.
	RootDone(root uint32) Status
}

// contextID returns the context that host functions act on: the effective one,
// or the callback's own one if the effective one has ended.
func (vm *VM) contextID() uint32 {
	if _, live := vm.contexts[vm.effective]; live {
		return vm.effective
	}
	return vm.current
}

// rootID returns the root of the context that host functions act on; 0 when
// there is none.
func (vm *VM) rootID() uint32 { return vm.contexts[vm.contextID()] }

// stream returns the stream of the context that host functions act on, or nil.
func (vm *VM) stream() Stream {
	id := vm.contextID()
	if root := vm.contexts[id]; root == 0 || root == id {
		return nil
	}
	return vm.env.Stream(id)
}

// setEffectiveContext implements proxy_set_effective_context; it lasts until
// the running callback returns. BadArgument: the id is not that of a live
// context of this VM.
func setEffectiveContext(vm *VM, args []uint64) Status {
	id := uint32(args[0])
	if _, live := vm.contexts[id]; !live {
		return BadArgument
	}
	vm.effective = id
	return OK
}

// done implements proxy_done. NotFound: no Done of the context is pending.
func done(vm *VM, _ []uint64) Status {
	if stream := vm.stream(); stream != nil {
		return stream.Done()
	}
	id := vm.contextID()
	if env, ok := vm.env.(RootEnv); ok && id != 0 && vm.contexts[id] == id {
		return env.RootDone(id)
	}
	return NotFound
}

// setTickPeriod implements proxy_set_tick_period_milliseconds for the root of
// the context. BadArgument: there is no context.
func setTickPeriod(vm *VM, args []uint64) Status {
	root := vm.rootID()
	if root == 0 {
		return BadArgument
	}
	vm.env.SetTickPeriod(root, time.Duration(uint32(args[0]))*time.Millisecond)
	return OK
}
