package kvevents

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// Endpoint returns the endpoint of a rank. base is that of rank 0, "tcp://host:port";
// each rank has the next higher port.
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

// Announced returns the endpoint of rank 0 of an engine that announces its publisher, as
// SGLang does. If host is a wildcard, Announced uses engine, the host of the engine's
// URL. It returns "" if there is no such endpoint. Source: SGLang GET /server_info,
// kv_events.endpoint_host and endpoint_port_base.
func Announced(host string, port int, engine string) string {
	switch host {
	case "", "*", "0.0.0.0", "::", "[::]":
		host = engine
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if host == "" || port <= 0 || port > 65535 {
		return ""
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(port))
}
