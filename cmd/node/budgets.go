package node

import (
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// budgets returns the budgets of the tenants for the requests of this process. The processes of
// one host count in one file of the fleet's directory. A worker whose coordinator may run on
// another host asks its coordinator.
func (n *Node) budgets(cfg *config.Config) tenant.Budgets {
	if n.asksForBudgets(cfg) {
		return fleet.NewBudgets(n.worker.client, n.ledger)
	}
	return n.ledger
}

// asksForBudgets reports whether the coordinator has the budgets for this process.
func (n *Node) asksForBudgets(cfg *config.Config) bool {
	return n.options.Role == RoleWorker && (cfg.Fleet.Coordinator != "" || cfg.Fleet.Elects())
}

// newLedger returns the ledger of this process: that of the host, or the memory for the share
// of a worker whose coordinator counts.
func (n *Node) newLedger(cfg *config.Config) *tenant.Ledger {
	dir := n.options.Dir
	if n.asksForBudgets(cfg) {
		dir = nil
	}
	return tenant.NewLedger(dir, n.log, nil)
}
