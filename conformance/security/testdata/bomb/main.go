// Command bomb is a hostile filter: the request header x-bomb names the object with which it tries
// to fill the memory of its host.
package main

import "unsafe"

func main() {}

//go:wasmimport env proxy_add_header_map_value
func addHeader(kind int32, k unsafe.Pointer, ks int32, v unsafe.Pointer, vs int32) int32

//go:wasmimport env proxy_get_header_map_value
func getHeader(kind int32, k unsafe.Pointer, ks int32, rp, rs unsafe.Pointer) int32

//go:wasmimport env proxy_define_metric
func defineMetric(kind int32, n unsafe.Pointer, ns int32, id unsafe.Pointer) int32

//go:wasmimport env proxy_http_call
func httpCall(u unsafe.Pointer, us int32, h unsafe.Pointer, hs int32, b unsafe.Pointer, bs int32, t unsafe.Pointer, ts int32, timeout int32, token unsafe.Pointer) int32

//go:wasmimport env proxy_record_metric
func recordMetric(id int32, v int64) int32

//go:wasmimport env proxy_set_property
func setProperty(k unsafe.Pointer, ks int32, v unsafe.Pointer, vs int32) int32

//go:wasmimport env proxy_log
func log(level int32, m unsafe.Pointer, ms int32) int32

//go:wasmexport proxy_abi_version_0_2_1
func abi() {}

var keep [][]byte

//go:wasmexport proxy_on_memory_allocate
func alloc(n int32) unsafe.Pointer {
	b := make([]byte, n)
	keep = append(keep, b)
	return unsafe.Pointer(unsafe.SliceData(b))
}

//go:wasmexport proxy_on_context_create
func create(ctx, root int32) {}

func str(s string) (unsafe.Pointer, int32) {
	return unsafe.Pointer(unsafe.StringData(s)), int32(len(s))
}

var big []byte

//go:wasmexport proxy_on_request_headers
func requestHeaders(ctx, n, eos int32) int32 {
	var p unsafe.Pointer
	var size int32
	k, ks := str("x-bomb")
	if getHeader(0, k, ks, unsafe.Pointer(&p), unsafe.Pointer(&size)) != 0 {
		return 0
	}
	what := unsafe.String((*byte)(p), int(size))
	if big == nil {
		big = make([]byte, 16<<20)
		big[0] = 'a'
		for n := 1; n < len(big); n *= 2 {
			copy(big[n:], big[:n])
		}
	}
	bp, bs := unsafe.Pointer(unsafe.SliceData(big)), int32(len(big))
	switch what {
	case "headers":
		for range 2000 {
			hk, hs := str("x-a")
			addHeader(0, hk, hs, bp, bs)
		}
	case "property":
		name := []byte("p0000")
		for i := range 2000 {
			name[1], name[2], name[3], name[4] = byte('0'+i/1000%10), byte('0'+i/100%10), byte('0'+i/10%10), byte('0'+i%10)
			setProperty(unsafe.Pointer(&name[0]), 5, bp, bs)
		}
	case "metric":
		var id uint32
		for i := range 1000 {
			copy(big, []byte{byte('a' + i/676%26), byte('a' + i/26%26), byte('a' + i%26)})
			defineMetric(0, bp, bs, unsafe.Pointer(&id))
		}
	case "manymetrics":
		var id uint32
		for i := range 100000 {
			name := []byte{'n', byte('a' + i/17576%26), byte('a' + i/676%26), byte('a' + i/26%26), byte('a' + i%26)}
			defineMetric(0, unsafe.Pointer(&name[0]), 5, unsafe.Pointer(&id))
		}
	case "collide":
		for _, suffix := range []string{"_count", "_sum", "_bucket"} {
			metric(2, "h"+suffix+"x")
			metric(0, "h"+suffix+"x"+suffix)
			metric(1, "g"+suffix+"x"+suffix)
			metric(2, "g"+suffix+"x")
			metric(0, "same")
			metric(1, "same")
			metric(2, "same")
			metric(0, "a.b")
			metric(1, "a-b")
			metric(0, "\xff{}\n\"")
		}
	case "log":
		log(2, bp, bs)
	case "call":
		var token uint32
		pairs := encode(":method", "POST", ":path", "/", ":authority", "x")
		u, us := str("sink")
		for range 12 {
			if httpCall(u, us, unsafe.Pointer(&pairs[0]), int32(len(pairs)), bp, bs, nil, 0, 60000, unsafe.Pointer(&token)) != 0 {
				m, ms := str("call refused")
				log(2, m, ms)
				break
			}
		}
	}
	return 0
}

// metric defines a metric and gives it a value.
func metric(kind int32, name string) {
	var id int32
	p, n := str(name)
	if defineMetric(kind, p, n, unsafe.Pointer(&id)) == 0 {
		recordMetric(id, 1)
	}
}

func encode(kv ...string) []byte {
	var b []byte
	u := func(n int) { b = append(b, byte(n), byte(n>>8), byte(n>>16), byte(n>>24)) }
	u(len(kv) / 2)
	for _, s := range kv {
		u(len(s))
	}
	for _, s := range kv {
		b = append(append(b, s...), 0)
	}
	return b
}
