package host

import (
	"crypto/rand"
	"time"

	"github.com/tetratelabs/wazero/sys"
)

// The errnos of WASI that this package uses.
const (
	errnoSuccess    = 0
	errnoBadF       = 8
	errnoFault      = 21
	errnoInval      = 28
	errnoNotSup     = 58
	errnoSpipe      = 70
	errnoNotCapable = 76
)

// The three files that are always open. There are no others.
const (
	stdin  = 0
	stdout = 1
	stderr = 2
)

// Limits of one WASI call.
const (
	maxRandom = 64 << 10
	maxWrite  = 64 << 10 // more is a short write
	// maxVectors is the number of pieces of text in one write.
	maxVectors = 1024
)

// wasiFunctions are all functions in the module wasi_snapshot_preview1. A guest
// has clocks, randomness and a log, but no environment, no arguments and no
// files. Source: WebAssembly/WASI, legacy/preview1/docs.md.
var wasiFunctions = map[string]hostFunction{
	"args_get":                {params: "ii", until: starting, call: wasiOK},
	"args_sizes_get":          {params: "ii", until: starting, call: noSizes},
	"clock_res_get":           {params: "ii", until: starting, call: clockResGet},
	"clock_time_get":          {params: "iIi", until: allocating, call: clockTimeGet},
	"environ_get":             {params: "ii", until: starting, call: wasiOK},
	"environ_sizes_get":       {params: "ii", until: starting, call: noSizes},
	"fd_advise":               {params: "iIIi", until: starting, call: noFile},
	"fd_allocate":             {params: "iII", until: starting, call: noFile},
	"fd_close":                {params: "i", until: starting, call: stdOnly},
	"fd_datasync":             {params: "i", until: starting, call: noFile},
	"fd_fdstat_get":           {params: "ii", until: starting, call: fdFdstatGet},
	"fd_fdstat_set_flags":     {params: "ii", until: starting, call: stdOnly},
	"fd_fdstat_set_rights":    {params: "iII", until: starting, call: noFile},
	"fd_filestat_get":         {params: "ii", until: starting, call: fdFilestatGet},
	"fd_filestat_set_size":    {params: "iI", until: starting, call: noFile},
	"fd_filestat_set_times":   {params: "iIIi", until: starting, call: noFile},
	"fd_pread":                {params: "iiiIi", until: starting, call: noFile},
	"fd_prestat_dir_name":     {params: "iii", until: starting, call: badFile},
	"fd_prestat_get":          {params: "ii", until: starting, call: badFile},
	"fd_pwrite":               {params: "iiiIi", until: starting, call: noFile},
	"fd_read":                 {params: "iiii", until: starting, call: fdRead},
	"fd_readdir":              {params: "iiiIi", until: starting, call: noFile},
	"fd_renumber":             {params: "ii", until: starting, call: noFile},
	"fd_seek":                 {params: "iIii", until: starting, call: notSeekable},
	"fd_sync":                 {params: "i", until: starting, call: noFile},
	"fd_tell":                 {params: "ii", until: starting, call: notSeekable},
	"fd_write":                {params: "iiii", until: allocating, call: fdWrite},
	"path_create_directory":   {params: "iii", until: starting, call: badFile},
	"path_filestat_get":       {params: "iiiii", until: starting, call: badFile},
	"path_filestat_set_times": {params: "iiiiIIi", until: starting, call: badFile},
	"path_link":               {params: "iiiiiii", until: starting, call: badFile},
	"path_open":               {params: "iiiiiIIii", until: starting, call: badFile},
	"path_readlink":           {params: "iiiiii", until: starting, call: badFile},
	"path_remove_directory":   {params: "iii", until: starting, call: badFile},
	"path_rename":             {params: "iiiiii", until: starting, call: badFile},
	"path_symlink":            {params: "iiiii", until: starting, call: badFile},
	"path_unlink_file":        {params: "iii", until: starting, call: badFile},
	"poll_oneoff":             {params: "iiii", until: allocating, call: pollOneoff},
	"proc_exit":               {params: "i", void: true, until: allocating, call: procExit},
	"proc_raise":              {params: "i", until: starting, call: notSupported},
	"random_get":              {params: "ii", until: starting, call: randomGet},
	"sched_yield":             {params: "", until: allocating, call: wasiOK},
	"sock_accept":             {params: "iii", until: starting, call: noFile},
	"sock_recv":               {params: "iiiiii", until: starting, call: noFile},
	"sock_send":               {params: "iiiii", until: starting, call: noFile},
	"sock_shutdown":           {params: "ii", until: starting, call: noFile},
}

// unstableFunctions are the functions whose data has another layout in
// wasi_unstable, the older name that emscripten guests import. All others are
// the same. Source: WebAssembly/WASI, phases/old/snapshot_0/docs.md.
var unstableFunctions = map[string]hostFunction{
	"fd_filestat_get": {params: "ii", until: starting, call: fdFilestatGetUnstable},
	"poll_oneoff":     {params: "iiii", until: allocating, call: pollOneoffUnstable},
}

// wasiOK succeeds and does nothing: there are no arguments, no environment and
// no other thread.
func wasiOK(*VM, []uint64) Status { return errnoSuccess }

// notSupported implements proc_raise.
func notSupported(*VM, []uint64) Status { return errnoNotSup }

// badFile implements functions on directories. No directory is open.
func badFile(*VM, []uint64) Status { return errnoBadF }

// noFile implements functions that the standard files do not support.
func noFile(_ *VM, args []uint64) Status {
	if uint32(args[0]) > stderr {
		return errnoBadF
	}
	return errnoNotSup
}

// notSeekable implements fd_seek and fd_tell.
func notSeekable(_ *VM, args []uint64) Status {
	if uint32(args[0]) > stderr {
		return errnoBadF
	}
	return errnoSpipe
}

// stdOnly implements functions that have no effect on the standard files.
func stdOnly(_ *VM, args []uint64) Status {
	if uint32(args[0]) > stderr {
		return errnoBadF
	}
	return errnoSuccess
}

// noSizes implements args_sizes_get and environ_sizes_get: no entries, 0 bytes.
func noSizes(vm *VM, args []uint64) Status {
	if !vm.inside(args[0], args[1]) {
		return errnoFault
	}
	vm.writeU32(args[0], 0)
	vm.writeU32(args[1], 0)
	return errnoSuccess
}

// processStart is the zero of the monotonic clock.
var processStart = time.Now()

// wasiClock reads a clock in nanoseconds: 0 is Unix time, 1 is monotonic.
func wasiClock(id uint32) (now uint64, ok bool) {
	switch id {
	case 0:
		return uint64(time.Now().UnixNano()), true
	case 1:
		return uint64(time.Since(processStart)), true
	}
	return 0, false
}

// clockTimeGet implements clock_time_get.
func clockTimeGet(vm *VM, args []uint64) Status {
	now, ok := wasiClock(uint32(args[0]))
	if !ok {
		return errnoNotSup
	}
	if vm.writeU64(args[2], now) != OK {
		return errnoFault
	}
	return errnoSuccess
}

// clockResGet implements clock_res_get: one nanosecond.
func clockResGet(vm *VM, args []uint64) Status {
	if uint32(args[0]) > 1 {
		return errnoNotSup
	}
	if vm.writeU64(args[1], 1) != OK {
		return errnoFault
	}
	return errnoSuccess
}

// randomGet implements random_get. Inval: the guest requests more than 64 KiB.
func randomGet(vm *VM, args []uint64) Status {
	if uint32(args[1]) > maxRandom {
		return errnoInval
	}
	view, ok := vm.read(args[0], args[1])
	if !ok {
		return errnoFault
	}
	if _, err := rand.Read(view); err != nil {
		return errnoNotSup
	}
	return errnoSuccess
}

// procExit implements proc_exit: the call into the guest ends here.
func procExit(_ *VM, args []uint64) Status {
	panic(sys.NewExitError(uint32(args[0])))
}

// fdWrite implements fd_write. Lines of stdout go to the log at INFO, lines of
// stderr at ERROR.
func fdWrite(vm *VM, args []uint64) Status {
	out := &vm.out
	switch uint32(args[0]) {
	case stdout:
	case stderr:
		out = &vm.err
	default:
		return errnoBadF
	}
	if !vm.inside(args[3]) {
		return errnoFault
	}
	var written uint32
	for i := uint64(0); i < min(uint64(uint32(args[2])), maxVectors) && written < maxWrite; i++ {
		at := uint64(uint32(args[1])) + 8*i
		vector, ok := vm.read(at, 8)
		if !ok || at >= 1<<32 {
			return errnoFault
		}
		text, ok := vm.read(uint64(u32(vector, 0)), uint64(u32(vector, 4)))
		if !ok {
			return errnoFault
		}
		text = text[:min(len(text), int(maxWrite-written))]
		out.write(printer{vm}, text)
		written += uint32(len(text))
	}
	vm.writeU32(args[3], written)
	return errnoSuccess
}

// fdRead implements fd_read: stdin is always at its end.
func fdRead(vm *VM, args []uint64) Status {
	if uint32(args[0]) != stdin {
		return errnoBadF
	}
	if vm.writeU32(args[3], 0) != OK {
		return errnoFault
	}
	return errnoSuccess
}

// characterDevice is the file type of the standard files.
const characterDevice = 2

// fdFdstatGet implements fd_fdstat_get, 24 bytes: the type, and the right to
// read (bit 1) or to write (bit 6).
func fdFdstatGet(vm *VM, args []uint64) Status {
	fd := uint32(args[0])
	if fd > stderr {
		return errnoBadF
	}
	view, ok := vm.read(args[1], 24)
	if !ok {
		return errnoFault
	}
	clear(view)
	view[0] = characterDevice
	view[8] = 1 << 6
	if fd == stdin {
		view[8] = 1 << 1
	}
	return errnoSuccess
}

// fdFilestatGet implements fd_filestat_get, 64 bytes.
func fdFilestatGet(vm *VM, args []uint64) Status { return vm.filestat(args, 64) }

// fdFilestatGetUnstable is the same with 56 bytes.
func fdFilestatGetUnstable(vm *VM, args []uint64) Status { return vm.filestat(args, 56) }

// filestat writes the state of a standard file. Only the type in it has a meaning.
func (vm *VM) filestat(args []uint64, size uint64) Status {
	if uint32(args[0]) > stderr {
		return errnoBadF
	}
	view, ok := vm.read(args[1], size)
	if !ok {
		return errnoFault
	}
	clear(view)
	view[16] = characterDevice
	return errnoSuccess
}
