package http1

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
)

// Values of llhttp's enumerations (undici, lib/llhttp/constants.js).
const (
	llRequest       = 1  // TYPE.REQUEST
	llOK            = 0  // ERROR.OK
	llClosed        = 5  // ERROR.CLOSED_CONNECTION
	llPaused        = 21 // ERROR.PAUSED
	llPausedUpgrade = 22 // ERROR.PAUSED_UPGRADE
)

// llhttp is llhttp's parser of requests without any leniency. Safe for concurrent use.
type llhttp struct {
	mu       sync.Mutex
	module   api.Module
	parser   uint64
	buffer   uint64 // in the module's memory
	size     int    // of buffer
	now      *reading
	inHeader bool   // the headers of the present request are not complete
	name     []byte // of the present header line
	value    []byte
	inValue  bool
}

// theLLHTTP is one parser for all tests of the process.
var theLLHTTP = sync.OnceValues(newLLHTTP)

// readLLHTTP reads a stream as llhttp does.
func readLLHTTP(t testing.TB, stream []byte) reading {
	t.Helper()
	l, err := theLLHTTP()
	if err != nil {
		t.Fatal(err)
	}
	r, err := l.read(stream)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

var wasmText = regexp.MustCompile(`wasmBase64 = '([A-Za-z0-9+/=]+)'`)

// install returns llhttp's WebAssembly from the npm package, and installs the package if it is
// absent.
func install() ([]byte, error) {
	dir := filepath.Join("..", "..", "build", "http1")
	lock, err := os.ReadFile("llhttp/package-lock.json")
	if err != nil {
		return nil, err
	}
	if have, _ := os.ReadFile(filepath.Join(dir, "installed")); string(have) != string(lock) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
		for _, name := range []string{"package.json", "package-lock.json"} {
			if out, err := exec.Command("cp", "llhttp/"+name, dir).CombinedOutput(); err != nil {
				return nil, fmt.Errorf("%w\n%s", err, out)
			}
		}
		npm := exec.Command("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
		npm.Dir = dir
		if out, err := npm.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("npm ci in conformance/http1/llhttp: %w\n%s", err, out)
		}
		if err := os.WriteFile(filepath.Join(dir, "installed"), lock, 0o644); err != nil {
			return nil, err
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, "node_modules/undici/lib/llhttp/llhttp-wasm.js"))
	if err != nil {
		return nil, err
	}
	m := wasmText.FindSubmatch(text)
	if m == nil {
		return nil, fmt.Errorf("undici has llhttp in another form")
	}
	return base64.StdEncoding.DecodeString(string(m[1]))
}

func newLLHTTP() (*llhttp, error) {
	wasm, err := install()
	if err != nil {
		return nil, err
	}
	ctx := context.Background()
	l := new(llhttp)
	runtime := wazero.NewRuntime(ctx)
	env := runtime.NewHostModuleBuilder("env")
	for name, f := range map[string]func(data []byte) uint64{
		"wasm_on_message_begin": l.begin, "wasm_on_url": l.target, "wasm_on_status": l.nothing,
		"wasm_on_header_field": l.headerName, "wasm_on_header_value": l.headerValue,
		"wasm_on_headers_complete": l.headersComplete, "wasm_on_body": l.body, "wasm_on_message_complete": l.complete,
	} {
		params := map[string]int{"wasm_on_message_begin": 1, "wasm_on_message_complete": 1, "wasm_on_headers_complete": 4}[name]
		if params == 0 {
			params = 3 // parser, first byte, length
		}
		call := api.GoModuleFunc(func(_ context.Context, m api.Module, stack []uint64) {
			var data []byte
			if params == 3 {
				data, _ = m.Memory().Read(uint32(stack[1]), uint32(stack[2]))
			}
			stack[0] = f(data)
		})
		types := make([]api.ValueType, params)
		for i := range types {
			types[i] = api.ValueTypeI32
		}
		env.NewFunctionBuilder().WithGoModuleFunction(call, types, []api.ValueType{api.ValueTypeI32}).Export(name)
	}
	if _, err := env.Instantiate(ctx); err != nil {
		return nil, err
	}
	if l.module, err = runtime.InstantiateWithConfig(ctx, wasm, wazero.NewModuleConfig().WithStartFunctions("_initialize")); err != nil {
		return nil, err
	}
	l.parser = l.call("llhttp_alloc", llRequest)
	return l, nil
}

// call calls a function of the module. A trap is a fault of the test.
func (l *llhttp) call(name string, args ...uint64) uint64 {
	result, err := l.module.ExportedFunction(name).Call(context.Background(), args...)
	if err != nil {
		panic(fmt.Sprintf("%s: %v", name, err))
	}
	if len(result) == 0 {
		return 0
	}
	return result[0]
}

// read reads a whole stream. After CONNECT and Upgrade it goes on as after another request: the
// proxy answers CONNECT with an error, and the tests upgrade nothing. So the connection stays
// HTTP/1.1 (RFC 9110 7.8, 9.3.6).
func (l *llhttp) read(stream []byte) (reading, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.size < len(stream) {
		if l.size > 0 {
			l.call("free", l.buffer)
		}
		l.size = max(len(stream), 64<<10)
		l.buffer = l.call("malloc", uint64(l.size))
	}
	if !l.module.Memory().Write(uint32(l.buffer), stream) {
		return reading{}, fmt.Errorf("a stream of %d bytes does not fit", len(stream))
	}
	l.now = new(reading)
	l.call("llhttp_reset", l.parser)
	for at := 0; at < len(stream); {
		errno := l.call("llhttp_execute", l.parser, l.buffer+uint64(at), uint64(len(stream)-at))
		if errno == llOK {
			break
		}
		at = int(l.call("llhttp_get_error_pos", l.parser) - l.buffer)
		switch errno {
		case llPaused: // l.complete
			l.now.last().end = at
			l.call("llhttp_resume", l.parser)
		case llPausedUpgrade:
			if m := l.now.last(); m.end == 0 {
				m.end = at
			}
			l.call("llhttp_resume_after_upgrade", l.parser)
		default:
			l.now.refused = l.text(l.call("llhttp_errno_name", errno)) + ": " + l.text(l.call("llhttp_get_error_reason", l.parser))
			l.now.closed = errno == llClosed
			return *l.now, nil
		}
	}
	return *l.now, nil
}

// text returns a string of C.
func (l *llhttp) text(at uint64) string {
	if at == 0 {
		return ""
	}
	b, _ := l.module.Memory().Read(uint32(at), 200)
	s, _, _ := strings.Cut(string(b), "\x00")
	return s
}

func (l *llhttp) nothing([]byte) uint64 { return llOK }

func (l *llhttp) begin([]byte) uint64 {
	l.now.messages = append(l.now.messages, message{})
	l.inHeader, l.name, l.value, l.inValue = true, nil, nil, false
	return llOK
}

func (l *llhttp) target(data []byte) uint64 {
	l.now.last().target += string(data)
	return llOK
}

func (l *llhttp) headerName(data []byte) uint64 {
	if l.inValue {
		l.endLine()
	}
	l.name = append(l.name, data...)
	return llOK
}

func (l *llhttp) headerValue(data []byte) uint64 {
	l.inValue = true
	l.value = append(l.value, data...)
	return llOK
}

// endLine adds the present header line to the request.
func (l *llhttp) endLine() {
	if len(l.name) > 0 {
		l.now.last().add(string(l.name), string(l.value), !l.inHeader)
	}
	l.name, l.value, l.inValue = nil, nil, false
}

func (l *llhttp) headersComplete([]byte) uint64 {
	l.endLine()
	m := l.now.last()
	l.inHeader, m.headed = false, true
	m.proto = fmt.Sprintf("HTTP/%d.%d", l.call("llhttp_get_http_major", l.parser), l.call("llhttp_get_http_minor", l.parser))
	m.method = l.text(l.call("llhttp_method_name", l.call("llhttp_get_method", l.parser)))
	return llOK
}

func (l *llhttp) body(data []byte) uint64 {
	l.now.last().body += string(data)
	return llOK
}

func (l *llhttp) complete([]byte) uint64 {
	l.endLine()
	l.now.last().whole = true
	return llPaused
}
