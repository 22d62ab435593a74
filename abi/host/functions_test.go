package host

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

// desk is a VM whose guest forwards calls to every host function, with root
// contexts 1 and 3, and stream 2 below 1. Texts for the functions are at 256
// and above, results at 1024 and above.
type desk struct {
	t  *testing.T
	w  *world
	vm *VM
	s  *fakeStream
}

func newDesk(t *testing.T, version string) *desk {
	w := newWorld()
	d := &desk{t: t, w: w, vm: start(t, load(t, forwarder(version, "env", envFunctions), LoadOptions{}), w)}
	for _, c := range [][2]uint32{{3, 0}, {2, 1}} {
		if err := d.vm.ContextCreate(t.Context(), c[0], c[1]); err != nil {
			t.Fatal(err)
		}
	}
	d.s = w.newStream(2)
	return d
}

// call calls a host function for a context. A string argument becomes address
// and size of its bytes; "out" addresses are written as 1024 and up.
func (d *desk) call(id uint32, name string, args ...any) Status {
	d.t.Helper()
	var flat []uint64
	at := uint32(256)
	for _, arg := range args {
		switch arg := arg.(type) {
		case int:
			flat = append(flat, uint64(arg))
		case string:
			if !d.vm.memory.WriteString(at, arg) {
				d.t.Fatal("the text is too long for the guest's memory")
			}
			flat = append(flat, uint64(at), uint64(len(arg)))
			at += uint32(len(arg))
		case Pairs:
			text := string(arg.Append(nil))
			d.vm.memory.WriteString(at, text)
			flat = append(flat, uint64(at), uint64(len(text)))
			at += uint32(len(text))
		}
	}
	status, err := invoke(d.vm, "call proxy_"+name, id, flat...)
	if err != nil {
		d.t.Fatalf("%s: %v", name, err)
	}
	return Status(status)
}

// want compares a status.
func (d *desk) want(got, want Status) {
	d.t.Helper()
	if got != want {
		d.t.Errorf("got status %d, want %d", got, want)
	}
}

// number is the u32 at an address.
func (d *desk) number(at uint32) uint32 {
	v, _ := d.vm.memory.ReadUint32Le(at)
	return v
}

// text returns the bytes that the guest got: address at 1024, size at 1028.
func (d *desk) text() string {
	view, ok := d.vm.View(d.number(1024), d.number(1028))
	if !ok {
		d.t.Error("the value is outside of guest memory")
	}
	return string(view)
}

func TestContexts(t *testing.T) {
	d := newDesk(t, "0_2_1")
	ctx := t.Context()
	if err := d.vm.ContextCreate(ctx, 2, 1); err == nil {
		t.Error("a live id was given twice")
	}
	if err := d.vm.ContextCreate(ctx, 0, 1); err == nil {
		t.Error("id 0 was given")
	}
	for _, parent := range []uint32{2, 9} {
		if err := d.vm.ContextCreate(ctx, 5, parent); !errors.Is(err, ErrUnknownContext) {
			t.Errorf("parent %d: %v", parent, err)
		}
	}
	if _, err := d.vm.RequestHeaders(ctx, 9, 0, true); !errors.Is(err, ErrUnknownContext) {
		t.Errorf("unknown context: %v", err)
	}

	// Ticks belong to the root of the effective context.
	d.want(d.call(2, "set_tick_period_milliseconds", 250), OK)
	d.want(d.call(3, "set_tick_period_milliseconds", 10), OK)
	if d.w.ticks[1] != 250*time.Millisecond || d.w.ticks[3] != 10*time.Millisecond {
		t.Errorf("ticks %v", d.w.ticks)
	}
	d.want(d.call(0, "set_tick_period_milliseconds", 10), BadArgument)

	d.want(d.call(1, "set_effective_context", 2), OK)
	d.want(d.call(1, "set_effective_context", 9), BadArgument)
	if d.vm.effective != 0 {
		t.Error("the effective context outlived its callback")
	}
	if err := d.vm.Delete(ctx, 2); err != nil {
		t.Fatal(err)
	}
	d.want(d.call(1, "set_effective_context", 2), BadArgument)
	if err := d.vm.ContextCreate(ctx, 2, 3); err != nil {
		t.Errorf("an ended id: %v", err)
	}
}

// A tick acts for a stream through the effective context, which lasts only
// until the callback returns.
func TestEffectiveContext(t *testing.T) {
	a := newAssembler()
	effective := a.importFunc("env", "proxy_set_effective_context", "i", "i")
	resume := a.importFunc("env", "proxy_continue_stream", "i", "i")
	a.marker("0_2_1")
	a.fn("proxy_on_tick", "i", "", i32(512), i32(2), call(effective), store32, i32(516), i32(0), call(resume), store32)
	a.fn("proxy_on_queue_ready", "ii", "", i32(520), i32(0), call(resume), store32)
	w := newWorld()
	vm := start(t, load(t, a.bytes(), LoadOptions{}), w)
	if err := vm.ContextCreate(t.Context(), 2, 1); err != nil {
		t.Fatal(err)
	}
	s := w.newStream(2)
	if err := errors.Join(vm.Tick(t.Context(), 1), vm.QueueReady(t.Context(), 1, 1)); err != nil {
		t.Fatal(err)
	}
	view, _ := vm.View(512, 12)
	if got := []uint32{u32(view, 0), u32(view, 4), u32(view, 8)}; !slices.Equal(got, []uint32{0, 0, uint32(NotFound)}) {
		t.Errorf("statuses %v", got)
	}
	if want := []string{"continue 0"}; !slices.Equal(s.told, want) {
		t.Errorf("calls of the stream %v", s.told)
	}
}

type rootWorld struct {
	*world
	done []uint32
}

func (w *rootWorld) RootDone(root uint32) Status {
	w.done = append(w.done, root)
	return OK
}

func TestDone(t *testing.T) {
	d := newDesk(t, "0_2_1")
	d.want(d.call(2, "done"), OK)
	d.want(d.call(1, "done"), NotFound)
	rooted := &rootWorld{world: d.w}
	d.vm.env = rooted
	d.want(d.call(1, "done"), OK)
	if !slices.Equal(d.s.told, []string{"done"}) || !slices.Equal(rooted.done, []uint32{1}) {
		t.Errorf("stream %v, roots %v", d.s.told, rooted.done)
	}
}

func TestLogFunction(t *testing.T) {
	d := newDesk(t, "0_2_1")
	d.w.level = LogDebug
	for level := range 7 {
		want := OK
		if level > 5 {
			want = BadArgument
		}
		d.want(d.call(1, "log", level, "hello"), want)
	}
	if want := []string{"DEBUG hello", "INFO hello", "WARN hello", "ERROR hello", "CRITICAL hello"}; !slices.Equal(d.w.lines, want) {
		t.Errorf("logged %q", d.w.lines)
	}
	d.want(d.call(1, "get_log_level", 1024), OK)
	if d.number(1024) != uint32(LogDebug) {
		t.Errorf("level %d", d.number(1024))
	}
	d.want(d.call(1, "get_current_time_nanoseconds", 1024), OK)
	now, _ := d.vm.memory.ReadUint64Le(1024)
	if age := time.Since(time.Unix(0, int64(now))); age < 0 || age > time.Minute {
		t.Errorf("the clock is %v off", age)
	}
}

func TestHeaderMaps(t *testing.T) {
	d := newDesk(t, "0_2_1")
	d.s.maps[HTTPRequestHeaders].pairs = Pairs{{":path", "/v1"}, {"x-a", "1"}, {"empty", ""}}
	get := func(key string) Status { return d.call(2, "get_header_map_value", 0, key, 1024, 1028) }

	d.want(get(":path"), OK)
	if d.text() != "/v1" {
		t.Errorf("got %q", d.text())
	}
	d.want(get("absent"), NotFound)
	d.want(get("empty"), OK)
	if d.number(1024) != 0 || d.number(1028) != 0 {
		t.Error("an empty value is not 0, 0")
	}
	d.want(d.call(2, "get_header_map_pairs", 0, 1024, 1028), OK)
	if pairs, err := DecodePairs([]byte(d.text())); err != nil || !slices.Equal(pairs, d.s.maps[0].pairs) {
		t.Errorf("pairs %v, %v", pairs, err)
	}
	d.want(d.call(2, "get_header_map_size", 0, 1024), OK)
	if want := 4 + 3*10 + len(":path/v1x-a1empty"); d.number(1024) != uint32(want) {
		t.Errorf("size %d, want %d", d.number(1024), want)
	}
	d.want(d.call(2, "get_header_map_pairs", 1, 1024, 1028), OK)
	if d.number(1024) != 0 || d.number(1028) != 0 {
		t.Error("an empty map is not 0, 0")
	}

	d.want(d.call(2, "add_header_map_value", 0, "x-a", "2"), OK)
	d.want(d.call(2, "replace_header_map_value", 0, ":path", "/v2"), OK)
	d.want(d.call(2, "remove_header_map_value", 0, "empty"), OK)
	d.want(d.call(2, "remove_header_map_value", 0, "absent"), OK)
	if want := (Pairs{{"x-a", "1"}, {"x-a", "2"}, {":path", "/v2"}}); !slices.Equal(d.s.maps[0].pairs, want) {
		t.Errorf("map %v", d.s.maps[0].pairs)
	}
	d.want(d.call(2, "set_header_map_pairs", 2, Pairs{{"b", "2"}}), OK)
	if want := (Pairs{{"b", "2"}}); !slices.Equal(d.s.maps[2].pairs, want) {
		t.Errorf("map %v", d.s.maps[2].pairs)
	}
	d.want(d.call(2, "set_header_map_pairs", 2, "\x01\x00\x00\x00"), OK) // data that cannot be decoded counts as empty
	if len(d.s.maps[2].pairs) != 0 {
		t.Errorf("map %v", d.s.maps[2].pairs)
	}

	d.s.maps[HTTPResponseTrailers] = nil
	for kind := range 9 {
		read, change := OK, OK
		switch {
		case kind > 7:
			read, change = BadArgument, BadArgument
		case kind >= 3: // unavailable
			read, change = NotFound, BadArgument
		}
		d.want(d.call(2, "get_header_map_size", kind, 1024), read)
		d.want(d.call(2, "get_header_map_pairs", kind, 1024, 1028), read)
		d.want(d.call(2, "add_header_map_value", kind, "k", "v"), change)
		d.want(d.call(2, "get_header_map_value", kind, "k", 1024, 1028), read)
		d.want(d.call(2, "replace_header_map_value", kind, "k", "v"), change)
		d.want(d.call(2, "remove_header_map_value", kind, "k"), change)
		d.want(d.call(2, "set_header_map_pairs", kind, Pairs{}), change)
		if kind < 8 {
			d.want(d.call(1, "get_header_map_pairs", kind, 1024, 1028), NotFound) // a root has no stream
		}
	}
}

func TestBuffers(t *testing.T) {
	d := newDesk(t, "0_2_1")
	d.w.vmConfig, d.w.config = "vm", "plugin configuration"
	const max = 1<<32 - 1
	reads := []struct {
		kind, start, size int
		status            Status
		want              string
	}{
		{0, 0, max, OK, "0123456789"},
		{0, 2, 3, OK, "234"},
		{0, 5, max, OK, "56789"},
		{0, 10, 1, OK, ""},
		{0, max, max, BadArgument, ""},
		{0, 0, 0, OK, ""},
		{1, 0, max, OK, ""},
		{2, 0, 1, NotFound, ""},
		{3, 0, 1, NotFound, ""},
		{4, 0, 1, NotFound, ""},
		{5, 0, 1, NotFound, ""},
		{6, 0, max, OK, "vm"},
		{7, 7, max, OK, "configuration"},
		{7, 100, max, BadArgument, ""}, // the sum exceeds 32 bits, as in proxy-wasm-cpp-host
		{7, max, max, BadArgument, ""},
		{7, max, 0, OK, ""},
		{7, max, 1, BadArgument, ""},
		{8, 0, 1, NotFound, ""},
		{9, 0, 1, BadArgument, ""},
		{max, 0, 1, BadArgument, ""},
	}
	d.s.bodies[0] = []byte("0123456789")
	for _, r := range reads {
		d.vm.memory.WriteUint64Le(1024, 1<<32-1)
		d.want(d.call(2, "get_buffer_bytes", r.kind, r.start, r.size, 1024, 1028), r.status)
		if r.status == OK && d.text() != r.want {
			t.Errorf("%+v: got %q", r, d.text())
		}
		if r.status == OK && r.want == "" && (d.number(1024) != 0 || d.number(1028) != 0) {
			t.Errorf("%+v: an empty value is not 0, 0", r)
		}
	}
	d.want(d.call(2, "get_buffer_status", 0, 1024, 1028), OK)
	if d.number(1024) != 10 || d.number(1028) != 0 {
		t.Errorf("got status %d, %d", d.number(1024), d.number(1028))
	}
	d.want(d.call(2, "get_buffer_status", 9, 1024, 1028), BadArgument)
	d.want(d.call(1, "get_buffer_status", 0, 1024, 1028), NotFound)

	writes := []struct {
		start, size int
		value, want string
	}{
		{0, 0, "ab", "ab0123456789"},
		{10, 0, "ab", "0123456789ab"},
		{max, max, "ab", "0123456789ab"},
		{0, max, "ab", "ab"},
		{0, 10, "", ""},
		{3, 4, "ab", "012ab789"},
		{8, max, "abc", "01234567abc"},
	}
	for _, r := range writes {
		d.s.bodies[0] = []byte("0123456789")
		d.want(d.call(2, "set_buffer_bytes", 0, r.start, r.size, r.value), OK)
		if got := string(d.s.bodies[0]); got != r.want {
			t.Errorf("%+v: got %q", r, got)
		}
	}
	for kind, want := range []Status{OK, OK, NotFound, NotFound, BadArgument, BadArgument, BadArgument, BadArgument, BadArgument, BadArgument} {
		d.want(d.call(2, "set_buffer_bytes", kind, 0, 0, "x"), want)
	}
}

func TestStreamFunctions(t *testing.T) {
	d := newDesk(t, "0_2_1")
	for kind, want := range []Status{OK, OK, Unimplemented, Unimplemented, BadArgument} {
		d.want(d.call(2, "continue_stream", kind), want)
		d.want(d.call(2, "close_stream", kind), want)
	}
	d.want(d.call(1, "continue_stream", 0), NotFound)
	if want := []string{"continue 0", "close 0", "continue 1", "close 1"}; !slices.Equal(d.s.told, want) {
		t.Errorf("calls of the stream %v", d.s.told)
	}
	d.want(d.call(2, "send_local_response", 403, "why", "body", Pairs{{"a", "1"}}, 1<<32-1), OK)
	r := d.s.local
	d.vm.memory.WriteString(256, strings.Repeat("x", 64)) // the response must not share this memory
	if r == nil || r.Status != 403 || r.Details != "why" || string(r.Body) != "body" ||
		!slices.Equal(r.Headers, Pairs{{"a", "1"}}) || r.GRPCStatus != -1 {
		t.Errorf("response %+v", r)
	}
	d.want(d.call(2, "send_local_response", 204, 0, 0, 0, 0, 0, 0, 16), OK)
	if r := d.s.local; r.Status != 204 || len(r.Body) != 0 || len(r.Headers) != 0 || r.GRPCStatus != 16 {
		t.Errorf("response %+v", r)
	}
	d.want(d.call(1, "send_local_response", 403, "", "", "", 0), NotFound)
	d.want(d.call(2, "grpc_cancel", 1), Unimplemented)
}

func TestHTTPCallFunction(t *testing.T) {
	d := newDesk(t, "0_2_1")
	good := Pairs{{":method", "GET"}, {":path", "/"}, {":authority", ""}}
	d.want(d.call(2, "http_call", "auth", good, "body", Pairs{{"t", "1"}}, 1500, 1024), OK)
	if d.number(1024) != 41 || len(d.w.calls) != 1 {
		t.Fatalf("token %d, %d calls", d.number(1024), len(d.w.calls))
	}
	d.vm.memory.WriteString(256, strings.Repeat("x", 128)) // the call must not share this memory
	c := d.w.calls[0]
	if c.Upstream != "auth" || !slices.Equal(c.Headers, good) || string(c.Body) != "body" ||
		!slices.Equal(c.Trailers, Pairs{{"t", "1"}}) || c.Timeout != 1500*time.Millisecond {
		t.Errorf("call %+v", c)
	}
	d.want(d.call(2, "http_call", "other", good, "", "", 0, 1024), BadArgument)
	d.want(d.call(2, "http_call", "auth", good, "", "", 1<<31, 1024), BadArgument)
	d.want(d.call(0, "http_call", "auth", good, "", "", 0, 1024), BadArgument)
	for i := range good {
		d.want(d.call(2, "http_call", "auth", slices.Delete(slices.Clone(good), i, i+1), "", "", 0, 1024), BadArgument)
	}
	if len(d.w.calls) != 1 {
		t.Error("a refused call was made")
	}
	d.want(d.call(1, "get_status", 1024, 1028, 1032), OK)
	if d.number(1024) != 0 || d.number(1028) != 0 || d.number(1032) != 0 {
		t.Error("a status is stored without a call")
	}
}

func TestSharedFunctions(t *testing.T) {
	d := newDesk(t, "0_2_1")
	d.want(d.call(1, "get_shared_data", "k", 1024, 1028, 1032), NotFound)
	d.want(d.call(1, "set_shared_data", "k", "v", 0), OK)
	d.want(d.call(1, "set_shared_data", "k", "w", 8), CASMismatch)
	d.want(d.call(1, "get_shared_data", "k", 1024, 1028, 1032), OK)
	if d.text() != "v" || d.number(1032) != 7 {
		t.Errorf("got %q, %d", d.text(), d.number(1032))
	}
	d.want(d.call(2, "register_shared_queue", "q", 1024), OK)
	d.want(d.call(0, "register_shared_queue", "q", 1024), BadArgument)
	queue := int(d.number(1024))
	d.want(d.call(1, "resolve_shared_queue", "", "q", 1024), OK)
	d.want(d.call(1, "resolve_shared_queue", "vm", "q", 1024), NotFound)
	d.want(d.call(1, "enqueue_shared_queue", queue, "one"), OK)
	d.want(d.call(1, "enqueue_shared_queue", 99, "one"), NotFound)
	d.want(d.call(1, "dequeue_shared_queue", queue, 1024, 1028), OK)
	if d.text() != "one" {
		t.Errorf("got %q", d.text())
	}
	d.want(d.call(1, "dequeue_shared_queue", queue, 1024, 1028), Empty)
	d.want(d.call(1, "dequeue_shared_queue", 99, 1024, 1028), NotFound)
}

func TestMetricFunctions(t *testing.T) {
	d := newDesk(t, "0_2_1")
	d.want(d.call(1, "define_metric", 3, "m", 1024), BadArgument)
	d.want(d.call(1, "define_metric", 0, "m", 1024), OK)
	id := int(d.number(1024))
	d.want(d.call(1, "increment_metric", id, 5), OK)
	d.want(d.call(1, "increment_metric", id, -1), BadArgument)
	d.want(d.call(1, "record_metric", id, 1<<40), OK)
	d.want(d.call(1, "get_metric", id, 1024), OK)
	if v, _ := d.vm.memory.ReadUint64Le(1024); v != 1<<40 {
		t.Errorf("value %d", v)
	}
	d.want(d.call(1, "get_metric", 9, 1024), NotFound)
}

func TestProperties(t *testing.T) {
	d := newDesk(t, "0_2_1")
	d.w.properties["2 request.path"] = "/v1"
	d.w.properties["1 plugin_root_id"] = ""
	d.want(d.call(2, "get_property", "request\x00path", 1024, 1028), OK)
	if d.text() != "/v1" {
		t.Errorf("got %q", d.text())
	}
	d.want(d.call(2, "get_property", "request\x00path\x00", 1024, 1028), OK) // as C++ guests write it
	d.want(d.call(1, "get_property", "request\x00path", 1024, 1028), NotFound)
	d.want(d.call(1, "get_property", "plugin_root_id", 1024, 1028), OK)
	d.want(d.call(1, "get_property", "", 1024, 1028), NotFound)
	d.want(d.call(1, "get_property", strings.Repeat("a\x00", 4096), 1024, 1028), NotFound)
	d.want(d.call(2, "set_property", "a\x00b", "v"), OK)
	d.want(d.call(2, "set_property", "", "v"), NotFound)
	if d.w.properties["2 a.b"] != "v" {
		t.Errorf("properties %v", d.w.properties)
	}
}

func TestForeignFunctions(t *testing.T) {
	d := newDesk(t, "0_2_1")
	d.want(d.call(1, "call_foreign_function", "f", "x", 1024, 1028), NotFound)
	d.w.foreign = func(ctx uint32, name string, args []byte) ([]byte, Status) {
		if ctx != 2 || name != "echo" {
			return nil, NotFound
		}
		return args, OK
	}
	d.want(d.call(2, "call_foreign_function", "echo", "hello", 1024, 1028), OK)
	if d.text() != "hello" {
		t.Errorf("got %q", d.text())
	}
	d.want(d.call(2, "call_foreign_function", "nothing", "hello", 1024, 1028), NotFound)
	before, _ := d.vm.View(0, 8)
	before = slices.Clone(before)
	d.want(d.call(2, "call_foreign_function", "echo", "hello", 0, 0), OK)
	d.want(d.call(2, "call_foreign_function", "echo", "hello", 0, 1032), OK)
	if after, _ := d.vm.View(0, 8); !slices.Equal(after, before) || d.number(1032) != 5 {
		t.Errorf("a null address was written to, size %d", d.number(1032))
	}
}

func TestABI010(t *testing.T) {
	d := newDesk(t, "0_1_0")
	d.w.vmConfig, d.w.config = "vm", "plugin"
	d.want(d.call(2, "get_header_map_value", 0, "absent", 1024, 1028), OK)
	if d.number(1024) != 0 || d.number(1028) != 0 {
		t.Error("an absent key is not empty")
	}
	d.want(d.call(1, "get_configuration", 1024, 1028), OK)
	if d.text() != "plugin" {
		t.Errorf("got %q", d.text())
	}
	d.want(d.call(2, "continue_request"), OK)
	d.want(d.call(2, "continue_response"), OK)
	d.want(d.call(2, "clear_route_cache"), OK)
	if want := []string{"continue 0", "continue 1"}; !slices.Equal(d.s.told, want) {
		t.Errorf("calls of the stream %v", d.s.told)
	}

	// The header functions have two parameters, and some functions have no result.
	a := newAssembler()
	resume := a.importFunc("env", "proxy_continue_request", "", "")
	config := a.importFunc("env", "proxy_get_configuration", "ii", "i")
	a.marker("0_1_0")
	a.fn("proxy_on_vm_start", "ii", "i", i32(1024), i32(1028), call(config), drop, i32(1))
	a.fn("proxy_on_request_headers", "ii", "i", call(resume), i32(512), local(1), store32, i32(1))
	w := newWorld()
	w.vmConfig, w.config = "vm", "plugin"
	vm := start(t, load(t, a.bytes(), LoadOptions{}), w)
	d = &desk{t: t, w: w, vm: vm}
	if ok, err := vm.VMStart(t.Context(), 1); !ok || err != nil || d.text() != "vm" {
		t.Errorf("vm start: %v, %v, %q", ok, err, d.text())
	}
	if err := vm.ContextCreate(t.Context(), 2, 1); err != nil {
		t.Fatal(err)
	}
	s := w.newStream(2)
	action, err := vm.RequestHeaders(t.Context(), 2, 7, true)
	if action != Pause || err != nil || d.number(512) != 7 || !slices.Equal(s.told, []string{"continue 0"}) {
		t.Errorf("got %v, %v, %d lines, %v", action, err, d.number(512), s.told)
	}
}
