// Command guest is a proxy-wasm 0.2.1 guest and a policy in one, in plain Go without an SDK. It
// calls the host in the same way as an ordinary Go module.
package main

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"strings"
	"time"
	"unsafe"
)

//go:wasmimport env proxy_log
func proxyLog(level uint32, message unsafe.Pointer, size uint32) uint32

//go:wasmimport env proxy_get_buffer_bytes
func getBufferBytes(kind, start, max uint32, value, size unsafe.Pointer) uint32

//go:wasmimport env proxy_set_buffer_bytes
func setBufferBytes(kind, start, length uint32, value unsafe.Pointer, size uint32) uint32

//go:wasmimport env proxy_get_header_map_value
func getHeaderMapValue(kind uint32, key unsafe.Pointer, keySize uint32, value, size unsafe.Pointer) uint32

//go:wasmimport env proxy_add_header_map_value
func addHeaderMapValue(kind uint32, key unsafe.Pointer, keySize uint32, value unsafe.Pointer, size uint32) uint32

func main() {}

func init() { log("init") }

func log(message string) {
	proxyLog(2, unsafe.Pointer(unsafe.StringData(message)), uint32(len(message)))
}

// given is the memory that the host received last; the variable keeps it from
// the garbage collector.
var given []byte

//go:wasmexport proxy_abi_version_0_2_1
func abiVersion() {}

//go:wasmexport proxy_on_memory_allocate
func allocate(size uint32) unsafe.Pointer {
	given = make([]byte, size)
	return unsafe.Pointer(&given[0])
}

// answer returns the bytes that the host wrote.
func answer(ptr, size uint32) []byte {
	if size == 0 {
		return nil
	}
	return given[:size]
}

func buffer(kind uint32) string {
	var ptr, size uint32
	if getBufferBytes(kind, 0, math.MaxUint32, unsafe.Pointer(&ptr), unsafe.Pointer(&size)) != 0 {
		return ""
	}
	return string(answer(ptr, size))
}

var config string

//go:wasmexport proxy_on_context_create
func contextCreate(id, parent uint32) { log(fmt.Sprintf("create %d %d", id, parent)) }

//go:wasmexport proxy_on_vm_start
func vmStart(root, size uint32) uint32 {
	log("vm " + buffer(6))
	return 1
}

//go:wasmexport proxy_on_configure
func configure(root, size uint32) uint32 {
	config = buffer(7)
	if config == "refuse" {
		return 0
	}
	return 1
}

//go:wasmexport proxy_on_request_headers
func requestHeaders(id, lines, end uint32) uint32 {
	key := ":path"
	var ptr, size uint32
	if getHeaderMapValue(0, unsafe.Pointer(unsafe.StringData(key)), uint32(len(key)), unsafe.Pointer(&ptr), unsafe.Pointer(&size)) == 0 {
		value := string(answer(ptr, size))
		key = "x-path"
		addHeaderMapValue(0, unsafe.Pointer(unsafe.StringData(key)), uint32(len(key)), unsafe.Pointer(unsafe.StringData(value)), uint32(len(value)))
	}
	return 0
}

//go:wasmexport proxy_on_request_body
func requestBody(id, size, end uint32) uint32 {
	body := strings.ToUpper(buffer(0))
	setBufferBytes(0, 0, math.MaxUint32, unsafe.Pointer(unsafe.StringData(body)), uint32(len(body)))
	return 0
}

var keep [][]byte

// onTick does the action that the configuration names.
//
//go:wasmexport proxy_on_tick
func onTick(root uint32) {
	switch config {
	case "panic":
		panic("deliberate")
	case "exit":
		os.Exit(9)
	case "loop":
		for i := 0; ; i++ {
			given = given[:len(given)*(i&1)]
		}
	case "bomb":
		for {
			keep = append(keep, make([]byte, 1<<20))
		}
	case "garbage":
		for range 1000 {
			keep = [][]byte{make([]byte, 64<<10)}
		}
		log("collected")
	case "sleep":
		began := time.Now()
		time.Sleep(20 * time.Millisecond)
		log(fmt.Sprint("slept ", time.Since(began) >= 20*time.Millisecond))
	case "goroutines":
		results := make(chan int)
		for i := range 10 {
			go func() { results <- i }()
		}
		sum := 0
		for range 10 {
			sum += <-results
		}
		log(fmt.Sprint("sum ", sum))
	case "environment":
		_, err := os.ReadFile("/etc/hostname")
		log(fmt.Sprint(len(os.Environ()), len(os.Args), err != nil))
	}
}

// scratch consists of whole words, so that it is aligned to 8.
var scratch []uint64

//go:wasmexport pdproxy_v1_scratch
func scratchBuffer(size uint32) unsafe.Pointer {
	scratch = make([]uint64, (size+7)/8)
	return unsafe.Pointer(&scratch[0])
}

var names = "place least\nmint one"

//go:wasmexport pdproxy_v1_policies
func policies() uint64 {
	return uint64(uintptr(unsafe.Pointer(unsafe.StringData(names))))<<32 | uint64(len(names))
}

//go:wasmexport pdproxy_v1_needs
func needs() uint64 { return 5 }

// place reads rows of 64 bytes after a header of 64 and chooses the row with
// the smallest i64 at offset 24, as a policy compares loads.
//
//go:wasmexport pdproxy_v1_on_place
func place(ptr, size uint32) uint64 {
	frame := unsafe.Slice((*byte)(unsafe.Pointer(uintptr(ptr))), size)
	best, least := uint64(math.MaxUint32), int64(math.MaxInt64)
	for i, rows := uint64(0), frame[64:]; len(rows) >= 64; i, rows = i+1, rows[64:] {
		if load := int64(binary.LittleEndian.Uint64(rows[24:])); load < least {
			best, least = i, load
		}
	}
	return best
}
