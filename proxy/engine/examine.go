package engine

import (
	"context"
	"errors"
)

// Examine makes one probe of i and reads its facts, as Run does for a new instance. It returns why
// the probe failed. A probe shows nothing while this process does not run in time, and is repeated
// until ctx ends. Run must not run at the same time.
func (r *Registry) Examine(ctx context.Context, i *Instance) error {
	p, h := &prober{r: r, i: i}, r.health.Load()
	for {
		_, err := p.health(ctx, h)
		if err == nil {
			err = p.learn(ctx, h)
		}
		if !errors.Is(err, errLate) || ctx.Err() != nil {
			return err
		}
	}
}
