package host

import (
	"context"
	"slices"
	"testing"
)

// recorder is a guest that stores the parameters of each callback at 512 and
// returns a different number from each.
func recorder(answer int32, absent bool) []byte {
	a := newAssembler().marker("0_2_1")
	for i, name := range callbackNames {
		if absent {
			break
		}
		params := "iiiii"[:callbackTypes[i][0]-'0']
		var body []byte
		for p := range params {
			body = append(body, join(i32(int32(512+4*p)), local(p), store32)...)
		}
		if callbackTypes[i][1:] == "i" {
			a.fn(name, params, "i", body, i32(answer))
		} else {
			a.fn(name, params, "", body)
		}
	}
	return a.bytes()
}

// step is one call of a VM method in a test.
type step struct {
	name string
	call func(vm *VM) (any, error)
	args []uint32
}

func steps(ctx context.Context) []step {
	action := func(a Action, err error) (any, error) { return a, err }
	truth := func(b bool, err error) (any, error) { return b, err }
	nothing := func(err error) (any, error) { return nil, err }
	return []step{
		{"create root", func(vm *VM) (any, error) { return nothing(vm.ContextCreate(ctx, 1, 0)) }, []uint32{1, 0}},
		{"vm start", func(vm *VM) (any, error) { return truth(vm.VMStart(ctx, 1)) }, []uint32{1, 2}},
		{"configure", func(vm *VM) (any, error) { return truth(vm.Configure(ctx, 1)) }, []uint32{1, 6}},
		{"create", func(vm *VM) (any, error) { return nothing(vm.ContextCreate(ctx, 2, 1)) }, []uint32{2, 1}},
		{"request headers", func(vm *VM) (any, error) { return action(vm.RequestHeaders(ctx, 2, 4, true)) }, []uint32{2, 4, 1}},
		{"request body", func(vm *VM) (any, error) { return action(vm.RequestBody(ctx, 2, 5, false)) }, []uint32{2, 5, 0}},
		{"request trailers", func(vm *VM) (any, error) { return action(vm.RequestTrailers(ctx, 2, 6)) }, []uint32{2, 6}},
		{"response headers", func(vm *VM) (any, error) { return action(vm.ResponseHeaders(ctx, 2, 7, false)) }, []uint32{2, 7, 0}},
		{"response body", func(vm *VM) (any, error) { return action(vm.ResponseBody(ctx, 2, 8, true)) }, []uint32{2, 8, 1}},
		{"response trailers", func(vm *VM) (any, error) { return action(vm.ResponseTrailers(ctx, 2, 9)) }, []uint32{2, 9}},
		{"tick", func(vm *VM) (any, error) { return nothing(vm.Tick(ctx, 1)) }, []uint32{1}},
		{"call response", func(vm *VM) (any, error) {
			return nothing(vm.HTTPCallResponse(ctx, 1, 41, Pairs{{":status", "200"}}, []byte("abc"), Pairs{{"a", "1"}, {"b", "2"}}))
		}, []uint32{1, 41, 1, 3, 2}},
		{"failed call", func(vm *VM) (any, error) { return nothing(vm.HTTPCallResponse(ctx, 1, 42, nil, nil, nil)) }, []uint32{1, 42, 0, 0, 0}},
		{"queue", func(vm *VM) (any, error) { return nothing(vm.QueueReady(ctx, 1, 3)) }, []uint32{1, 3}},
		{"foreign", func(vm *VM) (any, error) { return nothing(vm.ForeignFunction(ctx, 1, 4, []byte("arg"))) }, []uint32{1, 4, 3}},
		{"done", func(vm *VM) (any, error) { return truth(vm.Done(ctx, 2)) }, []uint32{2}},
		{"log", func(vm *VM) (any, error) { return nothing(vm.Log(ctx, 2)) }, []uint32{2}},
		{"delete", func(vm *VM) (any, error) { return nothing(vm.Delete(ctx, 2)) }, []uint32{2}},
	}
}

// Every callback gets its parameters and returns its answer; the method of an
// absent one returns its default.
func TestCallbacks(t *testing.T) {
	ctx := t.Context()
	variants := []struct {
		name   string
		answer int32
		absent bool
		action Action
		truth  bool
	}{
		{"pause and true", 1, false, Pause, true},
		{"continue and false", 0, false, Continue, false},
		{"envoy's own action", 4, false, 4, true},
		{"absent", 0, true, Continue, true},
	}
	for _, v := range variants {
		t.Run(v.name, func(t *testing.T) {
			w := newWorld()
			w.vmConfig, w.config = "vm", "config"
			vm, err := load(t, recorder(v.answer, v.absent), LoadOptions{}).NewVM(ctx, w)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range steps(ctx) {
				got, err := s.call(vm)
				if err != nil {
					t.Fatalf("%s: s.call(vm) = %v, want nil", s.name, err)
				}
				switch got := got.(type) {
				case Action:
					if got != v.action {
						t.Errorf("%s: action %d", s.name, got)
					}
				case bool:
					if got != v.truth {
						t.Errorf("%s: %v", s.name, got)
					}
				}
				if v.absent {
					continue
				}
				args := make([]uint32, len(s.args))
				for i := range args {
					args[i], _ = vm.memory.ReadUint32Le(uint32(512 + 4*i))
				}
				if !slices.Equal(args, s.args) {
					t.Errorf("%s: parameters %v, want %v", s.name, args, s.args)
				}
			}
		})
	}
}

// The answer of an HTTP call is available only in its callback.
func TestCallAnswer(t *testing.T) {
	ctx := t.Context()
	a := newAssembler()
	value := a.importFunc("env", "proxy_get_header_map_value", "iiiii", "i")
	body := a.importFunc("env", "proxy_get_buffer_bytes", "iiiii", "i")
	status := a.importFunc("env", "proxy_get_status", "iii", "i")
	set := a.importFunc("env", "proxy_add_header_map_value", "iiiii", "i")
	a.marker("0_2_1")
	a.data = append(a.data, make([]byte, 52)...)
	a.data = append(a.data, ":StAtUs"...) // at 64
	look := func(buffer int32) []byte {
		return join(
			i32(512), i32(6), i32(64), i32(7), i32(516), i32(520), call(value), store32,
			i32(524), i32(buffer), i32(0), i32(-1), i32(528), i32(532), call(body), store32,
			i32(536), i32(540), i32(544), i32(548), call(status), store32,
			i32(552), i32(7), i32(64), i32(7), i32(64), i32(7), call(set), store32)
	}
	a.fn("proxy_on_http_call_response", "iiiii", "", look(4))
	a.fn("proxy_on_foreign_function", "iii", "", look(8))
	w := newWorld()
	d := &desk{t: t, w: w, vm: start(t, load(t, a.bytes(), LoadOptions{}), w)}
	text := func(at uint32) string {
		view, _ := d.vm.View(d.number(at), d.number(at+4))
		return string(view)
	}

	if err := d.vm.HTTPCallResponse(ctx, 1, 41, Pairs{{":status", "200"}}, []byte("abc"), nil); err != nil {
		t.Fatal(err)
	}
	if d.number(512) != 0 || text(516) != "200" || d.number(524) != 0 || text(528) != "abc" {
		t.Errorf("answer: %d %q, %d %q", d.number(512), text(516), d.number(524), text(528))
	}
	if d.number(536) != 0 || d.number(540) != 0 || text(544) != "" {
		t.Errorf("status: %d, %d %q", d.number(536), d.number(540), text(544))
	}
	d.want(Status(d.number(552)), BadArgument) // read-only

	if err := d.vm.HTTPCallResponse(ctx, 1, 42, nil, nil, nil); err != nil {
		t.Fatal(err)
	}
	d.want(Status(d.number(512)), NotFound)
	d.want(Status(d.number(524)), OK)
	if d.number(540) != uint32(BrokenConnection) || text(544) != "reset" {
		t.Errorf("failed: %d %q", d.number(540), text(544))
	}

	if err := d.vm.ForeignFunction(ctx, 1, 1, []byte("arguments")); err != nil {
		t.Fatal(err)
	}
	d.want(Status(d.number(512)), NotFound)
	d.want(Status(d.number(524)), OK)
	if text(528) != "arguments" || d.number(540) != 0 {
		t.Errorf("foreign: %q, status %d", text(528), d.number(540))
	}
}
