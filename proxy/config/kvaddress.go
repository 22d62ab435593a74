package config

import (
	"errors"
	"strconv"
	"strings"
)

// KVAddress is the address of the KV transfer of vLLM's MoRIIOConnector for an engine's
// peers. Its text form is the one that engines register and read from request ids:
// "host:10.0.0.5,handshake:6301,notify:61005". Source: vLLM
// distributed/kv_transfer/kv_connector/v1/moriio/moriio_common.py
// parse_moriio_zmq_address.
type KVAddress struct {
	Host      string // IP address or name, IPv6 without brackets
	Handshake int    // handshake port of rank 0
	Notify    int    // port of rank 0 of the notifications
}

// IsZero reports whether no address is known.
func (a KVAddress) IsZero() bool { return a == KVAddress{} }

// String returns the text of a; "" for the zero value.
func (a KVAddress) String() string { return string(a.Append(nil)) }

// Append appends the text of a.
func (a KVAddress) Append(dst []byte) []byte {
	if a.IsZero() {
		return dst
	}
	dst = append(append(dst, "host:"...), a.Host...)
	dst = strconv.AppendInt(append(dst, ",handshake:"...), int64(a.Handshake), 10)
	return strconv.AppendInt(append(dst, ",notify:"...), int64(a.Notify), 10)
}

var errKVAddress = errors.New("want host:HOST,handshake:PORT,notify:PORT")

// ParseKVAddress parses the text of an address. The parts may have any order; parts
// with other names are ignored, as in the engines. "" is the zero value.
func ParseKVAddress(text string) (KVAddress, error) {
	var a KVAddress
	if text == "" {
		return a, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(part, ":")
		value = strings.TrimSpace(value)
		var err error
		switch strings.TrimSpace(name) {
		case "host":
			a.Host = strings.TrimSuffix(strings.TrimPrefix(value, "["), "]")
		case "handshake":
			a.Handshake, err = strconv.Atoi(value)
		case "notify":
			a.Notify, err = strconv.Atoi(value)
		}
		if err != nil {
			return KVAddress{}, errKVAddress
		}
	}
	if a.Host == "" || !validHost(a.Host) || !isPort(a.Handshake) || !isPort(a.Notify) {
		return KVAddress{}, errKVAddress
	}
	return a, nil
}

func isPort(n int) bool { return n > 0 && n < 1<<16 }
