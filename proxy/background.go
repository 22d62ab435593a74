package proxy

import "sync"

// background is what runs beside the one who waits for it. Unlike a sync.WaitGroup's,
// its Go may be called while somebody waits and nothing runs. Safe for concurrent use.
type background struct {
	mu   sync.Mutex
	runs int           // guarded by mu
	idle chan struct{} // closed when nothing runs any more; nil: nobody waits; guarded by mu
}

// Go runs f.
func (b *background) Go(f func()) {
	b.mu.Lock()
	b.runs++
	b.mu.Unlock()
	go func() { // Wait waits for it
		defer b.done()
		f()
	}()
}

func (b *background) done() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.runs--; b.runs == 0 && b.idle != nil {
		close(b.idle)
		b.idle = nil
	}
}

// Wait returns at a moment at which nothing runs.
func (b *background) Wait() {
	b.mu.Lock()
	if b.runs == 0 {
		b.mu.Unlock()
		return
	}
	if b.idle == nil {
		b.idle = make(chan struct{})
	}
	idle := b.idle
	b.mu.Unlock()
	<-idle
}
