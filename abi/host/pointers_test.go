package host

import (
	"fmt"
	"maps"
	"slices"
	"testing"
)

// forwarder is a module that imports every host function of a module and
// exports each under the same name with "call " before it.
func forwarder(version, module string, functions ...map[string]hostFunction) []byte {
	a := newAssembler()
	all := map[string]hostFunction{}
	for _, list := range functions {
		maps.Copy(all, list)
	}
	names := slices.Sorted(maps.Keys(all))
	indexes := map[string]int{}
	for _, name := range names {
		indexes[name] = a.importFunc(module, name, all[name].params, result(all[name]))
	}
	a.marker(version)
	for _, name := range names {
		var args []byte
		for i := range all[name].params {
			args = append(args, local(i)...)
		}
		a.fn("call "+name, all[name].params, result(all[name]), args, call(indexes[name]))
	}
	return a.bytes()
}

func result(f hostFunction) string {
	if f.void {
		return ""
	}
	return "i"
}

// parameters lists the meaning of each parameter: p and s an address and a size that is
// read, o and O an address where 4 or 8 bytes are written, b and n an address and a size
// where n bytes are written. A number N is a valid value.
var parameters = map[string]string{
	"proxy_log":                          "2ps",
	"proxy_get_log_level":                "o",
	"proxy_get_current_time_nanoseconds": "O",
	"proxy_get_configuration":            "oo",
	"proxy_get_buffer_bytes":             "009oo",
	"proxy_set_buffer_bytes":             "000ps",
	"proxy_get_buffer_status":            "0oo",
	"proxy_get_header_map_size":          "0o",
	"proxy_get_header_map_pairs":         "0oo",
	"proxy_set_header_map_pairs":         "0ps",
	"proxy_get_header_map_value":         "0psoo",
	"proxy_add_header_map_value":         "0psps",
	"proxy_replace_header_map_value":     "0psps",
	"proxy_remove_header_map_value":      "0ps",
	"proxy_send_local_response":          "9pspsps0",
	"proxy_http_call":                    "pspspsps9o",
	"proxy_get_status":                   "ooo",
	"proxy_grpc_call":                    "pspspspsps9o",
	"proxy_grpc_stream":                  "pspspspso",
	"proxy_grpc_send":                    "1ps0",
	"proxy_set_shared_data":              "psps0",
	"proxy_get_shared_data":              "psooo",
	"proxy_register_shared_queue":        "pso",
	"proxy_resolve_shared_queue":         "pspso",
	"proxy_enqueue_shared_queue":         "1ps",
	"proxy_dequeue_shared_queue":         "1oo",
	"proxy_define_metric":                "0pso",
	"proxy_get_metric":                   "1O",
	"proxy_get_property":                 "psoo",
	"proxy_set_property":                 "psps",
	"proxy_call_foreign_function":        "pspsoo",
	// No pointers.
	"proxy_set_tick_period_milliseconds": "9", "proxy_set_effective_context": "1", "proxy_done": "",
	"proxy_continue_request": "", "proxy_continue_response": "", "proxy_clear_route_cache": "",
	"proxy_continue_stream": "0", "proxy_close_stream": "0", "proxy_grpc_cancel": "1", "proxy_grpc_close": "1",
	"proxy_record_metric": "11", "proxy_increment_metric": "11",
	"emscripten_notify_memory_growth": "0", "pthread_equal": "11",

	"args_sizes_get":    "oo",
	"environ_sizes_get": "oo",
	"clock_res_get":     "0O",
	"clock_time_get":    "00O",
	"fd_fdstat_get":     "1O",
	"fd_filestat_get":   "1O",
	"fd_read":           "000o",
	"fd_write":          "1p1o",
	"poll_oneoff":       "pp1o",
	"random_get":        "ps",
}

// badValues are addresses or sizes that are never valid in one page of memory.
func badValues(kind byte) []uint32 {
	const end = PageSize
	switch kind {
	case 'p':
		return []uint32{end - 1, end, end + 1, 1<<31 - 1, 1 << 31, 1<<32 - 2, 1<<32 - 1}
	case 's':
		return []uint32{end, end + 1, 1 << 31, 1<<32 - 1024, 1<<32 - 1}
	case 'o':
		return []uint32{end - 3, end - 1, end, 1 << 31, 1<<32 - 4, 1<<32 - 1}
	case 'O':
		return []uint32{end - 7, end - 4, end - 1, end, 1 << 31, 1<<32 - 8, 1<<32 - 1}
	}
	return nil
}

// goodArguments builds a call that reaches the end of the function.
func goodArguments(params string) []uint64 {
	args := make([]uint64, len(params))
	for i := range params {
		switch c := params[i]; c {
		case 'p':
			args[i] = 256
		case 's':
			args[i] = 8
		case 'o', 'O':
			args[i] = uint64(512 + 16*i)
		default:
			args[i] = uint64(c - '0')
		}
	}
	return args
}

// Every pointer and every size of every host function is invalid in every way.
// The guest gets an error status, the call has no effect, and the VM keeps
// working.
func TestBadPointers(t *testing.T) {
	modules := []struct {
		module    string
		functions map[string]hostFunction
		want      Status
	}{
		{"env", envFunctions, InvalidMemoryAccess},
		{"wasi_snapshot_preview1", wasiFunctions, errnoFault},
		{"wasi_unstable", wasiFunctions, errnoFault},
	}
	for _, m := range modules {
		module := load(t, forwarder("0_2_1", m.module, m.functions), LoadOptions{})
		for _, name := range slices.Sorted(maps.Keys(m.functions)) {
			t.Run(m.module+"."+name, func(t *testing.T) {
				kinds, ok := parameters[name]
				if !ok && m.module == "env" {
					t.Fatal("the table parameters has no row for this function")
				}
				w := newWorld()
				w.config = "configuration"
				w.foreign = func(uint32, string, []byte) ([]byte, Status) { return []byte("result"), OK }
				w.RegisterQueue(1, "queue")
				w.queues[1] = []string{"item"}
				w.DefineMetric(Counter, "metric")
				w.data[string(make([]byte, 8))] = "value"
				w.properties["2 ......."] = "value"
				vm := start(t, module, w)
				if err := vm.ContextCreate(t.Context(), 2, 1); err != nil {
					t.Fatal(err)
				}
				s := w.newStream(2)
				s.bodies[0] = []byte("body")
				s.maps[0].pairs = Pairs{{string(make([]byte, 8)), "value"}}
				w.effects = 0
				for i := range kinds {
					for _, bad := range badValues(kinds[i]) {
						args := goodArguments(kinds)
						args[i] = uint64(bad)
						want := m.want
						if name == "random_get" && kinds[i] == 's' {
							want = errnoInval // 64 KiB and more
							if bad == PageSize {
								want = errnoFault
							}
						}
						got, err := invoke(vm, "call "+name, 2, args...)
						if err != nil || Status(got) != want {
							t.Errorf("parameter %d = %#x: got %d, %v; want %d", i, bad, got, err, want)
						}
					}
				}
				if w.effects != 0 || s.local != nil || len(w.calls) != 0 || len(w.queues[1]) != 1 {
					t.Errorf("a refused call had an effect")
				}
			})
		}
	}
}

// The upper halves of i32 parameters are undefined: only the lower ones count.
func TestUpperHalvesAreIgnored(t *testing.T) {
	module := load(t, forwarder("0_2_1", "env", envFunctions), LoadOptions{})
	for _, name := range slices.Sorted(maps.Keys(envFunctions)) {
		f := envFunctions[name]
		var answers []string
		for _, upper := range []uint64{0, 0xdeadbeef << 32} {
			w := newWorld()
			w.config = "configuration"
			w.RegisterQueue(1, "queue")
			w.queues[1] = []string{"item"}
			w.DefineMetric(Gauge, "metric")
			vm := start(t, module, w)
			if err := vm.ContextCreate(t.Context(), 2, 1); err != nil {
				t.Fatal(err)
			}
			s := w.newStream(2)
			s.bodies[0] = []byte("body")
			vm.effective, vm.current = 2, 2
			vm.running = &callScope{Context: t.Context(), vm: vm}
			args := append(goodArguments(parameters[name]), 0)
			for i, c := range f.params {
				if c == 'i' {
					args[i] |= upper
				}
			}
			status := f.call(vm, args)
			view, _ := vm.View(0, PageSize)
			if name == "proxy_get_current_time_nanoseconds" {
				view = nil
			}
			answers = append(answers, fmt.Sprint(status, w.effects, w.ticks, w.queues, w.metrics, s.bodies, s.told, s.local, view))
		}
		if answers[0] != answers[1] {
			t.Errorf("%s answers otherwise", name)
		}
	}
}

// A function that is not in the allow-list returns an error and has no effect.
func TestAllowList(t *testing.T) {
	allowed := []string{"proxy_log", "proxy_continue_stream", "fd_write"}
	env := load(t, forwarder("0_2_1", "env", envFunctions), LoadOptions{HostFunctions: allowed})
	wasi := load(t, forwarder("0_2_1", "wasi_snapshot_preview1", wasiFunctions), LoadOptions{HostFunctions: allowed})
	all := load(t, forwarder("0_2_1", "env", envFunctions), LoadOptions{HostFunctions: []string{"*"}})
	tests := []struct {
		module *Module
		name   string
		args   []uint64
		want   Status
	}{
		{env, "proxy_log", []uint64{2, 0, 0}, OK},
		{env, "proxy_continue_stream", []uint64{0}, OK},
		{env, "proxy_close_stream", []uint64{0}, InternalFailure},
		{env, "proxy_get_log_level", []uint64{64}, InternalFailure},
		{env, "pthread_equal", []uint64{5, 5}, 1},
		{env, "pthread_equal", []uint64{5, 6}, 0},
		{wasi, "random_get", []uint64{0, 8}, 76},
		{wasi, "fd_write", []uint64{1, 0, 0, 64}, 0},
		{all, "proxy_close_stream", []uint64{0}, OK},
	}
	for _, tt := range tests {
		w := newWorld()
		vm := start(t, tt.module, w)
		if err := vm.ContextCreate(t.Context(), 2, 1); err != nil {
			t.Fatal(err)
		}
		w.newStream(2)
		got, err := invoke(vm, "call "+tt.name, 2, tt.args...)
		if err != nil || Status(got) != tt.want {
			t.Errorf("%s: got %d, %v; want %d", tt.name, got, err, tt.want)
		}
		if tt.want == InternalFailure && w.effects > 0 {
			t.Errorf("%s had an effect", tt.name)
		}
	}
	// A refused proc_exit returns to the guest.
	vm := start(t, wasi, newWorld())
	if _, err := invoke(vm, "call proc_exit", 1, 3); err != nil {
		t.Errorf("refused proc_exit: %v", err)
	}
}
