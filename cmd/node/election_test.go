package node

import (
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestAdvertised: pods with one configuration advertise their own addresses.
func TestAdvertised(t *testing.T) {
	for name, c := range map[string]struct{ listen, advertise, lease, api, want string }{
		"as configured":     {listen: "0.0.0.0:1", advertise: "10.0.0.1:2", lease: "l", api: "https://127.0.0.1:3", want: "10.0.0.1:2"},
		"the listener's":    {listen: "10.0.0.2:1", lease: "l", api: "https://127.0.0.1:3", want: "10.0.0.2:1"},
		"without a Lease":   {listen: "0.0.0.0:1", want: "0.0.0.0:1"},
		"toward the server": {listen: "0.0.0.0:1", lease: "l", api: "https://127.0.0.1:3", want: "127.0.0.1:1"},
		"of any family":     {listen: "[::]:1", lease: "l", api: "https://127.0.0.1:3", want: "127.0.0.1:1"},
		"unknown":           {listen: "0.0.0.0:1", lease: "l", api: "https://host.invalid"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config.Default()
			cfg.Fleet.Listen, cfg.Fleet.Advertise, cfg.Fleet.Lease.Name, cfg.Discovery.Kubernetes.API = c.listen, c.advertise, c.lease, c.api
			got, err := advertised(&cfg)
			if got != c.want || (err != nil) != (c.want == "") {
				t.Errorf("got %q, %v, want %q", got, err, c.want)
			}
			if err != nil && config.AsProblems(err)[0].Key != "fleet.advertise" {
				t.Errorf("the error names another key: %v", err)
			}
		})
	}
}
