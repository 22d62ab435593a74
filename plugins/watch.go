package plugins

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/plugins/source"
)

// watchEvery is the time between two looks at the files. A change has to rest
// for one of them and is taken up within 2 s.
const watchEvery = 500 * time.Millisecond

// Run loads plugins again whose files hold something else than before, and ends
// the trials of new versions, until ctx ends.
func (s *Set) Run(ctx context.Context) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.lookAtFiles(ctx)
			s.judge(time.Now())
		}
	}
}

// lookAtFiles reloads what has changed. What cannot be used is tried again when
// its file changes again.
func (s *Set) lookAtFiles(ctx context.Context) {
	s.mu.Lock()
	watches := make(map[string]*source.Watch, len(s.watches))
	for name, w := range s.watches {
		watches[name] = w
	}
	s.mu.Unlock()
	for name, w := range watches {
		if w.Changed() {
			_ = s.Reload(ctx, name) // it has logged and counted what is wrong
		}
	}
}
