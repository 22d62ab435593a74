package host

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// StartBudget is how long embedders should let a module start, all of its VMs
// together: it bounds what no call's own time limit does. Only guarded modules
// can be bounded.
const StartBudget = 10 * time.Second

// Begin makes the first root context of a new VM and starts and configures the
// plugin in it. An error says which step failed or was answered false.
func (vm *VM) Begin(ctx context.Context, root uint32) error {
	if err := vm.ContextCreate(ctx, root, 0); err != nil {
		return fmt.Errorf("start plugin: %w", err)
	}
	switch ok, err := vm.VMStart(ctx, root); {
	case err != nil:
		return fmt.Errorf("start plugin: %w", err)
	case !ok:
		return errors.New("start plugin: proxy_on_vm_start answered false")
	}
	switch ok, err := vm.Configure(ctx, root); {
	case err != nil:
		return fmt.Errorf("configure plugin: %w", err)
	case !ok:
		return errors.New("configure plugin: proxy_on_configure answered false")
	}
	return nil
}
