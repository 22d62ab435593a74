package policy

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
)

func TestPrefixMatch(t *testing.T) {
	n := Notebook{rows: []abi.Candidate{{BlocksGPU: 1, BlocksCPU: 2, BlocksDisk: 3, BlockTokens: 16}, {}}}
	for _, tt := range []struct {
		name, args, want string
		status           host.Status
	}{
		{"a row", "\x00\x00\x00\x00", "\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00", host.OK},
		{"a target that no index has", "\x01\x00\x00\x00", "", host.NotFound},
		{"no such row", "\x02\x00\x00\x00", "", host.BadArgument},
		{"a row far away", "\xff\xff\xff\xff", "", host.BadArgument},
		{"half a number", "\x00\x00", "", host.BadArgument},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, status := n.Foreign(0, abi.ForeignPrefixMatch, []byte(tt.args))
			if string(got) != tt.want || status != tt.status {
				t.Errorf("n.Foreign(0, abi.ForeignPrefixMatch, []byte(tt.args)) = %q, %v, want %q, %v", got, status, tt.want, tt.status)
			}
		})
	}
}
