package connector

import (
	"bytes"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Transfer parameters in an engine's answer go to other engines. These connect to the
// hosts and read the blocks that the parameters name, and some crash on a value of an
// unexpected type. So the proxy checks the parameters first.

// paramType is the type of a member of transfer parameters. Null means an absent member, except for
// a paramBool.
type paramType uint8

const (
	paramAny paramType = iota // a member that this package does not support
	paramBool
	paramText
	paramHost   // a string with a host
	paramHosts  // a string with a host, or a list of such strings
	paramCount  // an integer from 0
	paramInt    // an integer
	paramNumber // any number
	paramPort   // an integer from 1 to 65535
	paramDigits // a port as an integer or a string
	paramInts   // a list of integers
	paramList
	paramObject
	paramBlocks // see blockIDs
)

// paramTypes are the types of the members of vLLM's kv_transfer_params and TensorRT-LLM's
// disaggregated_params, at any depth. An engine tests some members by Python's truth
// rules, so a value of another type could be taken for true or false.
//
// Sources, in vLLM: distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py,
// push_scheduler.py (request_finished) and metadata.py, moriio/moriio_connector.py
// (request_finished; ports are strings if they are configured as strings),
// lmcache_integration/vllm_v1_adapter.py. In TensorRT-LLM: serve/openai_protocol.py,
// DisaggregatedParams (ctx_info_endpoint is a list in GET /server_info).
var paramTypes = map[string]paramType{
	"do_remote_prefill": paramBool, "do_remote_decode": paramBool,
	"remote_dp_rank_override": paramBool, "is_request_leader": paramBool,

	"remote_engine_id": paramText, "remote_request_id": paramText, "transfer_id": paramText,
	"transfer_mode": paramText, "kv_request_id": paramText, "request_type": paramText,
	"encoded_opaque_state": paramText, "conversation_id": paramText,

	"remote_host": paramHost, "remote_bootstrap_addr": paramHost,
	"ctx_info_endpoint": paramHosts, "remote_hosts": paramHosts,

	"tp_size": paramCount, "pp_size": paramCount, "dcp_size": paramCount, "pcp_size": paramCount,
	"remote_tp_size": paramCount, "remote_pp_size": paramCount, "remote_dp_size": paramCount,
	"remote_dp_size_local": paramCount, "remote_dp_rank": paramCount, "remote_num_tokens": paramCount,
	"remote_prefill_cached_tokens": paramCount, "remote_block_size": paramCount,
	"num_lmcache_extra_cached_tokens": paramCount,

	"ctx_request_id": paramInt, "disagg_request_id": paramInt, "ctx_dp_rank": paramInt,
	"schedule_style": paramInt, "first_tok": paramInt,
	"remote_blocks_expiry_time": paramNumber,

	"remote_port":           paramPort,
	"remote_handshake_port": paramDigits, "remote_notify_port": paramDigits,

	"first_gen_tokens": paramInts, "draft_tokens": paramInts, "first_token_ids": paramInts,
	"first_gen_log_probs": paramList, "first_gen_logits": paramList,
	"ctx_usage": paramObject, "remote_prefiller": paramObject, "remote_decoder": paramObject,
	"remote_kv_source": paramObject,
	"remote_block_ids": paramBlocks,
}

// firstBytes are the bytes with which a value of a type may begin, for the types without lists.
var firstBytes = [...]string{
	paramBool: "tf", paramText: `"`, paramHost: `"`, paramCount: digits, paramInt: "-" + digits,
	paramNumber: "-" + digits, paramPort: digits, paramDigits: `"` + digits, paramObject: "{",
}

const digits = "0123456789"

// fits reports whether a value that Walk passed has the type. lists is the number of
// arrays of the member that contain the value.
func (t paramType) fits(lists int, value []byte) bool {
	c := value[0]
	switch {
	case t == paramAny:
		return true
	case string(value) == "null":
		return t != paramBool && lists == 0
	case t == paramBlocks:
		return c == '[' && blockIDs(value)
	case t == paramList:
		return c == '[' || lists > 0
	case t == paramInts:
		return c == '[' && lists == 0 || lists == 1 && isInt(value)
	case t == paramHosts:
		return c == '[' && lists == 0 || lists <= 1 && c == '"'
	case lists > 0 || strings.IndexByte(firstBytes[t], c) < 0:
		return false
	case t == paramCount || t == paramInt:
		return isInt(value)
	case t == paramPort || t == paramDigits:
		return portOf(value) != 0
	}
	return true
}

// isInt reports whether a scanned value is a number without fraction and exponent.
func isInt(value []byte) bool { return len(bytes.Trim(value, "-"+digits)) == 0 }

// portOf returns the port in value, a number or a string; 0 if it is none.
func portOf(value []byte) int {
	if len(value) > 2 && value[0] == '"' {
		value = value[1 : len(value)-1]
	}
	n, ok := openai.Int64(value)
	if !ok || n < 1 || n > 65535 {
		return 0
	}
	return int(n)
}

// blockIDs reports whether raw begins with a list of block ids: integers from 0, flat
// or in one list for each cache group, or the strings of llm-d's simulator. raw must be
// valid JSON.
func blockIDs(raw []byte) bool {
	depth, flat, grouped := 0, false, false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case c == '[':
			depth++
			grouped = grouped || depth == 2
		case c == ']':
			if depth--; depth == 0 {
				return !flat || !grouped
			}
		case c-'0' <= 9:
			flat = flat || depth == 1
		case c == '"':
			for i++; i < len(raw) && raw[i] != '"'; i++ {
				if raw[i] == '\\' {
					i++
				}
			}
			flat = flat || depth == 1
		case c == ',' || c == ' ' || c == '\n' || c == '\t' || c == '\r':
		default: // anything else, also a sign, a fraction or an exponent
			return false
		}
		if depth > 2 {
			return false
		}
	}
	return false
}

// tokenIDs reports whether raw, which must be valid JSON, is a list of integers from 0,
// or a list of such lists.
func tokenIDs(raw []byte) bool {
	return raw[0] == '[' && blockIDs(raw) && bytes.IndexByte(raw, '"') < 0
}

// checkParams checks transfer parameters of holder's answer, which must have been scanned.
// err is about a member of another type than engines give it; it names the member, never
// a value. own reports whether peer reaches holder at each host, and whether each port is
// one of holder's if its ports are known. A nil holder owns nothing: then only the types
// are checked.
func checkParams(raw []byte, holder, peer *engine.Instance) (own bool, err error) {
	own = holder != nil
	c := openai.Cursor{Text: raw}
	c.Walk("", 0, func(key string, lists int, value []byte) bool {
		t := paramTypes[key]
		switch {
		case err != nil:
		case !t.fits(lists, value):
			err = badReply(strings.Clone(key) + " has a type that no engine gives it")
		case t == paramPort || t == paramDigits:
			own = own && (string(value) == "null" || holder.OwnsPort(portOf(value)))
		case own:
			if host, named := hostIn(key, t, value); named {
				own = holder.Owns(host, peer)
			}
		}
		return err == nil && t != paramBlocks
	})
	return own, err
}

// Sound reports whether transfer parameters in holder's answer may go to peer: they
// have an engine's types, and only hosts and ports of holder. params must have been
// scanned.
func Sound(holder, peer *engine.Instance, params []byte) bool {
	own, err := checkParams(params, holder, peer)
	return own && err == nil
}

// Hosts calls visit for each value, at any depth, that may be the host of a connection
// ([hostIn]). Hosts returns true if every visit returned true, and stops at the first
// visit that returned false. raw must be valid JSON.
func Hosts(key string, raw []byte, visit func(host string) bool) bool {
	all := true
	c := openai.Cursor{Text: raw}
	c.Walk(key, 0, func(key string, _ int, value []byte) bool {
		t := paramTypes[key]
		if host, named := hostIn(key, t, value); all && named {
			all = visit(host)
		}
		return all && !(t == paramBlocks && value[0] == '[' && blockIDs(value))
	})
	return all
}

// hostIn returns the host in a member's value; named is false if there is none. A host is
// a string under a key about hosts, or a string that can only be an address. A number
// under a key about hosts may also be an address: the host is then "".
func hostIn(key string, t paramType, value []byte) (host string, named bool) {
	c := value[0]
	number := c == '-' || c-'0' <= 9
	about := t == paramHost || t == paramHosts || t == paramAny && (number || c == '"') && aboutHosts(key)
	switch {
	case number:
		return "", about
	case c != '"' || !about && !bytes.ContainsAny(value, `:.\`): // such a string is never an address
		return "", false
	}
	text, _ := openai.String(value)
	if text == "" || !about && !isAddress(text) && (key != "remote_engine_id" || !hasPort(text)) {
		return "", false
	}
	if strings.ContainsAny(text, ":[]") { // otherwise it is a host alone
		text, _ = hostPort(text)
	}
	return text, true
}

// hasPort reports whether a string ends in a port: MoRI-IO's engine ids do, and other
// engines connect to them.
func hasPort(text string) bool {
	_, port := hostPort(text)
	return port > 0
}

// aboutHosts reports whether a member of that name holds hosts.
func aboutHosts(key string) bool {
	for i := range key {
		for _, word := range [...]string{"host", "addr", "endpoint", "url", "uri"} {
			if prefixFold(key[i:], word) {
				return true
			}
		}
	}
	return strings.EqualFold(key, "ip") || len(key) > 3 && prefixFold(key[len(key)-3:], "-ip")
}

// isAddress reports whether a string is an address whatever its key.
func isAddress(text string) bool {
	if strings.IndexByte(text, ':') < 0 && strings.IndexByte(text, '.') < 0 {
		return false
	}
	if _, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		return true
	}
	_, err := netip.ParseAddrPort(text)
	return err == nil || strings.Contains(text, "://")
}

// hostPort splits a host, host:port or URL.
func hostPort(text string) (host string, port int) {
	if _, rest, found := strings.Cut(text, "://"); found {
		text = rest
		if end := strings.IndexAny(text, "/?#\\"); end >= 0 {
			text = text[:end]
		}
		text = text[strings.LastIndexByte(text, '@')+1:]
	}
	if h, digits, err := net.SplitHostPort(text); err == nil {
		n, err := strconv.ParseUint(digits, 10, 16)
		if err != nil {
			return text, 0
		}
		return h, int(n)
	}
	return strings.Trim(text, "[]"), 0
}
