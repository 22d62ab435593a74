package host

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

// logging adds an import of proxy_log and functions that log one letter each.
func logging(a *assembler) (say func(letter byte) []byte) {
	log := a.importFunc("env", "proxy_log", "iii", "i")
	a.data = make([]byte, 128)
	for i := range a.data {
		a.data[i] = byte(i)
	}
	return func(letter byte) []byte {
		return join(i32(int32(LogInfo)), i32(int32(letter)), i32(1), call(log), drop)
	}
}

func TestStartOrder(t *testing.T) {
	tests := []struct {
		name    string
		exports []string // each logs its letter: a, b, c in this order
		want    []string
	}{
		{"initialize and main", []string{"main", "_initialize", "_start"}, []string{"INFO b", "INFO a"}},
		{"initialize only", []string{"_initialize"}, []string{"INFO a"}},
		{"initialize and __main_void", []string{"_initialize", "__main_void"}, []string{"INFO a", "INFO b"}},
		{"start only", []string{"_start"}, []string{"INFO a"}},
		{"main without initialize", []string{"main"}, nil},
		{"start and main", []string{"_start", "main"}, []string{"INFO a"}},
		{"none", nil, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := newAssembler()
			say := logging(a)
			for i, export := range tt.exports {
				switch export {
				case "main":
					a.fn(export, "ii", "i", say(byte('a'+i)), i32(0))
				case "__main_void":
					a.fn(export, "", "i", say(byte('a'+i)), i32(0))
				default:
					a.fn(export, "", "", say(byte('a'+i)))
				}
			}
			data := a.data
			a.marker("0_2_1")
			a.data = data
			w := newWorld()
			start(t, load(t, a.bytes(), LoadOptions{}), w)
			if !slices.Equal(w.lines, tt.want) {
				t.Errorf("logged %q, want %q", w.lines, tt.want)
			}
		})
	}
}

// The binary's own start function runs before there is an instance.
func TestStartSection(t *testing.T) {
	a := newAssembler()
	say := logging(a)
	a.startFunc = a.fn("", "", "", say('s'))
	data := a.data
	a.marker("0_2_1")
	a.data = data
	w := newWorld()
	start(t, load(t, a.bytes(), LoadOptions{}), w)
	if want := []string{"INFO s"}; !slices.Equal(w.lines, want) {
		t.Errorf("logged %q, want %q", w.lines, want)
	}

	a = newAssembler()
	a.startFunc = a.fn("", "", "", unreachable)
	a.marker("0_2_1")
	_, err := load(t, a.bytes(), LoadOptions{}).NewVM(t.Context(), newWorld())
	if failure := (*Error)(nil); !errors.As(err, &failure) || failure.Failure != Trap || failure.Reason != "unreachable" {
		t.Errorf("got %v, want a trap", err)
	}

	a = newAssembler().marker("0_2_1")
	a.data = make([]byte, PageSize+1)
	_, err = load(t, a.bytes(), LoadOptions{}).NewVM(t.Context(), newWorld())
	if err == nil || !strings.Contains(err.Error(), "out of bounds") {
		t.Errorf("data beyond memory: %v", err)
	}
}

// During start a guest may log and read clocks and randomness, but nothing else.
func TestStartIsRestricted(t *testing.T) {
	tests := []struct {
		module, name, params string
		args                 []byte
		forbidden            bool
	}{
		{"env", "proxy_log", "iii", join(i32(2), i32(0), i32(0)), false},
		{"env", "proxy_get_log_level", "i", i32(0), true},
		{"env", "proxy_done", "", nil, true},
		{"env", "proxy_get_property", "iiii", join(i32(0), i32(0), i32(0), i32(0)), true},
		{"wasi_snapshot_preview1", "clock_time_get", "iIi", join(i32(0), i64(0), i32(64)), false},
		{"wasi_snapshot_preview1", "random_get", "ii", join(i32(0), i32(0)), false},
		{"wasi_snapshot_preview1", "environ_sizes_get", "ii", join(i32(64), i32(64)), false},
		{"wasi_snapshot_preview1", "fd_prestat_get", "ii", join(i32(3), i32(64)), false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := newAssembler()
			index := a.importFunc(tt.module, tt.name, tt.params, "i")
			a.fn("_initialize", "", "", tt.args, call(index), drop)
			m := load(t, a.marker("0_2_1").bytes(), LoadOptions{})
			_, err := m.NewVM(t.Context(), newWorld())
			failure := (*Error)(nil)
			if got := errors.As(err, &failure) && failure.Failure == Forbidden; got != tt.forbidden {
				t.Fatalf("got %v, forbidden: %v", err, tt.forbidden)
			}
			if tt.forbidden && err.Error() != "call _initialize: forbidden: "+tt.name+" is not allowed now" {
				t.Errorf("got %v", err)
			}
		})
	}
}

// While the host allocates, the guest may log and read its clocks, but nothing
// else.
func TestAllocationIsRestricted(t *testing.T) {
	tests := []struct {
		module, name, params string
		args                 []byte
		forbidden            bool
	}{
		{"env", "proxy_log", "iii", join(i32(2), i32(0), i32(0)), false},
		{"wasi_snapshot_preview1", "fd_write", "iiii", join(i32(1), i32(0), i32(0), i32(64)), false},
		{"wasi_snapshot_preview1", "sched_yield", "", nil, false},
		{"wasi_snapshot_preview1", "random_get", "ii", join(i32(0), i32(0)), true},
		{"env", "proxy_set_effective_context", "i", i32(1), true},
		{"env", "proxy_get_log_level", "i", i32(64), true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := newAssembler()
			get := a.importFunc("env", "proxy_get_buffer_bytes", "iiiii", "i")
			index := a.importFunc(tt.module, tt.name, tt.params, "i")
			a.fn("proxy_abi_version_0_2_1", "", "")
			a.fn("malloc", "i", "i", tt.args, call(index), drop, i32(1024))
			a.fn("proxy_on_tick", "i", "",
				i32(int32(PluginConfiguration)), i32(0), i32(100), i32(64), i32(68), call(get), drop)
			w := newWorld()
			w.config = "abc"
			vm := start(t, load(t, a.bytes(), LoadOptions{}), w)
			err := vm.Tick(t.Context(), 1)
			failure := (*Error)(nil)
			if got := errors.As(err, &failure) && failure.Failure == Forbidden; got != tt.forbidden {
				t.Fatalf("got %v, forbidden: %v", err, tt.forbidden)
			}
			if tt.forbidden {
				if !strings.Contains(err.Error(), "call proxy_on_tick: forbidden: "+tt.name) {
					t.Errorf("got %v", err)
				}
				return
			}
			if view, ok := vm.View(1024, 3); !ok || string(view) != "abc" {
				t.Errorf("guest has %q", view)
			}
		})
	}
}

// A command whose _start ends with exit(0) has started successfully.
func TestStartExits(t *testing.T) {
	for code, good := range map[int32]bool{0: true, 3: false} {
		a := newAssembler()
		exit := a.importFunc("wasi_snapshot_preview1", "proc_exit", "i", "")
		a.fn("_start", "", "", i32(code), call(exit))
		a.fn("proxy_on_tick", "i", "")
		m := load(t, a.marker("0_1_0").bytes(), LoadOptions{})
		vm, err := m.NewVM(t.Context(), newWorld())
		if (err == nil) != good {
			t.Fatalf("exit code %d: %v", code, err)
		}
		if good {
			if err := vm.ContextCreate(t.Context(), 1, 0); err != nil {
				t.Fatal(err)
			}
			if err := vm.Tick(t.Context(), 1); err != nil {
				t.Error(err)
			}
		}
	}
}
