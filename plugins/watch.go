package plugins

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/plugins/source"
)

// watchEvery is the interval between two polls of the files. A changed file
// must stay the same for one interval, and is loaded within 2 s.
const watchEvery = 500 * time.Millisecond

// Run reloads plugins whose files have changed, and ends the trials of new
// versions, until ctx ends.
func (s *Set) Run(ctx context.Context) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.lookAtFiles(ctx)
			s.endTrials(time.Now())
		}
	}
}

// lookAtFiles reloads the changed plugins. A version that cannot be used is
// tried again only when its file changes again.
func (s *Set) lookAtFiles(ctx context.Context) {
	s.mu.Lock()
	watches := make(map[string]*source.Watch, len(s.watches))
	for name, w := range s.watches {
		watches[name] = w
	}
	s.mu.Unlock()
	for name, w := range watches {
		if w.Changed() {
			_ = s.Reload(ctx, name) // Reload has logged and counted the error
		}
	}
}
