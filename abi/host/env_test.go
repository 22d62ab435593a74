package host

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// world is an Env that records calls.
type world struct {
	level      LogLevel
	lines      []string // "INFO text"
	vmConfig   string
	config     string
	streams    map[uint32]*fakeStream
	properties map[string]string
	ticks      map[uint32]time.Duration
	data       map[string]string
	queues     map[uint32][]string
	queueNames []string
	metrics    []int64
	metricKind []MetricKind
	calls      []*HTTPCall
	foreign    func(ctx uint32, name string, args []byte) ([]byte, Status)
	effects    int // number of calls other than look-ups
}

func newWorld() *world {
	return &world{
		streams: map[uint32]*fakeStream{}, properties: map[string]string{},
		ticks: map[uint32]time.Duration{}, data: map[string]string{}, queues: map[uint32][]string{},
	}
}

func (w *world) Log(level LogLevel, message string) {
	names := []string{"TRACE", "DEBUG", "INFO", "WARN", "ERROR", "CRITICAL"}
	w.lines = append(w.lines, names[level]+" "+message)
}
func (w *world) LogLevel() LogLevel   { return w.level }
func (w *world) VMConfig() []byte     { return []byte(w.vmConfig) }
func (w *world) PluginConfig() []byte { return []byte(w.config) }
func (w *world) SetTickPeriod(root uint32, period time.Duration) {
	w.effects++
	w.ticks[root] = period
}
func (w *world) Stream(ctx uint32) Stream {
	if s := w.streams[ctx]; s != nil {
		return s
	}
	return nil
}
func (w *world) Property(ctx uint32, path []string) ([]byte, Status) {
	v, ok := w.properties[fmt.Sprint(ctx, " ", strings.Join(path, "."))]
	if !ok {
		return nil, NotFound
	}
	return []byte(v), OK
}
func (w *world) SetProperty(ctx uint32, path []string, value []byte) Status {
	w.effects++
	w.properties[fmt.Sprint(ctx, " ", strings.Join(path, "."))] = string(value)
	return OK
}
func (w *world) SharedData(key string) ([]byte, uint32, Status) {
	v, ok := w.data[key]
	if !ok {
		return nil, 0, NotFound
	}
	return []byte(v), 7, OK
}
func (w *world) SetSharedData(key string, value []byte, cas uint32) Status {
	w.effects++
	if cas != 0 && cas != 7 {
		return CASMismatch
	}
	w.data[key] = string(value)
	return OK
}
func (w *world) RegisterQueue(_ uint32, name string) uint32 {
	w.effects++
	if i := slices.Index(w.queueNames, name); i >= 0 {
		return uint32(i + 1)
	}
	w.queueNames = append(w.queueNames, name)
	w.queues[uint32(len(w.queueNames))] = nil
	return uint32(len(w.queueNames))
}
func (w *world) ResolveQueue(vmID, name string) (uint32, Status) {
	if i := slices.Index(w.queueNames, name); i >= 0 && vmID == "" {
		return uint32(i + 1), OK
	}
	return 0, NotFound
}
func (w *world) Enqueue(queue uint32, value []byte) Status {
	if _, ok := w.queues[queue]; !ok {
		return NotFound
	}
	w.effects++
	w.queues[queue] = append(w.queues[queue], string(value))
	return OK
}
func (w *world) Dequeue(queue uint32) ([]byte, Status) {
	q, ok := w.queues[queue]
	switch {
	case !ok:
		return nil, NotFound
	case len(q) == 0:
		return nil, Empty
	}
	w.effects++
	w.queues[queue] = q[1:]
	return []byte(q[0]), OK
}
func (w *world) DefineMetric(kind MetricKind, _ string) (uint32, Status) {
	w.effects++
	w.metrics, w.metricKind = append(w.metrics, 0), append(w.metricKind, kind)
	return uint32(len(w.metrics)), OK
}
func (w *world) metric(id uint32) *int64 {
	if id == 0 || int(id) > len(w.metrics) {
		return nil
	}
	return &w.metrics[id-1]
}
func (w *world) RecordMetric(id uint32, value uint64) Status {
	m := w.metric(id)
	if m == nil {
		return NotFound
	}
	*m = int64(value)
	return OK
}
func (w *world) IncrementMetric(id uint32, delta int64) Status {
	m := w.metric(id)
	if m == nil {
		return NotFound
	}
	if w.metricKind[id-1] == Counter && delta < 0 {
		return BadArgument
	}
	*m += delta
	return OK
}
func (w *world) Metric(id uint32) (uint64, Status) {
	m := w.metric(id)
	if m == nil {
		return 0, NotFound
	}
	return uint64(*m), OK
}
func (w *world) HTTPCall(_ uint32, call *HTTPCall) (uint32, Status) {
	if call.Upstream != "auth" {
		return 0, BadArgument
	}
	w.effects++
	call.Body = slices.Clone(call.Body)
	w.calls = append(w.calls, call)
	return uint32(40 + len(w.calls)), OK
}
func (w *world) Foreign(ctx uint32, name string, args []byte) ([]byte, Status) {
	if w.foreign == nil {
		return nil, NotFound
	}
	w.effects++
	return w.foreign(ctx, name, args)
}

// fakeStream is a stream whose maps and bodies are always available.
type fakeStream struct {
	world  *world
	maps   [4]*fakeMap
	bodies [2][]byte
	told   []string
	local  *LocalResponse
}

func (w *world) newStream(id uint32) *fakeStream {
	s := &fakeStream{world: w}
	for i := range s.maps {
		s.maps[i] = &fakeMap{world: w}
	}
	w.streams[id] = s
	return s
}
func (s *fakeStream) Header(kind MapKind) HeaderMap {
	if s.maps[kind] == nil {
		return nil
	}
	return s.maps[kind]
}
func (s *fakeStream) Body(kind BufferKind) ([]byte, Status) { return s.bodies[kind], OK }
func (s *fakeStream) SetBody(kind BufferKind, start, length int, value []byte) Status {
	s.world.effects++
	s.bodies[kind] = slices.Replace(s.bodies[kind], start, start+length, value...)
	return OK
}
func (s *fakeStream) Continue(kind StreamKind) Status {
	s.world.effects++
	s.told = append(s.told, fmt.Sprint("continue ", kind))
	return OK
}
func (s *fakeStream) Close(kind StreamKind) Status {
	s.world.effects++
	s.told = append(s.told, fmt.Sprint("close ", kind))
	return OK
}
func (s *fakeStream) LocalResponse(r *LocalResponse) Status {
	s.world.effects++
	r.Body = slices.Clone(r.Body)
	s.local = r
	return OK
}
func (s *fakeStream) Done() Status {
	s.world.effects++
	s.told = append(s.told, "done")
	return OK
}

// fakeMap is a HeaderMap over a slice.
type fakeMap struct {
	world *world
	pairs Pairs
}

func (m *fakeMap) Pairs() Pairs { return m.pairs }
func (m *fakeMap) SetPairs(p Pairs) Status {
	m.world.effects++
	m.pairs = p
	return OK
}
func (m *fakeMap) Value(key string) (string, bool) { return readOnlyMap{m.pairs}.Value(key) }
func (m *fakeMap) Add(key, value string) Status {
	m.world.effects++
	m.pairs = append(m.pairs, Pair{key, value})
	return OK
}
func (m *fakeMap) Replace(key, value string) Status {
	m.Remove(key)
	return m.Add(key, value)
}
func (m *fakeMap) Remove(key string) Status {
	m.world.effects++
	m.pairs = slices.DeleteFunc(m.pairs, func(p Pair) bool { return p.Key == key })
	return OK
}

// load loads a valid binary until the test ends.
func load(t testing.TB, wasm []byte, opts LoadOptions) *Module {
	t.Helper()
	m, err := Load(t.Context(), wasm, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return m
}

// start makes a VM with root context 1.
func start(t testing.TB, m *Module, w *world) *VM {
	t.Helper()
	vm, err := m.NewVM(context.Background(), w)
	if err != nil {
		t.Fatal(err)
	}
	if err := vm.ContextCreate(t.Context(), 1, 0); err != nil {
		t.Fatal(err)
	}
	return vm
}

// invoke calls any export, with context id as the current one.
func invoke(vm *VM, export string, id uint32, args ...uint64) (uint64, error) {
	fn := vm.exported(export)
	stack := append(slices.Clone(args), 0)
	err := vm.call(context.Background(), fn, export, id, stack)
	return stack[0], err
}
