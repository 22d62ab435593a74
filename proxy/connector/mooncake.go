package connector

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// mooncake is vLLM's MooncakeConnector. Both legs run at once. Decode gets the addresses
// of prefill's workers from prefill's bootstrap server, by the id of prefill's engine
// core. Decode sends these workers the list of blocks that it has allocated. When prefill
// has computed the prompt, it writes into these blocks. A transfer id identifies the two
// legs. Prefill's answer says nothing about the transfer.
//
// Sources, in vLLM: distributed/kv_transfer/kv_connector/v1/mooncake/
// (mooncake_connector.py update_state_after_alloc and request_finished for the fields
// and for when blocks are freed, mooncake_utils.py for the bootstrap server),
// examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py.
type mooncake struct {
	nixl // same routes and same unpairable forms as every vLLM engine
}

// queryPath is the path at which a bootstrap server lists the engine cores.
const queryPath = "/query"

func (mooncake) Name() string   { return "vllm-mooncake" }
func (mooncake) Flow() abi.Flow { return abi.FlowConcurrent }

// RegistryPath returns a path only for engines that can be prefill.
func (mooncake) RegistryPath(role abi.Role) string {
	if role&abi.RolePrefill == 0 {
		return ""
	}
	return queryPath
}

// RegistryProbed: a decode leg with the id of an engine core that no longer exists keeps
// its blocks until a time-out. In releases before autumn 2026 it keeps them permanently.
func (mooncake) RegistryProbed() bool { return true }

// ReadFacts reads the bootstrap server's list, {"<dp rank>": {"engine_id": …,
// "worker_addr": {"<tp rank>": {"<pp rank>": …}}}}, and the facts of every vLLM engine.
// The whole list is the epoch: ids may be configured, but the workers' ports change
// with each process.
func (m mooncake) ReadFacts(f *engine.Facts, path string, status int, body []byte) error {
	if path == metricsPath && status/100 == 2 {
		f.Epoch = processStart(body) // for prefill the query replaces it
	}
	if path != queryPath {
		return m.nixl.ReadFacts(f, path, status, body)
	}
	if status/100 != 2 {
		return fmt.Errorf("read facts: %s answered with status %d", path, status)
	}
	var ranks openai.Object
	if err := ranks.Parse(body); err != nil {
		return fmt.Errorf("read facts: %s: no JSON object", path)
	}
	for {
		entry, ok := ranks.Get(strconv.Itoa(len(f.EngineIDs)))
		if !ok {
			break
		}
		var core openai.Object
		if core.Parse(entry) != nil || textOf(&core, "engine_id") == "" {
			return fmt.Errorf("read facts: %s: an entry without engine_id", path)
		}
		f.EngineIDs = append(f.EngineIDs, textOf(&core, "engine_id"))
		if workers, _ := core.Get("worker_addr"); f.TPSize == 0 {
			f.TPSize = countMembers(workers)
		}
	}
	if len(f.EngineIDs) == 0 {
		return errors.New("read facts: " + path + ": no engine has registered yet")
	}
	f.DPSize = len(f.EngineIDs)
	f.Epoch = string(body)
	return nil
}

// countMembers counts the members of a JSON object.
func countMembers(raw []byte) (n int) {
	var o openai.Object
	if o.Parse(raw) == nil {
		for range o.Members {
			n++
		}
	}
	return n
}

// Compatible requires equal block sizes and types, and one tensor-parallel size that is a
// multiple of the other. Otherwise decode would wait without end. Sources:
// mooncake_connector.py _validate_asymmetric_region_lengths and _get_tp_ratio.
func (mooncake) Compatible(p, d *engine.Facts) error {
	switch {
	case p.KVCacheType != "" && d.KVCacheType != "" && p.KVCacheType != d.KVCacheType:
		return fmt.Errorf("KV cache types differ: prefill %s, decode %s", p.KVCacheType, d.KVCacheType)
	case p.PageSize != 0 && d.PageSize != 0 && p.PageSize != d.PageSize:
		return fmt.Errorf("block sizes differ: prefill %d, decode %d", p.PageSize, d.PageSize)
	}
	return moriio{}.Compatible(p, d)
}

// Defers: prefill waits for a decode engine that has not yet named its blocks, until
// VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (mooncake_connector.py).
func (mooncake) Defers() bool { return true }

// Prefill requests one token, as NIXL's leg does. The leg must end by the limit of
// tokens: otherwise prefill keeps no block (request_finished). The leg names the rank if
// the engine has several, because decode gets the id of one rank's core.
func (m mooncake) Prefill(a *Attempt, dst []byte) (Leg, error) {
	b := append(make([]byte, 0, 160), `{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":`...)
	leg, err := vllmPrefill(a, a.LegID, dst, append(openai.AppendQuoted(b, m.transferID(a)), '}'))
	if a.Prefill.Spec.Ranks <= 1 && a.Prefill.Facts().DPSize > 1 {
		leg.Header = append(leg.Header, rankField(a.Prefill.Rank))
	}
	return leg, err
}

// transferID is the id of the transfer in both legs of an attempt.
func (mooncake) transferID(a *Attempt) string { return "xfer-" + a.LegID }

// ReadPrefill finds out whether prefill has kept its blocks. The only sign is the
// reason why the text ended.
func (mooncake) ReadPrefill(a *Attempt, body []byte) (Handoff, error) {
	if _, _, err := transferParams(body, nil, nil); err != nil {
		return Handoff{}, err
	}
	reason, found := openai.Find(body, "choices", "0", "finish_reason")
	if !found {
		reason, found = openai.Find(body, "stop_reason") // in an answer of /v1/messages
	}
	if !found {
		reason, found = openai.Find(body, "status") // in an answer of /v1/responses, whose reason some releases hide
	}
	if !found || !openai.IsNull(reason) && reason[0] != '"' {
		return Handoff{}, badReply("no reason for its end")
	}
	if h, ended := endedAtOnce(a, body); ended {
		return h, nil
	}
	switch s, _ := openai.String(reason); s {
	case "stop", "end_turn", "stop_sequence", "abort", "error", "failed", "cancelled":
		return Handoff{}, badReply("ended otherwise than by the limit of tokens, which keeps no KV")
	}
	return Handoff{Pinned: true}, nil
}

// Decode is the client's request with its own limit of tokens: decode generates the
// first token again.
func (m mooncake) Decode(a *Attempt, _ *Handoff, dst []byte) (Leg, error) {
	params, err := m.decodeParams(a)
	if err != nil {
		return Leg{}, err
	}
	return vllmDecode(a, a.LegID, dst, params)
}

// decodeParams names prefill's address. The address comes from a registered engine or
// its configuration, never from a client.
func (m mooncake) decodeParams(a *Attempt) ([]byte, error) {
	ids := a.Prefill.Facts().EngineIDs
	if a.Prefill.Rank >= len(ids) {
		return nil, errNoEngineID
	}
	address := "http://" + bootstrapHost(a.Prefill) + ":" + strconv.Itoa(bootstrapPort(a.Prefill))
	b := make([]byte, 0, 320)
	b = append(b, `{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":`...)
	b = openai.AppendQuoted(b, address)
	b = openai.AppendQuoted(append(b, `,"remote_engine_id":`...), ids[a.Prefill.Rank])
	b = openai.AppendQuoted(append(b, `,"transfer_id":`...), m.transferID(a))
	return append(b, '}'), nil
}

var errNoEngineID = errors.New("prefill's engine id is not known")

// Reclaims: a prefill leg that is not aborted either writes the KV for which decode
// waits, or keeps blocks that Cleanup frees. After an aborted prefill leg, decode would
// wait.
func (mooncake) Reclaims() bool { return true }

// Cleanup sends a decode engine a request that names the transfer and that the engine rejects. The
// engine then informs prefill that decode does not need the blocks (request_finished,
// _with_kv_transfer_rejection_cleanup).
//
// The call is correct only for blocks that prefill certainly holds. For a transfer that
// prefill does not know, or no longer knows, the call blocks one of prefill's few senders
// for minutes. So a decode engine that has the leg must have failed. Otherwise the
// engines finish the transfer without a call: when its connection closes, decode cancels
// a transfer that was not scheduled, and reads any other. If decode's process ends before
// that, prefill's blocks stay until their time-out. In that case the proxy sends the same
// rejected request as soon as it finds that decode has restarted: the new process cannot
// be waiting for the transfer.
//
// If prefill failed, no engine writes the KV: decode's blocks stay until their time-out,
// and the proxy counts this case.
func (m mooncake) Cleanup(a *Attempt, o Orphan) []Cleanup {
	held := o.PrefillDone && o.Handoff != nil && o.Handoff.Pinned
	waits := o.DecodeSent && !o.DecodeFailed
	switch {
	case a.Prefill.IsZero() || o.KVRead:
		return nil
	case waits && !held:
		return []Cleanup{{Phase: abi.Decode, How: "engine_timeout"}}
	case !held && (!o.PrefillSent || o.PrefillDone || o.Refused):
		return nil
	case !held:
		return []Cleanup{{Phase: abi.Prefill, How: "engine_timeout"}}
	}
	params, err := m.decodeParams(a)
	if err != nil {
		return nil
	}
	call := refusedDecode(a, params)
	call.Hold = mooncakeHold
	if waits {
		call.Restarted = true
		return []Cleanup{{Phase: abi.Prefill, How: "engine_timeout"}, call}
	}
	return []Cleanup{call}
}

// mooncakeHold is how long prefill holds blocks that no engine reads: the default of
// VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT. Source: vLLM, envs.py.
const mooncakeHold = 480 * time.Second
