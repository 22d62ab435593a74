package host

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// wasiDesk is a VM whose guest forwards calls to every function of WASI.
func wasiDesk(t *testing.T, module string) *desk {
	w := newWorld()
	all := maps.Clone(wasiFunctions)
	if module == moduleWASIUnstable {
		maps.Copy(all, unstableFunctions)
	}
	return &desk{t: t, w: w, vm: start(t, load(t, forwarder("0_2_1", module, all), LoadOptions{}), w)}
}

// wasi calls a function and compares its errno.
func (d *desk) wasi(name string, want uint32, args ...uint64) {
	d.t.Helper()
	got, err := invoke(d.vm, "call "+name, 1, args...)
	if err != nil || uint32(got) != want {
		d.t.Errorf("%s%v: errno %d, %v; want %d", name, args, got, err, want)
	}
}

func TestWASI(t *testing.T) {
	for _, module := range []string{moduleWASI, moduleWASIUnstable} {
		t.Run(module, func(t *testing.T) {
			d := wasiDesk(t, module)
			for _, name := range []string{"args", "environ"} {
				d.vm.memory.WriteUint64Le(1024, 1<<63)
				d.wasi(name+"_sizes_get", 0, 1024, 1028)
				if d.number(1024) != 0 || d.number(1028) != 0 {
					t.Errorf("environment: %s is not empty", name)
				}
				d.wasi(name+"_get", 0, 1024, 1028)
			}
			for fd := range uint64(3) {
				d.wasi("fd_fdstat_get", 0, fd, 1024)
				if view, _ := d.vm.View(1024, 1); view[0] != characterDevice {
					t.Errorf("file %d is of type %d", fd, view[0])
				}
				d.wasi("fd_filestat_get", 0, fd, 1024)
				d.wasi("fd_fdstat_set_flags", 0, fd, 4)
				d.wasi("fd_close", 0, fd)
				d.wasi("fd_seek", errnoSpipe, fd, 0, 0, 1024)
				d.wasi("fd_sync", errnoNotSup, fd)
			}
			for _, name := range []string{"fd_fdstat_get", "fd_filestat_get", "fd_fdstat_set_flags", "fd_prestat_get", "fd_tell", "fd_renumber"} {
				d.wasi(name, errnoBadF, 3, 1024)
			}
			d.wasi("path_open", errnoBadF, 3, 0, 256, 4, 0, 0, 0, 0, 1024)
			d.wasi("fd_prestat_dir_name", errnoBadF, 3, 256, 4)
			d.vm.memory.WriteUint32Le(1024, 5)
			d.wasi("fd_read", 0, 0, 256, 0, 1024)
			if d.number(1024) != 0 {
				t.Error("stdin has something")
			}
			d.wasi("fd_read", errnoBadF, 1, 256, 0, 1024)
			d.wasi("sched_yield", 0)
			d.wasi("proc_raise", errnoNotSup, 9)
		})
	}
}

func TestClocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := wasiDesk(t, moduleWASI)
		clock := func(id uint64) uint64 {
			d.wasi("clock_time_get", 0, id, 0, 1024)
			now, _ := d.vm.memory.ReadUint64Le(1024)
			return now
		}
		wall, steady := clock(0), clock(1)
		if wall != uint64(time.Now().UnixNano()) {
			t.Errorf("wall clock %d", wall)
		}
		time.Sleep(time.Second)
		if clock(0)-wall != 1e9 || clock(1)-steady != 1e9 {
			t.Error("the clocks do not run")
		}
		d.wasi("clock_time_get", errnoNotSup, 2, 0, 1024)
		d.wasi("clock_res_get", 0, 1, 1024)
		d.wasi("clock_res_get", errnoNotSup, 2, 1024)
	})
}

func TestRandom(t *testing.T) {
	d := wasiDesk(t, moduleWASI)
	read := func() []byte {
		d.wasi("random_get", 0, 1024, 32)
		view, _ := d.vm.View(1024, 32)
		return bytes.Clone(view)
	}
	first := read()
	if bytes.Equal(first, read()) || bytes.Equal(first, make([]byte, 32)) {
		t.Error("twice the same")
	}
	other := wasiDesk(t, moduleWASI)
	d.vm, other.vm = other.vm, d.vm
	if bytes.Equal(first, read()) {
		t.Error("two VMs have the same")
	}
	d.wasi("random_get", 0, 1024, 0)
	d.wasi("random_get", 0, 0, 64<<10)
	d.wasi("random_get", errnoInval, 0, 64<<10+1)
	d.wasi("random_get", errnoInval, 0, 1<<32-1)
}

func TestPrintedLines(t *testing.T) {
	d := wasiDesk(t, moduleWASI)
	print := func(fd uint64, parts ...string) {
		t.Helper()
		at := uint32(4096)
		for i, part := range parts {
			d.vm.memory.WriteUint32Le(uint32(256+8*i), at)
			d.vm.memory.WriteUint32Le(uint32(260+8*i), uint32(len(part)))
			d.vm.memory.WriteString(at, part)
			at += uint32(len(part))
		}
		d.wasi("fd_write", 0, fd, 256, uint64(len(parts)), 1024)
		if d.number(1024) != at-4096 {
			t.Errorf("wrote %d of %d", d.number(1024), at-4096)
		}
	}
	print(1, "one ", "line\ntwo", "")
	print(2, "error\n\n")
	print(1, "\n")
	print(1, strings.Repeat("x", maxLine+3)+"\n")
	print(2, "unended")
	d.wasi("fd_write", errnoBadF, 3, 256, 1, 1024)
	d.wasi("fd_write", errnoFault, 1, 0xffffffff, 1, 1024)
	d.wasi("fd_write", errnoFault, 1, PageSize-8, 2, 1024)
	if err := d.vm.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	want := []string{"INFO one line", "ERROR error", "INFO two", "INFO " + strings.Repeat("x", maxLine), "INFO xxx", "ERROR unended"}
	if !slices.Equal(d.w.lines, want) {
		t.Errorf("logged %q", d.w.lines)
	}
}

// A guest cannot keep the host busy by printing its whole memory many times.
func TestShortWrite(t *testing.T) {
	d := wasiDesk(t, moduleWASI)
	for i := range uint32(16) {
		d.vm.memory.WriteUint32Le(256+8*i, 0)
		d.vm.memory.WriteUint32Le(260+8*i, PageSize)
	}
	d.wasi("fd_write", 0, 1, 256, 16, 1024)
	if d.number(1024) != maxWrite {
		t.Errorf("wrote %d", d.number(1024))
	}
}

func TestPoll(t *testing.T) {
	type subscription struct {
		kind    byte
		clock   uint32
		timeout time.Duration
		flags   byte
	}
	for module, layout := range map[string]subscriptionLayout{moduleWASI: pollLayout, moduleWASIUnstable: pollLayoutUnstable} {
		tests := []struct {
			name   string
			subs   []subscription
			errno  uint32
			took   time.Duration
			events []byte // user data of the events that occurred
		}{
			{"a clock", []subscription{{timeout: time.Second}}, 0, time.Second, []byte{0}},
			{"no time", []subscription{{}}, 0, 0, []byte{0}},
			{"the earlier", []subscription{{timeout: time.Hour}, {clock: 1, timeout: time.Second}}, 0, time.Second, []byte{1}},
			{"a file", []subscription{{timeout: time.Hour}, {kind: eventRead}}, 0, 0, []byte{1}},
			{"absolute and over", []subscription{{clock: 1, timeout: 1, flags: 1}}, 0, 0, []byte{0}},
			{"unknown clock", []subscription{{clock: 3, timeout: 1}}, errnoNotSup, 0, nil},
			{"unknown kind", []subscription{{kind: 3}}, errnoInval, 0, nil},
			{"none", nil, errnoInval, 0, nil},
		}
		for _, tt := range tests {
			t.Run(module+" "+tt.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					d := wasiDesk(t, module)
					for i, s := range tt.subs {
						view, _ := d.vm.View(uint32(1024+layout.size*i), uint32(layout.size))
						view[0], view[8] = byte(i), s.kind
						binary.LittleEndian.PutUint32(view[layout.clock:], s.clock)
						binary.LittleEndian.PutUint64(view[layout.timeout:], uint64(s.timeout))
						view[layout.flags] = s.flags
					}
					began := time.Now()
					d.wasi("poll_oneoff", tt.errno, 1024, 4096, uint64(len(tt.subs)), 512)
					if took := time.Since(began); took != tt.took {
						t.Errorf("the call took %v, want %v", took, tt.took)
					}
					if tt.errno != 0 {
						return
					}
					var events []byte
					for i := range d.number(512) {
						view, _ := d.vm.View(4096+eventSize*i, eventSize)
						events = append(events, view[0])
						sub := tt.subs[view[0]]
						if wantErrno := map[byte]byte{eventClock: 0, eventRead: errnoBadF}[sub.kind]; view[8] != wantErrno || view[10] != sub.kind {
							t.Errorf("event %v", view)
						}
					}
					if !bytes.Equal(events, tt.events) {
						t.Errorf("events %v, want %v", events, tt.events)
					}
				})
			})
		}
	}
}

// A sleeping guest, guarded or not, wakes when the context of its call ends.
func TestSleepEndsWithContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := wasiDesk(t, moduleWASI)
		d.vm.memory.WriteUint64Le(1024+24, uint64(time.Hour))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		fn := d.vm.exported("call poll_oneoff")
		if err := d.vm.call(ctx, fn, "poll", 1, []uint64{1024, 4096, 1, 512}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took != time.Second {
			t.Errorf("slept %v", took)
		}
	})
}

// A guest that sleeps wakes when another goroutine interrupts it. Owners of guarded guests end a
// call by Interrupt, and the call has a context that never ends.
func TestSleepEndsWithInterrupt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAssembler()
		poll := a.importFunc(moduleWASI, "poll_oneoff", "iiii", "i")
		a.marker("0_2_1")
		a.fn("proxy_on_tick", "i", "", i32(600), i32(1024), i32(4096), i32(1), i32(512), call(poll), store32)
		vm := start(t, load(t, a.bytes(), LoadOptions{Guarded: true}), newWorld())
		vm.memory.WriteUint64Le(1024+24, uint64(24*time.Hour))
		began := time.Now()
		time.AfterFunc(time.Second, vm.Interrupt)
		err := vm.Tick(context.Background(), 1)
		if took := time.Since(began); took != time.Second {
			t.Errorf("slept %v", took)
		}
		if failure := (*Error)(nil); !errors.As(err, &failure) || failure.Failure != Timeout {
			t.Errorf("the call ended with %v", err)
		}
	})
}
