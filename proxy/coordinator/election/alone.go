package election

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// epochFile is the name of the file that keeps the epoch.
const epochFile = "epoch"

// Alone is the election of a fleet with one coordinator and without etcd. The process
// leads from Succeed on. A process that takes over from another process calls Succeed
// after that process has resigned. Safe for concurrent use.
type Alone struct {
	e   *Election
	dir *privatedir.Dir
}

// NewAlone returns the election of a coordinator that leads from Succeed on. dir contains
// the file that stores the epoch. Nil: no file, and then only the clock makes later
// epochs higher. Before Succeed, Standing names a leader with the stored epoch and the
// address of this process. NewAlone uses Address, Node and Log of o.
func NewAlone(o Options, dir *privatedir.Dir) *Alone {
	a := &Alone{e: New(o), dir: dir}
	if before := a.before(o.Log); before != 0 {
		a.e.saw(Leader{Address: o.Address, Epoch: before})
	}
	return a
}

// Standing works as Election.Standing does.
func (a *Alone) Standing() (Standing, <-chan struct{}) { return a.e.Standing() }

// Resign works as Election.Resign does.
func (a *Alone) Resign() { a.e.Resign() }

// Run waits until ctx ends and then resigns.
func (a *Alone) Run(ctx context.Context) {
	<-ctx.Done()
	a.Resign()
}

// Succeed begins to lead with an epoch above all earlier ones.
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

// before returns the epoch in the file; 0: none.
func (a *Alone) before(log *slog.Logger) uint64 {
	if a.dir == nil {
		return 0
	}
	text, err := a.dir.ReadFile(epochFile, 64)
	if errors.Is(err, fs.ErrNotExist) {
		return 0
	}
	var epoch uint64
	if err == nil {
		epoch, err = strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	}
	if err == nil && epoch == math.MaxUint64 {
		err = errors.New("no higher epoch is possible")
	}
	if err != nil {
		log.Warn("the last epoch is not known", "error", err)
		return 0
	}
	return epoch
}

// keep writes the epoch to the file atomically.
func (a *Alone) keep(epoch uint64) error {
	if a.dir == nil {
		return nil
	}
	return a.dir.WriteFile(epochFile, fmt.Appendln(nil, epoch))
}
