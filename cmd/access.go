package cmd

import (
	"fmt"
	"log/slog"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator/access"
)

// leastToken is how many characters a fleet's token has at least. Somebody who stands
// in for a coordinator is shown a worker's proof, by which a short token can be guessed.
const leastToken = 16

// fleetAccess is by what the workers and coordinators of a fleet know each other.
type fleetAccess struct {
	token       string // "" none
	credentials *access.Credentials
}

// openFleetAccess reads the files of [fleet]; note is told what is wrong with which
// key.
func openFleetAccess(cfg *config.Config, log *slog.Logger, note func(key string, err error)) fleetAccess {
	var a fleetAccess
	var err error
	a.token, err = readSecret(cfg.Fleet.TokenFile)
	if err == nil && a.token != "" && len(a.token) < leastToken {
		err = fmt.Errorf("the token must have at least %d characters: openssl rand -base64 32 makes one", leastToken)
	}
	note("fleet.token_file", err)
	a.credentials, err = access.NewCredentials(access.Options{
		Files:  access.Files{Cert: cfg.Fleet.TLS.Cert, Key: cfg.Fleet.TLS.Key, CA: cfg.Fleet.TLS.CA},
		Bearer: a.token != "" || cfg.Fleet.Open, Log: log,
	})
	note("fleet.tls", err)
	return a
}

// gate returns what lets connections in that come to fleet.listen.
func (n *Node) gate(a fleetAccess) *access.Gate {
	return access.NewGate(access.GateOptions{Credentials: a.credentials, Log: n.log, OnRefused: n.metrics.FleetRefused})
}
