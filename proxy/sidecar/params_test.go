package sidecar

import (
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// TestForeign: every text in transfer parameters that may be a host must be the host of
// an engine.
func TestForeign(t *testing.T) {
	instances := []*engine.Instance{
		{Host: "10.0.0.5"}, {Host: "P1.llm"}, {Host: "fd00::5"},
		{Host: "10.0.0.6", Spec: config.Engine{KVAddress: "host:10.1.0.6,handshake:1,notify:2"}},
	}
	for text, want := range map[string]bool{
		`{"remote_host":"10.0.0.5"}`:                           false,
		`{"remote_host":"10.0.0.5:5600"}`:                      false,
		`{"remote_host":"p1.llm."}`:                            false,
		`{"remote_host":"FD00:0::5"}`:                          false,
		`{"remote_host":"[fd00::5]:5600"}`:                     false,
		`{"remote_host":"10.1.0.6"}`:                           false,
		`{"remote_host":"::ffff:10.0.0.5"}`:                    false,
		`{"remote_bootstrap_addr":"http://10.0.0.5:8998/x"}`:   false,
		`{"remote_host":null,"remote_port":null}`:              false,
		`{"remote_host":""}`:                                   false,
		`{"remote_engine_id":"10-0","remote_block_ids":[[1]]}`: false,
		`{"remote_request_id":"cmpl-1:2"}`:                     false,
		`{"remote_host":"10.0.0.7"}`:                           true,
		`{"remote_host":"p1.llm.evil"}`:                        true,
		`{"remote_host":"http://10.0.0.5@evil/"}`:              true,
		`{"remote_host":"10.0.0.5@evil"}`:                      true,
		`{"remote_host":"10.0.0.5 evil"}`:                      true,
		`{"remote_host":2130706433}`:                           true,
		`{"remote_host":"0x7f000001"}`:                         true,
		`{"REMOTE_HOST":"evil"}`:                               true,
		`{"remote_hosts":["10.0.0.5","evil"]}`:                 true,
		`{"x":[{"peer":{"agent_ip":"evil"}}]}`:                 true,
		`{"x":["169.254.169.254"]}`:                            true,
		`{"x":"[::1]:80"}`:                                     true,
		`{"x":"tcp://evil:1"}`:                                 true,
		`{"remote_engine_id":"evil:6301"}`:                     true,
		`{"remote_engine_id":"10.0.0.5:6301"}`:                 false,
		`{"remote_block_ids":[{"remote_host":"evil"}]}`:        true,
		`{"\u0068ost":"evil"}`:                                 true,
	} {
		known := func(host string) bool { return hasHost(instances, host) }
		if got := !connector.Hosts("kv_transfer_params", []byte(text), known); got != want {
			t.Errorf("%s: %v", text, got)
		}
	}
}
