package connector

import (
	"net"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Generation first: decode's leg is sent before prefill's. The generation worker opens
// its receiving side at once, at the address that the context worker publishes in GET
// /server_info. The context worker does not begin before the generation worker has
// contacted it. Both tokenize the prompt themselves. The first token and prefill's
// usage are transferred with the KV, and prefill's answer is dropped.
//
// Sources, in TensorRT-LLM: serve/openai_disagg_service.py
// (_send_disagg_request_gen_first, _get_gen_request),
// _torch/disaggregation/transceiver.py (get_disaggregated_params for the content of
// /server_info, prepare_context_requests for the wait).

// The values of schedule_style, an IntEnum.
const (
	contextFirstStyle    = "0"
	generationFirstStyle = "1"
)

// style returns the schedule_style of an attempt's legs.
func style(a *Attempt) string {
	if a.Flow == abi.FlowDecodeFirst {
		return generationFirstStyle
	}
	return contextFirstStyle
}

// Order returns generation first if the style requires it, or with style "" if the
// engines support it. Engines with the fields of the first wire generation do not support
// it. Neither does a prefill engine that publishes no address, as with the C++
// transceiver.
func (t trtllm) Order(a *Attempt, style string) (flow abi.Flow, fallback string) {
	where := a.Prefill.Facts().Rendezvous
	can := where != "" && wire(a.Prefill) != wireG1 && wire(a.Decode) != wireG1
	if can {
		endpoint, _, _ := openai.Lookup([]byte("{"+where+"}"), "ctx_info_endpoint")
		can = ownEndpoint(a, endpoint)
	}
	switch {
	case style == "context_first", style == "" && !can:
		return t.Flow(), ""
	case !can:
		return t.Flow(), "no_rendezvous"
	}
	return abi.FlowDecodeFirst, ""
}

// ownEndpoint reports whether the endpoint that a context worker names, or each
// endpoint of a list, is a host at which prefill is known to be. The opaque state
// cannot be checked here: its signature protects it.
func ownEndpoint(a *Attempt, endpoint []byte) bool {
	if openai.IsNull(endpoint) {
		return true
	}
	if list, err := openai.Elements(endpoint); err == nil {
		for one := range list {
			if !ownEndpoint(a, one) {
				return false
			}
		}
		return true
	}
	address, ok := openai.String(endpoint)
	if _, rest, found := strings.Cut(address, "://"); found {
		address = rest
	}
	host, _, err := net.SplitHostPort(address)
	return ok && err == nil && a.Prefill.Owns(host, a.Decode.Instance)
}

// rendezvous reads the params that a context worker publishes. If an endpoint is a
// list, the first entry counts, as in upstream's orchestrator. Members that an
// orchestrator sets for each request are ignored.
func rendezvous(info *openai.Object) string {
	raw, _ := info.Get("disaggregated_params")
	var params openai.Object
	if !isObject(raw) || params.Parse(raw) != nil {
		return ""
	}
	var members []byte
	found := false
	for key, value := range params.Members {
		switch key {
		case "request_type", "disagg_request_id", "ctx_request_id", "schedule_style", "conversation_id", "first_gen_tokens":
			continue
		case "ctx_info_endpoint":
			if first, ok, err := openai.Lookup(value, "0"); err == nil && ok {
				value = first
			}
		}
		if openai.IsNull(value) {
			continue
		}
		found = found || key == "ctx_info_endpoint" || key == "encoded_opaque_state"
		members = append(openai.AppendQuoted(append(members, ','), key), ':')
		members = append(members, value...)
	}
	if !found {
		return ""
	}
	return string(members[1:])
}

// generationFirst builds the decode leg of an attempt whose prefill leg has not been
// sent: the client's request, the id in both of its roles, and the address of the
// context worker.
func generationFirst(a *Attempt, dst []byte) Leg {
	where := a.Prefill.Facts().Rendezvous
	params := make([]byte, 0, 192+len(where))
	params = append(params, `{"request_type":"generation_only","ctx_request_id":`...)
	params = strconv.AppendUint(params, a.ID, 10)
	params = append(params, `,"disagg_request_id":`...)
	params = strconv.AppendUint(params, a.ID, 10)
	params = append(params, `,"schedule_style":`+generationFirstStyle+`,`...)
	params = append(append(params, where...), '}')
	prompt, _ := lone(a.Request)
	edits := [editRoom]openai.Edit{
		{Key: "disaggregated_params", Value: params},
		{Key: "prompt", Value: prompt},
		modelNamed(a),
		conversationNamed(a, a.Decode),
	}
	return finished(a, signed(a, spliced(a, dst, edits[:4]), params))
}

// readSecond checks prefill's answer when decode is already running: it must belong to
// this transfer. The transfer is in progress for every finish reason.
func readSecond(a *Attempt, choices []byte) (Handoff, error) {
	params, ok, err := openai.Lookup(choices, "0", "disaggregated_params")
	if err != nil || !ok || !isObject(params) {
		return Handoff{}, badReply("no disaggregated_params")
	}
	if _, err := checkParams(params, nil, nil); err != nil {
		return Handoff{}, err
	}
	id, _ := openai.Find(params, "disagg_request_id")
	if !openai.IsNull(id) && string(id) != strconv.FormatUint(a.ID, 10) {
		return Handoff{}, badReply("disagg_request_id of another transfer")
	}
	return Handoff{Pinned: true}, nil
}
