package host

import (
	"encoding/binary"
	"time"
)

// maxSubscriptions is the number of events that one poll_oneoff may wait for.
const maxSubscriptions = 1024

// eventSize is the size of an event in guest memory.
const eventSize = 32

// subscriptionLayout holds the offsets of a subscription's fields. The clock's
// id, the timeout and the flags are those of a clock subscription.
type subscriptionLayout struct {
	size, clock, timeout, flags int
}

// The layouts of WASI and of its older version, which has one more field.
var (
	pollLayout         = subscriptionLayout{size: 48, clock: 16, timeout: 24, flags: 40}
	pollLayoutUnstable = subscriptionLayout{size: 56, clock: 24, timeout: 32, flags: 48}
)

// pollOneoff implements poll_oneoff. Waiting for a clock sleeps until the call's context
// ends or the call is interrupted at the latest. A subscription to a file returns an error
// at once.
func pollOneoff(vm *VM, args []uint64) Status { return vm.poll(args, pollLayout) }

// pollOneoffUnstable is the same for wasi_unstable.
func pollOneoffUnstable(vm *VM, args []uint64) Status { return vm.poll(args, pollLayoutUnstable) }

// poll waits for the earliest of the subscribed events and writes all events
// that have occurred.
func (vm *VM) poll(args []uint64, layout subscriptionLayout) Status {
	count := uint64(uint32(args[2]))
	if count == 0 || count > maxSubscriptions {
		return errnoInval
	}
	in, ok1 := vm.read(args[0], count*uint64(layout.size))
	out, ok2 := vm.read(args[1], count*eventSize)
	if !ok1 || !ok2 || !vm.inside(args[3]) {
		return errnoFault
	}
	// The first pass finds the time to wait, the second writes the events.
	waits := make([]time.Duration, count)
	shortest := time.Duration(1<<63 - 1)
	for i := range waits {
		wait, errno := layout.wait(in[i*layout.size:][:layout.size])
		if errno != errnoSuccess {
			return errno
		}
		waits[i] = wait
		shortest = min(shortest, wait)
	}
	vm.sleep(shortest)
	events := out[:0]
	for i, wait := range waits {
		if wait <= shortest {
			events = appendEvent(events, in[i*layout.size:])
		}
	}
	vm.writeU32(args[3], uint32(len(events)/eventSize))
	return errnoSuccess
}

// The kinds of subscriptions.
const (
	eventClock = iota
	eventRead
	eventWrite
)

// wait returns how long a subscription has to wait; a file never waits.
func (l subscriptionLayout) wait(subscription []byte) (time.Duration, Status) {
	switch subscription[8] {
	case eventClock:
		timeout := binary.LittleEndian.Uint64(subscription[l.timeout:])
		now, ok := wasiClock(u32(subscription, l.clock))
		if !ok {
			return 0, errnoNotSup
		}
		if subscription[l.flags]&1 != 0 { // an absolute time
			timeout -= min(now, timeout)
		}
		return time.Duration(min(timeout, 1<<63-1)), errnoSuccess
	case eventRead, eventWrite:
		return 0, errnoSuccess
	}
	return 0, errnoInval
}

// appendEvent appends the event of a subscription: its user data, an errno and
// its kind.
func appendEvent(events, subscription []byte) []byte {
	var event [eventSize]byte
	copy(event[:8], subscription[:8])
	if subscription[8] != eventClock {
		event[8] = errnoBadF
	}
	event[10] = subscription[8]
	return append(events, event[:]...)
}

// sleep waits for d, or until the context of the running call ends or Interrupt is called.
func (vm *VM) sleep(d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	var ended <-chan struct{}
	if vm.running != nil {
		ended = vm.running.Done()
	}
	select {
	case <-timer.C:
	case <-ended:
	case <-vm.woken:
	}
}
