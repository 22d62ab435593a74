package admin

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
)

// Workers is the worker processes of a coordinator. Safe for concurrent use.
type Workers interface {
	// Each sends a request to the admin routes of every worker at the same time. It
	// returns the answers in the order of List. A worker that does not answer in time has
	// an Err.
	Each(ctx context.Context, method, path string, body []byte) []WorkerAnswer
	List() []fleet.WorkerRow
}

// WorkerAnswer is the answer of one worker.
type WorkerAnswer struct {
	Name   string // node and slot of the worker
	Status int
	Body   []byte
	Err    error // not nil: the worker gave no answer
}

// Time limits for the answer of a worker: to a query, and to a command such as the reload
// of a policy.
const (
	readTimeout  = time.Second
	writeTimeout = 30 * time.Second
)

// connectedWorkers are the workers that are connected to a coordinator.
type connectedWorkers struct{ server *fleet.Server }

// NewWorkers returns the workers that are connected to s.
func NewWorkers(s *fleet.Server) Workers { return connectedWorkers{s} }

// List implements Workers.
func (w connectedWorkers) List() []fleet.WorkerRow { return w.server.Workers() }

// Each implements Workers.
func (w connectedWorkers) Each(ctx context.Context, method, path string, body []byte) []WorkerAnswer {
	timeout := readTimeout
	if method != http.MethodGet {
		timeout = writeTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	rows := w.List()
	answers := make([]WorkerAnswer, len(rows))
	var wg sync.WaitGroup
	defer wg.Wait()
	for i, row := range rows {
		wg.Go(func() {
			a := &answers[i]
			a.Name = fmt.Sprintf("%s/%d", row.Node, row.Slot)
			a.Status, _, a.Body, a.Err = w.server.Ask(ctx, row.Number, method, path, body)
		})
	}
	return answers
}
