package filter

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"errors"
	"io"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/shared"
)

// maxInflated is the largest result of uncompress, in bytes.
const maxInflated = 32 << 20

var (
	errBadLine  = errors.New("a header line cannot be sent")
	errBadProto = errors.New("malformed message")
	// errInterrupted ends a long operation of a host function.
	errInterrupted = errors.New("the call was interrupted")
)

// Foreign implements host.Env. The functions are the useful ones of Envoy
// (source/extensions/common/wasm/foreign.cc), Higress' get_log_level, and
// pdproxy's own. NotFound: there is no such function.
func (v *vm) Foreign(ctx uint32, name string, args []byte) ([]byte, host.Status) {
	switch name {
	case "compress":
		return v.p.compress(args, v.guest.Interrupted)
	case "uncompress":
		return v.p.uncompress(args, v.guest.Interrupted)
	case "clear_route_cache":
		return nil, host.OK // the route is chosen after the filters
	case "get_log_level":
		return binary.LittleEndian.AppendUint32(nil, uint32(v.LogLevel())), host.OK
	case "set_envoy_filter_state":
		return nil, v.setFilterState(ctx, args)
	case abi.ForeignCounter:
		return v.p.metrics.Count(args)
	case abi.ForeignConversationGet:
		return shared.ConversationGet(v.p.deps.Conversations, args)
	case abi.ForeignConversationPut:
		return shared.ConversationPut(v.p.deps.Conversations, args)
	case abi.ForeignNote:
		f := v.stream(ctx)
		switch {
		case f == nil:
			return nil, host.BadArgument
		case !f.s.info.AddNote(v.p.spec.Name + ": " + string(args[:min(len(args), abi.MaxNoteSize)])):
			return nil, host.InternalFailure
		}
		return nil, host.OK
	}
	return nil, host.NotFound
}

// compressCost is the memory of a compression in bytes, without input and result.
const compressCost = 1 << 20

// pieces reads in pieces, until the running call is interrupted.
type pieces struct {
	r           io.Reader
	interrupted func() bool
}

// Read implements io.Reader.
func (p pieces) Read(b []byte) (int, error) {
	if p.interrupted() {
		return 0, errInterrupted
	}
	return p.r.Read(b)
}

// compress is zlib's compress(): a zlib stream at the default level.
// InternalFailure: the plugin's budget is too small, or the call was interrupted.
func (p *Plugin) compress(data []byte, interrupted func() bool) ([]byte, host.Status) {
	size := int64(compressCost + 2*len(data)) // the buffer doubles as it grows
	if !p.deps.Host.Take(size) {
		return nil, host.InternalFailure
	}
	defer p.deps.Host.Give(size)
	var out bytes.Buffer
	w := zlib.NewWriter(&out)
	if _, err := io.Copy(w, pieces{bytes.NewReader(data), interrupted}); err != nil {
		return nil, host.InternalFailure
	}
	if err := w.Close(); err != nil {
		return nil, host.SerializationFailure
	}
	return out.Bytes(), host.OK
}

// uncompress is zlib's uncompress(). SerializationFailure: the data is not a
// zlib stream, or its content is larger than maxInflated. InternalFailure: the
// plugin's budget is too small, or the call was interrupted.
func (p *Plugin) uncompress(data []byte, interrupted func() bool) ([]byte, host.Status) {
	r, err := zlib.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, host.SerializationFailure
	}
	out, err := readHeld(p.deps.Host, pieces{r, interrupted}, maxInflated)
	defer p.deps.Host.Give(int64(cap(out)))
	switch {
	case errors.Is(err, errNoRoom), errors.Is(err, errInterrupted):
		return nil, host.InternalFailure
	case err != nil:
		return nil, host.SerializationFailure
	}
	return out, host.OK
}

// maxStateMessage is the largest message that sets a filter state, in bytes. Its value may have half
// of them, see state.
const maxStateMessage = 2 << 20

// setFilterState stores a value for the stream under its path. The property
// filter_state returns it. InternalFailure: the message is too large.
func (v *vm) setFilterState(ctx uint32, args []byte) host.Status {
	if len(args) > maxStateMessage {
		return host.InternalFailure
	}
	path, value, err := parseFilterState(args)
	f := v.stream(ctx)
	switch {
	case err != nil, path == "":
		return host.BadArgument
	case f == nil:
		return host.NotFound
	}
	return f.s.state.set(f, "filter_state\x00"+path, []byte(value))
}

// parseFilterState reads the message SetEnvoyFilterStateArguments: path = 1,
// value = 2, both strings, span = 3, an enum (Envoy api/envoy/data and
// source/extensions/common/wasm/ext/set_envoy_filter_state.proto). It ignores
// span: values always last as long as the stream.
func parseFilterState(b []byte) (path, value string, err error) {
	for len(b) > 0 {
		tag, n := binary.Uvarint(b)
		if n <= 0 {
			return "", "", errBadProto
		}
		b = b[n:]
		number, n := binary.Uvarint(b) // the value itself, or its length
		if n <= 0 {
			return "", "", errBadProto
		}
		b = b[n:]
		switch tag & 7 {
		case 0: // a number
			continue
		case 2: // bytes
		default:
			return "", "", errBadProto
		}
		if number > uint64(len(b)) {
			return "", "", errBadProto
		}
		switch tag >> 3 {
		case 1:
			path = string(b[:number])
		case 2:
			value = string(b[:number])
		}
		b = b[number:]
	}
	return path, value, nil
}
