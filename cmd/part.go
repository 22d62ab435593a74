package cmd

import (
	"net"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine/discovery"
	"github.com/pdproxy/pdproxy/proxy/engine/moriio"
	"github.com/pdproxy/pdproxy/proxy/handover"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// Part is what one process does of the work, and what it was given for that by
// the process that started it or went before. The zero value is a process that
// does everything and opens its own sockets.
type Part struct {
	Role Role
	Slot int             // among those of its role
	Dir  *privatedir.Dir // where the processes of the fleet meet; nil for none. Who opened it closes it, after the process has served
	// Sockets are the open ones of the public and the admin address.
	Sockets proxy.Sockets
	// Those of the other addresses; nil: to be opened, if they are configured.
	Fleet   net.Listener // fleet.listen
	MoRIIO  net.Listener // discovery.moriio.listen
	Storage net.Listener // discovery.trtllm.cluster_uri, where it is http
}

// Role is what a process of a fleet is.
type Role string

// The roles of a process.
const (
	RoleSingle      Role = ""            // everything in one process
	RoleCoordinator Role = "coordinator" // places, finds engines, serves operators
	RoleWorker      Role = "worker"      // serves clients
)

// Sockets are known by what they are for and the address that the configuration
// has for it: a successor with another address does not want them.
func publicSocket(cfg *config.Config) string { return "server.listen " + cfg.Server.Listen }
func adminSocket(cfg *config.Config) string  { return "admin.listen " + cfg.Admin.Listen }
func fleetSocket(cfg *config.Config) string  { return "fleet.listen " + cfg.Fleet.Listen }

// moriioSocket is "" where no engine registers.
func moriioSocket(cfg *config.Config) string {
	address, err := moriio.Address(cfg.Discovery.MoRIIO.Listen)
	if err != nil {
		return ""
	}
	return "discovery.moriio.listen " + address
}

// storageSocket is "" where no TensorRT-LLM worker registers.
func storageSocket(cfg *config.Config) string {
	address, served := discovery.StorageAddress(cfg.Discovery.TRTLLM)
	if !served {
		return ""
	}
	return "discovery.trtllm.cluster_uri " + address
}

// registrationSockets are those where engines register; "" where they do not.
func registrationSockets(cfg *config.Config) []string {
	return []string{moriioSocket(cfg), storageSocket(cfg)}
}

// open makes the listeners of those of the open sockets that the part has a use
// for. They are copies.
func (p *Part) open(cfg *config.Config, given []handover.Socket) error {
	wanted := map[string]*net.Listener{}
	if p.Role != RoleCoordinator {
		wanted[publicSocket(cfg)] = &p.Sockets.Public
	}
	if p.Role != RoleWorker {
		wanted[adminSocket(cfg)] = &p.Sockets.Admin
		wanted[fleetSocket(cfg)] = &p.Fleet
		wanted[moriioSocket(cfg)] = &p.MoRIIO
		wanted[storageSocket(cfg)] = &p.Storage
	}
	p.Sockets.Only = p.Role != RoleSingle
	for _, socket := range given {
		place := wanted[socket.Name]
		if place == nil {
			continue
		}
		l, err := socket.Listener()
		if err != nil {
			p.close()
			return err
		}
		*place = l
	}
	return nil
}

// close closes the sockets of a part that never serves.
func (p *Part) close() {
	for _, l := range []net.Listener{p.Sockets.Public, p.Sockets.Admin, p.Fleet, p.MoRIIO, p.Storage} {
		if l != nil {
			l.Close()
		}
	}
}
