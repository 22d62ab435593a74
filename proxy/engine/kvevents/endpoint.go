package kvevents

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// Endpoint returns the endpoint of one rank, if that of rank 0 is
// "tcp://host:port": each rank has the port after that of the rank before it.
func Endpoint(base string, rank int) (string, error) {
	address, ok := strings.CutPrefix(base, "tcp://")
	if !ok {
		return "", fmt.Errorf("read endpoint %q: want tcp://host:port", base)
	}
	host, digits, err := net.SplitHostPort(address)
	if err != nil || host == "" {
		return "", fmt.Errorf("read endpoint %q: want tcp://host:port", base)
	}
	port, err := strconv.ParseUint(digits, 10, 16)
	if err != nil || port == 0 || int(port)+rank > 65535 {
		return "", fmt.Errorf("read endpoint %q: no port for rank %d", base, rank)
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(int(port)+rank)), nil
}

// Announced is what an SGLang engine says of its KV events in GET /server_info,
// member kv_events. Source: SGLang srt/entrypoints/http_server.py.
type Announced struct {
	Publisher string `json:"publisher"`
	Host      string `json:"endpoint_host"` // "*" if it listens everywhere
	Port      int    `json:"endpoint_port_base"`
	BlockSize int    `json:"block_size"`
	DPSize    int    `json:"dp_size"`
}

// Endpoint returns the endpoint of rank 0, or false if the engine publishes no
// events that can be had. Host is where the engine itself is reached: a wildcard
// stands for it.
func (a Announced) Endpoint(host string) (string, bool) {
	if a.Publisher != "zmq" || a.Port <= 0 || a.Port > 65535 {
		return "", false
	}
	switch a.Host {
	case "", "*", "0.0.0.0", "::", "[::]":
	default:
		host = a.Host
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(a.Port)), host != ""
}
