package moriio

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/tinylib/msgp/msgp"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// maxRanks and maxTP bound the sizes that are accepted.
const (
	maxRanks = 1024
	maxTP    = 1 << 16
)

var (
	errMessage = errors.New("read registration: not a map of names")
	errAddress = errors.New("read registration: no HTTP address")
	errMode    = errors.New("read registration: transfer_mode is neither READ nor WRITE")
	errRole    = errors.New("read registration: the role is neither P nor D")
	errSize    = errors.New("read registration: a size that cannot be")
)

// registration is the content of an engine's message.
//
// Since vLLM pull request 39565: type "P" or "D", http_address "ip:port", zmq_address
// "host:IP,handshake:PORT,notify:PORT". Before: type "register", role "P" or "D",
// request_address "http://ip:port/v1/completions", handshake_port, notify_port, and a
// counter index. Both: dp_size, tp_size, transfer_mode "READ" or "WRITE". Source: vLLM
// moriio_connector.py _start_heartbeat, and _ping before it.
type registration struct {
	kind, role             string // type, role
	http, request          string // http_address, request_address
	zmq, mode              string // zmq_address, transfer_mode
	handshake, notify      int
	ranks, tensorParallel  int
	hasRanks, notARegister bool
}

// readRegistration decodes a message. For a message of another kind it sets
// notARegister, and the other members are not meaningful.
func readRegistration(b []byte) (reg registration, err error) {
	if msgp.NextType(b) != msgp.MapType {
		return reg, errMessage
	}
	n, b, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return reg, errMessage
	}
	for ; n > 0; n-- {
		var key string
		if key, b, err = msgp.ReadStringBytes(b); err != nil {
			return reg, errMessage
		}
		if b, err = reg.member(key, b); err != nil {
			return reg, errMessage
		}
	}
	switch reg.kind {
	case "P", "D":
		reg.role = reg.kind
	case "register":
	default: // "HELLO", and unknown types
		reg.notARegister = true
	}
	return reg, nil
}

// member decodes one member of the map and returns the rest.
func (r *registration) member(key string, b []byte) ([]byte, error) {
	texts := map[string]*string{
		"type": &r.kind, "role": &r.role, "http_address": &r.http, "request_address": &r.request,
		"zmq_address": &r.zmq, "transfer_mode": &r.mode,
	}
	numbers := map[string]*int{
		"handshake_port": &r.handshake, "notify_port": &r.notify, "dp_size": &r.ranks, "tp_size": &r.tensorParallel,
	}
	text, number := texts[key], numbers[key]
	r.hasRanks = r.hasRanks || key == "dp_size"
	switch kind := msgp.NextType(b); {
	case text != nil && kind == msgp.StrType:
		s, rest, err := msgp.ReadStringBytes(b)
		*text = s
		return rest, err
	case number != nil && (kind == msgp.IntType || kind == msgp.UintType):
		n, rest, err := msgp.ReadInt64Bytes(b)
		*number = int(min(max(n, -1), 1<<31-1))
		return rest, err
	case number != nil && kind == msgp.StrType: // ports that are configured as text
		s, rest, err := msgp.ReadStringBytes(b)
		if err == nil {
			if *number, err = strconv.Atoi(s); err != nil {
				return nil, err
			}
		}
		return rest, err
	}
	return msgp.Skip(b)
}

// engine returns the engine that the registration describes.
func (r *registration) engine() (config.Engine, error) {
	e := config.DefaultEngine()
	switch r.role {
	case "P":
		e.Role = config.RolePrefill
	case "D":
		e.Role = config.RoleDecode
	default:
		return e, errRole
	}
	switch strings.ToUpper(r.mode) {
	case "READ":
		e.Connector = config.ConnectorVLLMMoRIIORead
	case "WRITE":
		e.Connector = config.ConnectorVLLMMoRIIO
	case "":
		return e, r.withoutMode()
	default:
		return e, errMode
	}
	address, err := r.address()
	if err != nil {
		return e, err
	}
	e.URL = "http://" + address
	e.Name = e.Role + "@" + strings.NewReplacer("[", "", "]", "").Replace(address)
	kv, err := r.kvAddress(address)
	if err != nil {
		return e, fmt.Errorf("read registration: address of the KV transfer: %w", err)
	}
	e.KVAddress = kv.String()
	if err := e.CheckKVAddress(); err != nil {
		return e, fmt.Errorf("read registration: address of the KV transfer: %w", err)
	}
	if r.hasRanks {
		e.Ranks = r.ranks
	}
	e.TPSize = r.tensorParallel
	if e.Ranks < 1 || e.Ranks > maxRanks || e.TPSize < 0 || e.TPSize > maxTP {
		return e, errSize
	}
	if err := e.Check(); err != nil {
		return e, fmt.Errorf("read registration: %w", err)
	}
	return e, nil
}

// withoutMode returns why a registration without transfer_mode is refused. One without sizes too is
// that of a P2pNcclConnector (vLLM before pull request 44854, p2p_nccl_engine.py, ping).
func (r *registration) withoutMode() error {
	if r.hasRanks || r.kind == "register" {
		return errMode
	}
	address, err := r.address()
	if err != nil {
		return err
	}
	return fmt.Errorf("read registration: engine %s: connector %w", address, config.RetiredConnector("vllm-p2p-nccl"))
}

// address returns the host and port of the engine's API.
func (r *registration) address() (string, error) {
	address := r.http
	if address == "" {
		u, err := url.Parse(r.request)
		if err != nil || u.Scheme != "http" || u.User != nil {
			return "", errAddress
		}
		address = u.Host
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil { // an IPv6 address without brackets
		i := strings.LastIndexByte(address, ':')
		if i < 0 {
			return "", errAddress
		}
		host, port = address[:i], address[i+1:]
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return "", errAddress
	}
	// Both addresses accept the same hosts and ports.
	at, err := config.ParseKVAddress(config.KVAddress{Host: host, Handshake: n, Notify: n}.String())
	if err != nil {
		return "", errAddress
	}
	return net.JoinHostPort(at.Host, strconv.Itoa(at.Handshake)), nil
}

// kvAddress returns the address of the KV transfer of the engine at address.
func (r *registration) kvAddress(address string) (config.KVAddress, error) {
	text := r.zmq
	if r.kind == "register" {
		host, _, _ := net.SplitHostPort(address)
		text = config.KVAddress{Host: host, Handshake: r.handshake, Notify: r.notify}.String()
	}
	kv, err := config.ParseKVAddress(text)
	if err == nil && kv.IsZero() {
		err = errors.New("there is none")
	}
	return kv, err
}
