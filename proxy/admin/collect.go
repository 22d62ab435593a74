package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admin/dashboard"
)

// collector reads the parts of all processes, and measures their traffic. One goroutine uses it.
type collector struct {
	view    *dashboardView
	traffic bool // the parts need only the traffic
	meter   dashboard.Meter
	next    map[string]position // by process
}

func newCollector(d *dashboardView, traffic bool) *collector {
	return &collector{view: d, traffic: traffic, meter: d.history.Meter(), next: make(map[string]position)}
}

// position is where the reader of a process's Recent continues.
type position struct {
	next uint64
	seen time.Time // when the process answered last
}

// collect reads the parts of this moment, and adds a sample to the meter.
func (c *collector) collect(ctx context.Context) (now time.Time, parts []DashboardPart, silent int, gauges dashboard.Gauges) {
	parts, silent = c.parts(ctx)
	now = time.Now()
	for _, p := range parts {
		c.next[p.Process] = position{p.Recent.Next, now}
		c.meter.Report(p.Process, p.Totals)
		gauges.Running, gauges.Waiting = gauges.Running+p.Running, gauges.Waiting+p.Waiting
	}
	for _, i := range c.view.o.Registry.Snapshot().Instances {
		if !i.Answers() {
			gauges.EnginesDown++
		}
	}
	c.forget(now)
	c.meter.Sample(now)
	return now, parts, silent, gauges
}

// parts returns the parts of this process and of its workers.
func (c *collector) parts(ctx context.Context) (list []DashboardPart, silent int) {
	d := c.view
	list = []DashboardPart{d.own(c.next[d.process].next, c.traffic)}
	if d.o.Workers == nil {
		return list, 0
	}
	query := make(url.Values)
	if c.traffic {
		query.Set(partTraffic, "true")
	} else {
		for process, p := range c.next {
			query.Add(partAfter, fmt.Sprintf("%s.%d", process, p.next))
		}
	}
	for _, a := range d.o.Workers.Each(ctx, http.MethodGet, partPath+"?"+query.Encode(), nil) {
		var p DashboardPart
		if a.Err != nil || a.Status != http.StatusOK || json.Unmarshal(a.Body, &p) != nil {
			silent++
			continue
		}
		list = append(list, p)
	}
	return list, silent
}

// forget drops the processes that have not answered for promptWindow.
func (c *collector) forget(now time.Time) {
	for process, p := range c.next {
		if now.Sub(p.seen) > promptWindow {
			delete(c.next, process)
			c.meter.Forget(process)
		}
	}
}

// record adds the traffic to the history until end is closed.
func (d *dashboardView) record(end <-chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	go func() { // ends with end
		<-end
		cancel()
	}()
	go func() { // ends with ctx
		tick := time.NewTicker(dashboard.Step)
		defer tick.Stop()
		for c := newCollector(d, true); ; {
			_, _, _, gauges := c.collect(ctx)
			d.history.Add(&c.meter, gauges)
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
}

// DashboardHistory is the answer of GET /v1/dashboard/history.
type DashboardHistory struct {
	Points []dashboard.Point `json:"points"` // the oldest first
}
