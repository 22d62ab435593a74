package node

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator/access"
	"github.com/pdproxy/pdproxy/proxy/etcd"
)

// minTokenLength is the least number of characters of a fleet's token. A host that
// pretends to be a coordinator receives a worker's proof of the token. From the proof, a
// short token can be guessed.
const minTokenLength = 16

// fleetAccess holds the credentials by which the workers and coordinators of a fleet
// authenticate each other.
type fleetAccess struct {
	token       string // "" for none
	credentials *access.Credentials
}

// openFleetAccess reads the files that the keys of [fleet] name. It calls note with each
// key and the error of its file, which may be nil.
func openFleetAccess(cfg *config.Config, log *slog.Logger, note func(key string, err error)) fleetAccess {
	var a fleetAccess
	var err error
	a.token, err = config.ReadSecret(cfg.Fleet.TokenFile)
	if err == nil && a.token != "" && len(a.token) < minTokenLength {
		err = fmt.Errorf("the token must have at least %d characters: openssl rand -base64 32 makes one", minTokenLength)
	}
	note("fleet.token_file", err)
	if !cfg.Fleet.TLS.Complete() {
		return a // config.Validate reports it
	}
	a.credentials, err = access.NewCredentials(access.Options{
		Files:  access.Files{Cert: cfg.Fleet.TLS.Cert, Key: cfg.Fleet.TLS.Key, CA: cfg.Fleet.TLS.CA},
		Bearer: a.token != "" || cfg.Fleet.Open, Log: log,
	})
	note("fleet.tls", err)
	var opened error
	switch {
	case cfg.Fleet.Lease.Name != "":
		_, opened = openLease(cfg)
	case len(cfg.Fleet.Etcd.Endpoints) > 0:
		_, opened = etcd.Open(cfg.Fleet.Etcd.Access(), "fleet.etcd")
	}
	if opened != nil {
		for _, p := range config.AsProblems(opened) {
			note(p.Key, errors.New(p.Message))
		}
	}
	return a
}

// newGate returns the gate that authenticates the connections to fleet.listen.
func (n *Node) newGate(a fleetAccess) *access.Gate {
	return access.NewGate(access.GateOptions{Credentials: a.credentials, Log: n.log, OnRefused: n.metrics.FleetRefused})
}
