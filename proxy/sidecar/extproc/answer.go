package extproc

import (
	"bytes"
	"errors"
	"slices"
	"strings"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	service "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"golang.org/x/net/http/httpguts"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// The header lines by which a picker names endpoints.
const (
	HeaderDestination = "x-gateway-destination-endpoint"
	HeaderPrefill     = "x-prefiller-host-port"
	HeaderEncoders    = "x-encoder-hosts-ports"
)

// The metadata of the endpoint picker protocol: namespaces and keys.
const (
	LBSpace     = "envoy.lb"
	ServedKey   = "x-gateway-destination-endpoint-served"
	SubsetSpace = "envoy.lb.subset_hint"
	SubsetKey   = "x-gateway-destination-endpoint-subset"
)

// maxEndpoints is the largest number of endpoints in one list, and maxEndpoint the largest length
// of one, in bytes. Others are ignored.
const (
	maxEndpoints = 32
	maxEndpoint  = 300
)

// Decision is the choice of a picker.
type Decision struct {
	Destinations []string // for the request, best first
	Prefill      []string // for the prompt, if other endpoints compute it
	Encoders     []string // for images and sounds
	Header       HeaderMutation
	// Body is the changed body, if Changed is set.
	Body    []byte
	Changed bool
	Refusal *Refusal // nil: the request is to be sent
}

// Refusal is the answer of the picker itself, which takes the place of an engine's.
type Refusal struct {
	Status int // 200 to 599
	Header HeaderMutation
	Body   []byte
}

// HeaderMutation changes header lines. It contains no pseudo-header, no line that names
// endpoints, and no text that is not allowed in a line.
type HeaderMutation struct {
	Remove []string // names in lower case, removed first
	Set    []SetLine
}

// SetLine adds or replaces a line. The name is in lower case.
type SetLine struct {
	upstream.Field
	Action Action
}

// Action is what SetLine does if the line exists, or does not exist.
type Action uint8

// The actions of Envoy's HeaderValueOption.
const (
	Append       Action = iota // adds a line in any case
	AddIfAbsent                // adds a line if there is none
	Overwrite                  // replaces all lines, or adds one
	OverwriteOld               // replaces all lines if there is one
)

// answer reads the messages of a picker up to its decision.
type answer struct {
	original []byte // the body of the request
	most     int    // size of a changed body, in bytes
	reserve  func(n int) error
	decision Decision

	headSeen bool
	same     int    // bytes of the returned body that are those of original
	changed  []byte // the returned body, once it differs from original; nil: it does not
}

// Errors of a picker's messages.
var (
	errNoHead   = &Error{Reason: BadAnswer, err: errors.New("the answer to the body came before that to the header")}
	errOrder    = &Error{Reason: BadAnswer, err: errors.New("a message does not belong there")}
	errTooLarge = &Error{Reason: BadAnswer, err: errors.New("the changed body is larger than server.max_body")}
	errStatus   = &Error{Reason: BadAnswer, err: errors.New("the status of the immediate response is none")}
)

// take reads one message. It reports whether the decision is complete. A picker may send the
// answer to the header when it has read the whole body; answers to the body follow.
func (a *answer) take(m *service.ProcessingResponse) (over bool, err error) {
	a.metadata(m.GetDynamicMetadata())
	switch r := m.GetResponse().(type) {
	case *service.ProcessingResponse_ImmediateResponse:
		return a.refused(r.ImmediateResponse)
	case *service.ProcessingResponse_RequestHeaders:
		return a.head(r.RequestHeaders.GetResponse())
	case *service.ProcessingResponse_RequestBody:
		return a.body(r.RequestBody.GetResponse())
	case *service.ProcessingResponse_RequestTrailers:
		if !a.headSeen {
			return false, errNoHead
		}
		a.finish()
		return true, nil
	case nil: // metadata alone, or an extension of a time limit that the proxy does not grant
		if m.GetDynamicMetadata() != nil || m.GetOverrideMessageTimeout() != nil {
			return false, nil
		}
	}
	return false, errOrder
}

// head reads the answer to the header of the request.
func (a *answer) head(c *service.CommonResponse) (over bool, err error) {
	if a.headSeen {
		return false, errOrder
	}
	a.headSeen = true
	a.mutate(c.GetHeaderMutation())
	if c.GetStatus() == service.CommonResponse_CONTINUE_AND_REPLACE {
		if err := a.part(c.GetBodyMutation().GetBody()); err != nil {
			return false, err
		}
		a.finish()
		return true, nil
	}
	return len(a.original) == 0, nil
}

// body reads an answer to a part of the body.
func (a *answer) body(c *service.CommonResponse) (over bool, err error) {
	if !a.headSeen {
		return false, errNoHead
	}
	a.mutate(c.GetHeaderMutation())
	switch b := c.GetBodyMutation().GetMutation().(type) {
	case *service.BodyMutation_StreamedResponse:
		if err := a.part(b.StreamedResponse.GetBody()); err != nil {
			return false, err
		}
		if !b.StreamedResponse.GetEndOfStream() {
			return false, nil
		}
	case *service.BodyMutation_Body: // of a picker that answers as in BUFFERED mode
		if err := a.part(b.Body); err != nil {
			return false, err
		}
	case nil: // the body stays as it is
		if a.same == 0 && a.changed == nil {
			return true, nil
		}
		return false, errOrder
	default:
		return false, errOrder
	}
	a.finish()
	return true, nil
}

// part adds a part of the returned body. It takes memory only for a body that differs from the
// original.
func (a *answer) part(p []byte) error {
	if a.changed == nil && bytes.HasPrefix(a.original[a.same:], p) {
		a.same += len(p)
		return nil
	}
	have := max(a.same, len(a.changed))
	if have+len(p) > a.most {
		return errTooLarge
	}
	more := len(p)
	if a.changed == nil {
		more += a.same
	}
	if a.reserve != nil {
		if err := a.reserve(more); err != nil {
			return err
		}
	}
	if a.changed == nil {
		a.changed = append(make([]byte, 0, more), a.original[:a.same]...)
	}
	a.changed = append(a.changed, p...)
	return nil
}

// finish ends the returned body.
func (a *answer) finish() {
	switch {
	case a.changed != nil:
		a.decision.Body, a.decision.Changed = a.changed, true
	case a.same < len(a.original):
		a.decision.Body, a.decision.Changed = bytes.Clone(a.original[:a.same]), true
	}
}

// endsUnchanged reports whether the decision is complete if the stream ends now: the picker has
// chosen by the header alone.
func (a *answer) endsUnchanged() bool {
	return a.headSeen && len(a.decision.Destinations) > 0 && a.same == 0 && a.changed == nil
}

// refused reads the answer that the picker gives itself.
func (a *answer) refused(r *service.ImmediateResponse) (over bool, err error) {
	status := int(r.GetStatus().GetCode())
	if status < 200 || status > 599 {
		return false, errStatus
	}
	a.decision.Refusal = &Refusal{Status: status, Header: mutationOf(r.GetHeaders()), Body: r.GetBody()}
	return true, nil
}

// metadata reads the destinations from dynamic metadata. Those of a header line come first.
func (a *answer) metadata(m *structpb.Struct) {
	if text := m.GetFields()[LBSpace].GetStructValue().GetFields()[HeaderDestination].GetStringValue(); text != "" && a.decision.Destinations == nil {
		a.decision.Destinations = endpoints(nil, text)
	}
}

// mutate reads a change of the request's header lines. Lines that name endpoints are for this
// proxy.
func (a *answer) mutate(m *service.HeaderMutation) {
	named := false
	for _, option := range m.GetSetHeaders() {
		name, value := strings.ToLower(option.GetHeader().GetKey()), valueOf(option.GetHeader())
		switch name {
		case HeaderDestination:
			if !named { // the line takes precedence over metadata
				a.decision.Destinations, named = nil, true
			}
			a.decision.Destinations = endpoints(a.decision.Destinations, value)
		case HeaderPrefill:
			a.decision.Prefill = endpoints(a.decision.Prefill, value)
		case HeaderEncoders:
			a.decision.Encoders = endpoints(a.decision.Encoders, value)
		}
	}
	more := mutationOf(m)
	a.decision.Header.Remove = append(a.decision.Header.Remove, more.Remove...)
	a.decision.Header.Set = append(a.decision.Header.Set, more.Set...)
}

// mutationOf reads a change of header lines, without the lines that a HeaderMutation does not
// contain.
func mutationOf(m *service.HeaderMutation) (h HeaderMutation) {
	for _, name := range m.GetRemoveHeaders() {
		if name = strings.ToLower(name); allowedName(name) {
			h.Remove = append(h.Remove, name)
		}
	}
	for _, option := range m.GetSetHeaders() {
		name, value := strings.ToLower(option.GetHeader().GetKey()), valueOf(option.GetHeader())
		if !allowedName(name) || !httpguts.ValidHeaderFieldValue(value) {
			continue
		}
		h.Set = append(h.Set, SetLine{upstream.Field{Name: name, Value: value}, actionOf(option)})
	}
	return h
}

func actionOf(o *core.HeaderValueOption) Action {
	switch o.GetAppendAction() {
	case core.HeaderValueOption_ADD_IF_ABSENT:
		return AddIfAbsent
	case core.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD:
		return Overwrite
	case core.HeaderValueOption_OVERWRITE_IF_EXISTS:
		return OverwriteOld
	}
	//lint:ignore SA1019 pickers still set the old field; without it Envoy's ext_proc replaces
	if a := o.GetAppend(); a == nil || !a.GetValue() {
		return Overwrite
	}
	return Append
}

// allowedName reports whether a picker may change the lines of that name in lower case.
func allowedName(name string) bool {
	switch name {
	case "host", "connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
		"content-length", "content-encoding", HeaderDestination, HeaderPrefill, HeaderEncoders:
		return false
	}
	return httpguts.ValidHeaderFieldName(name) // a pseudo-header is none
}

// valueOf returns the value of a header line.
func valueOf(h *core.HeaderValue) string {
	if raw := h.GetRawValue(); len(raw) > 0 {
		return string(raw)
	}
	return h.GetValue()
}

// endpoints appends the endpoints of a text with commas to list, each once.
func endpoints(list []string, text string) []string {
	for one := range strings.SplitSeq(text, ",") {
		if one = strings.TrimSpace(one); one == "" || len(one) > maxEndpoint || len(list) == maxEndpoints || slices.Contains(list, one) {
			continue
		}
		list = append(list, one)
	}
	return list
}
