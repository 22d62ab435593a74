package core

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// KVEventsConfig configures how an engine publishes the events of its prefix cache, as
// --kv-events-config does for vLLM and SGLang. TensorRT-LLM always answers POST
// /kv_cache_events.
type KVEventsConfig struct {
	// Endpoint is the address of rank 0's PUB socket: "tcp://host:port" or
	// "tcp://*:port"; rank r listens on port+r. Port 0 takes consecutive
	// ephemeral ports, and "tcp://*:0" any ephemeral port for each rank, as in vLLM.
	// Empty, the default: nothing is published. The real
	// engines connect to a host that is not a wildcard; the simulator always
	// listens.
	Endpoint string
	// Replay is the address of rank 0's ROUTER socket for replays, in the same
	// form.
	Replay string
	// Loads is the address of rank 0's PUB socket for loads, in the same form: SGLang's
	// --load-publish-endpoint.
	Loads string
	// Topic is the first frame of every batch.
	Topic string
	// Arrays makes vLLM's events arrays, as before 2026-06-09, and not maps.
	// SGLang's events are always arrays.
	Arrays bool
	// DigestHashes is VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0: vLLM's block hashes
	// are digests of 32 bytes instead of integers.
	DigestHashes bool
	// PlainReplay leaves the topic out of vLLM's replays, as before 2026-07-07.
	// SGLang always leaves it out.
	PlainReplay bool
}

// check rejects endpoints on which it is impossible to listen.
func (c KVEventsConfig) check(connector string) error {
	if c.Replay != "" && c.Endpoint == "" {
		return fmt.Errorf("config kv events: a replay without an endpoint")
	}
	if c.Loads != "" && (c.Endpoint == "" || connector != ConnectorSGLang) {
		return fmt.Errorf("config kv events: only sglang publishes loads, with an endpoint for KV events")
	}
	if c.Endpoint != "" && connector == ConnectorTRTLLM {
		return fmt.Errorf("config kv events: trtllm has no publisher; its events are at POST /kv_cache_events")
	}
	for _, endpoint := range []string{c.Endpoint, c.Replay, c.Loads} {
		if endpoint == "" {
			continue
		}
		if _, _, err := SplitEndpoint(endpoint); err != nil {
			return fmt.Errorf("config kv events: %w", err)
		}
	}
	return nil
}

// SplitEndpoint returns the host and port of a tcp endpoint. The host of a
// wildcard is empty.
func SplitEndpoint(endpoint string) (host string, port int, err error) {
	address, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", 0, fmt.Errorf("endpoint %q: not tcp://host:port", endpoint)
	}
	host, digits, err := net.SplitHostPort(address)
	if err != nil {
		return "", 0, fmt.Errorf("endpoint %q: not tcp://host:port", endpoint)
	}
	if port, err = strconv.Atoi(digits); err != nil || port < 0 || port > 65535 {
		return "", 0, fmt.Errorf("endpoint %q: no such port", endpoint)
	}
	if host == "*" {
		host = ""
	}
	return host, port, nil
}

// listenAttempts is the number of tries to find consecutive ephemeral ports.
const listenAttempts = 64

// ListenRow listens on n consecutive ports. The endpoint names the first one.
func ListenRow(endpoint string, n int) ([]net.Listener, error) {
	host, port, err := SplitEndpoint(endpoint)
	if err != nil {
		return nil, err
	}
	for attempt := 1; ; attempt++ {
		row, err := listenFrom(host, port, n)
		if err == nil || port != 0 || attempt == listenAttempts {
			return row, err
		}
	}
}

// listenRanks listens for n ranks: on consecutive ports, or for vLLM's "tcp://*:0" on any.
func listenRanks(endpoint string, n int) (row []net.Listener, err error) {
	if endpoint != "tcp://*:0" {
		return ListenRow(endpoint, n)
	}
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0") // vLLM binds the node's own address
		if err != nil {
			for _, l := range row {
				l.Close()
			}
			return nil, err
		}
		row = append(row, l)
	}
	return row, nil
}

func listenFrom(host string, port, n int) ([]net.Listener, error) {
	var row []net.Listener
	for i := range n {
		at := port
		if i > 0 {
			at = row[0].Addr().(*net.TCPAddr).Port + i
		}
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(at)))
		if err != nil {
			for _, l := range row {
				l.Close()
			}
			return nil, err
		}
		row = append(row, l)
	}
	return row, nil
}
