package epp

import (
	"net/textproto"
	"slices"
	"strconv"
	"strings"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/sidecar/extproc"
)

// Within implements attempt.Gateway.
func (st *stream) Within() coordinator.Within {
	w := st.server.destinations.within(st.client.subset, st.client.limited)
	w.Prefill = st.rpc.within(w.Prefill)
	return w
}

// Forward implements attempt.Gateway.
func (st *stream) Forward(f *attempt.Forwarding) error {
	st.forwarded = true
	if st.rpc.reads() {
		f.Body = st.rpc.raw.B
		defer st.rpc.end()
	}
	endpoints := endpointsOf(f)
	st.chosen, _, _ = strings.Cut(endpoints, ",")
	of, body := fieldRequestHeaders, message(nil)
	if st.bodied && st.requestMode != filter.ProcessingMode_FULL_DUPLEX_STREAMED {
		of, body = fieldRequestBody, message(nil).with(3, message(f.Body).within(1)) // body_mutation
	}
	decision := decisionOn(of, st.mutation(f, endpoints), body, st.decided(f, endpoints))
	alone := of == fieldRequestBody || !st.bodied
	if err := st.send(!alone, decision); err != nil || alone {
		return err
	}
	for rest, over := f.Body, false; !over; {
		part := rest[:min(extproc.MaxPart, len(rest))]
		rest = rest[len(part):]
		over = len(rest) == 0
		if err := st.sendPart(!over || st.trailers, returned(fieldRequestBody, part, over && !st.trailers)); err != nil {
			return err
		}
	}
	if st.trailers {
		return st.send(false, answerTo(fieldRequestTrailers, nil))
	}
	return nil
}

// decisionOn is the answer to the message of that field that changes the header and the body: a
// CommonResponse (1) with header_mutation (2), body and clear_route_cache (5), and dynamic_metadata (8).
func decisionOn(of protowire.Number, lines, body, metadata message) message {
	const room = 32 // tags and lengths
	common := protowire.SizeTag(2) + protowire.SizeBytes(len(lines)) + len(body) + protowire.SizeTag(5) + protowire.SizeVarint(1)
	m := make(message, 0, len(lines)+len(body)+len(metadata)+room)
	m = appendHead(m, of-1, protowire.SizeTag(1)+protowire.SizeBytes(common))
	m = appendHead(m, 1, common).with(2, lines)
	return append(m, body...).number(5, 1).with(8, metadata)
}

// endpointsOf returns the endpoints for the gateway, best first, with commas.
func endpointsOf(f *attempt.Forwarding) string {
	var list []string
	for _, t := range append([]engine.Target{f.Decode}, f.Spare...) {
		if address, ok := t.Spec.GatewayEndpoint(); ok { // Within has no others
			list = append(list, address.String())
		}
	}
	return strings.Join(list, ",")
}

// mutation turns the header lines of the client into those of f. The result is a HeaderMutation.
func (st *stream) mutation(f *attempt.Forwarding, endpoints string) message {
	const room = 512
	m := make(message, 0, room)
	set := func(name, value string) {
		m = m.set(strings.ToLower(name), value, core.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD)
	}
	for _, name := range st.client.own {
		m = m.remove(name)
	}
	set(extproc.HeaderDestination, endpoints)
	if !f.Prefill.IsZero() {
		set(extproc.HeaderPrefill, f.Prefill.Spec.Address())
	}
	if len(f.Encoders) > 0 {
		set(extproc.HeaderEncoders, addressesOf(f.Encoders))
	}
	if st.bodied && !st.rpc.reads() {
		set("content-length", strconv.Itoa(len(f.Body)))
	}
	if path := st.pathOf(f); path != st.client.path && !st.rpc.reads() {
		set(":path", path)
	}
	lines := make(map[string][]string, len(f.Header))
	for _, line := range f.Header {
		name := textproto.CanonicalMIMEHeaderKey(line.Name)
		lines[name] = append(lines[name], line.Value)
	}
	for name, values := range lines {
		own := st.client.header[name]
		if name == "Content-Type" && own != nil && values[0] == jsonType {
			continue // the engine judges the client's type: a web page may send some types without asking
		}
		if !slices.Equal(values, own) {
			set(name, values[len(values)-1])
		}
	}
	for name := range st.client.header {
		if lines[name] == nil && (!downstream.Proxied(name) || name == "Content-Encoding") {
			m = m.remove(strings.ToLower(name))
		}
	}
	return m
}

const jsonType = "application/json"

// pathOf returns the path of the request with the client's prefix and query.
func (st *stream) pathOf(f *attempt.Forwarding) string {
	path := st.client.prefix + f.Path
	if f.Query != "" {
		path += "?" + f.Query
	}
	return path
}

// addressesOf returns the addresses of engines, with commas.
func addressesOf(list []engine.Target) string {
	var b []string
	for _, t := range list {
		b = append(b, t.Spec.Address())
	}
	return strings.Join(b, ",")
}
