package main

import (
	"encoding/binary"
	"unsafe"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/guest"
	"github.com/pdproxy/pdproxy/filters/stableprefix"
)

// The actions of callbacks and the numbers of maps and buffers, as in proxy-wasm.
const (
	goOn, pause    = 0, 1
	requestHeaders = 0
	requestBody    = 0
)

const (
	// maxBody is the size of the largest body that the rules read. The module keeps the memory of
	// the largest body until it is unloaded. Bodies of agents have 100 KB to 2 MB.
	maxBody = 8 << 20
	// firstBytes is how much of a body shows whether an agent sent it, if the headers name none.
	firstBytes = 4 << 10
)

// request is the state of a request whose body has not ended.
type request struct {
	api   stableprefix.API
	known stableprefix.Agents
	sure  bool   // the body is read to its end; else its first bytes decide
	size  uint32 // of the body by its header Content-Length, 0 if it is not known
}

var (
	config   *stableprefix.Config
	requests = map[uint32]request{} // by context
)

func init() {
	guest.OnConfigure(func(text string) bool {
		var err error
		if config, err = stableprefix.Parse(text); err != nil {
			guest.Log(guest.LogError, err.Error())
		}
		return err == nil
	})
}

//go:wasmexport proxy_on_request_headers
func onRequestHeaders(context, _, end uint32) uint32 {
	api := stableprefix.APIOf(string(header(":path")))
	if api == stableprefix.NoAPI || end != 0 {
		return goOn
	}
	r := request{api: api, known: stableprefix.ByUserAgent(string(header("user-agent")))}
	r.sure = r.known != 0 || config.AnyClient
	if r.sure || api != stableprefix.Messages { // the system text of Messages may be at the end of the body
		r.size = number(header("content-length"))
		requests[context] = r
	}
	return goOn
}

// number returns the value of a decimal number, 0 for another text.
func number(text []byte) (n uint32) {
	for _, c := range text {
		if c < '0' || c > '9' || n > maxBody {
			return 0
		}
		n = n*10 + uint32(c-'0')
	}
	return n
}

//go:wasmexport proxy_on_request_body
func onRequestBody(context, size, end uint32) uint32 {
	r, ok := requests[context]
	if !ok {
		return goOn
	}
	whole := end != 0 || size == r.size && size > 0 // the end itself may come later, and pausing until then costs time
	if !r.sure {
		if size < firstBytes && !whole {
			return pause
		}
		if !stableprefix.Mentions(body(min(size, firstBytes))) {
			delete(requests, context)
			return goOn
		}
		r.sure = true
		requests[context] = r
	}
	if size <= maxBody && !whole {
		return pause
	}
	delete(requests, context)
	if size > maxBody {
		note("no rule was used: the body is larger than 8 MiB")
		return goOn
	}
	change(r, size)
	return goOn
}

//go:wasmexport proxy_on_delete
func onDelete(context uint32) { delete(requests, context) }

// change applies the rules to a whole body. One call of the host makes all edits, so that a body
// never has only a part of them.
func change(r request, size uint32) {
	tenant := string(property("pdproxy\x00tenant"))
	b := body(size)
	edits, effects := config.Apply(r.api, r.known, tenant, b)
	if len(edits) == 0 {
		return
	}
	e := stableprefix.Join(b, edits)
	if setBufferBytes(requestBody, uint32(e.Start), uint32(e.End-e.Start), unsafe.SliceData(e.Text), uint32(len(e.Text))) != uint32(guest.OK) {
		note("no rule was used: host_memory of the plugin is used up")
		return
	}
	for _, e := range effects {
		note(e.Note())
		count("stable_prefix_"+e.Rule.Name+"_requests_total", 1)
		count("stable_prefix_"+e.Rule.Name+"_bytes_total", e.Bytes)
	}
}

func note(text string) { guest.Foreign(abi.ForeignNote, []byte(text)) }

// count adds to a counter.
func count(name string, n int) {
	guest.Foreign(abi.ForeignCounter, append(binary.LittleEndian.AppendUint64(nil, uint64(n)), name...))
}

// given is where the host writes the address and the size of a result.
var given struct{ ptr, size uint32 }

// result returns the bytes that a host function gave, nil for another status than OK. They are
// valid until the next call of a host function with a result.
func result(status uint32) []byte {
	if status != uint32(guest.OK) || given.size == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(uintptr(given.ptr))), given.size)
}

func header(name string) []byte {
	return result(getHeader(requestHeaders, unsafe.StringData(name), uint32(len(name)), &given.ptr, &given.size))
}

func property(path string) []byte {
	return result(getProperty(unsafe.StringData(path), uint32(len(path)), &given.ptr, &given.size))
}

func body(size uint32) []byte {
	return result(getBufferBytes(requestBody, 0, size, &given.ptr, &given.size))
}

//go:wasmimport env proxy_get_header_map_value
//go:noescape
func getHeader(headers uint32, name *byte, nameSize uint32, ptr, size *uint32) uint32

//go:wasmimport env proxy_get_property
//go:noescape
func getProperty(path *byte, pathSize uint32, ptr, size *uint32) uint32

//go:wasmimport env proxy_get_buffer_bytes
//go:noescape
func getBufferBytes(buffer, start, max uint32, ptr, size *uint32) uint32

//go:wasmimport env proxy_set_buffer_bytes
//go:noescape
func setBufferBytes(buffer, start, size uint32, value *byte, valueSize uint32) uint32
