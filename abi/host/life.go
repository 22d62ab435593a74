package host

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// StartBudget is the time that embedders should allow for the start of a
// module, all of its VMs together. It also bounds the code that runs outside
// timed calls. It works only for guarded modules.
const StartBudget = 10 * time.Second

// Begin makes the first root context of a new VM and starts and configures the
// plugin in it. The error names the step that failed or returned false.
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
