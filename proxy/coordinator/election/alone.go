package election

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Alone is the election of a fleet that has one coordinator and no etcd: whoever
// is started leads, at once or when the process that it takes over from has ended
// its term. Its methods are safe for concurrent use.
type Alone struct {
	e    *Election
	path string
}

// NewAlone returns the election of a coordinator that begins to lead with Succeed.
// path is the file that keeps the epoch; "" for none: then the clock alone says
// that one is later. Until Succeed the leader is the one of that epoch, at the
// same address. Address, Node and Log of o are used.
func NewAlone(o Options, path string) *Alone {
	a := &Alone{e: New(o), path: path}
	if before := a.before(o.Log); before != 0 {
		a.e.saw(Leader{Address: o.Address, Epoch: before})
	}
	return a
}

// Standing is like that of Election.
func (a *Alone) Standing() (Standing, <-chan struct{}) { return a.e.Standing() }

// Resign is like that of Election.
func (a *Alone) Resign() { a.e.Resign() }

// Run waits until ctx ends, and resigns.
func (a *Alone) Run(ctx context.Context) {
	<-ctx.Done()
	a.Resign()
}

// Succeed begins to lead, by an epoch above those of all that have led before.
func (a *Alone) Succeed() {
	s, _ := a.Standing()
	own := Leader{
		Address: a.e.o.Address, Node: a.e.o.Node, ID: a.e.id,
		Epoch: Next(max(s.Leader.Epoch, a.before(a.e.o.Log)), time.Now()),
	}
	if err := a.keep(own.Epoch); err != nil {
		a.e.o.Log.Warn("the epoch is not kept: if the clock is set back, workers may not follow the next coordinator", "error", err)
	}
	a.e.lead(own)
}

// before is the epoch in the file; 0: none is known.
func (a *Alone) before(log *slog.Logger) uint64 {
	if a.path == "" {
		return 0
	}
	text, err := os.ReadFile(a.path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0
	}
	var epoch uint64
	if err == nil {
		epoch, err = strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	}
	if err == nil && epoch == math.MaxUint64 {
		err = errors.New("there is none above it")
	}
	if err != nil {
		log.Warn("the last epoch is not known", "error", err)
		return 0
	}
	return epoch
}

// keep writes the epoch to the file, in whole or not at all.
func (a *Alone) keep(epoch uint64) error {
	if a.path == "" {
		return nil
	}
	f, err := os.CreateTemp(filepath.Dir(a.path), ".epoch-*")
	if err != nil {
		return fmt.Errorf("keep epoch: %w", err)
	}
	_, err = fmt.Fprintln(f, epoch)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), a.path)
	}
	if err != nil {
		_ = os.Remove(f.Name()) // what is said is why it was not kept
		return fmt.Errorf("keep epoch: %w", err)
	}
	return nil
}
