package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Clocked is a protocol whose engines accept an offset for their clock. ClockPath is
// the route: a GET answers receive_ts and transmit_ts, in seconds on the engine's own
// clock. A POST of {"offset": …} makes the engine add the offset to the times that it
// reports.
type Clocked interface{ ClockPath() string }

// syncClock sets the engine's clock to Unix time, so that the offsets set by several
// proxies agree. Like NTP it assumes that both directions take equally long. Setting
// the clock is optional: an engine that does not know the path, or fails, reports its
// own times.
func (p *prober) syncClock(ctx context.Context, h *config.Health) {
	c, ok := p.i.protocol.(Clocked)
	if !ok || p.r.o.SyncClocks == nil || !p.r.o.SyncClocks() {
		return
	}
	asked := time.Now()
	status, body, err := p.get(ctx, h, p.i.Spec.URL, c.ClockPath())
	answered := time.Now()
	var clock struct {
		Received *float64 `json:"receive_ts"`
		Sent     *float64 `json:"transmit_ts"`
	}
	if err != nil || status != http.StatusOK || json.Unmarshal(body, &clock) != nil || clock.Received == nil || clock.Sent == nil {
		return
	}
	unix := func(t time.Time) float64 { return float64(t.UnixMicro()) / 1e6 }
	ahead := ((*clock.Received - unix(asked)) + (*clock.Sent - unix(answered))) / 2
	if err := p.i.post(ctx, time.Duration(h.Timeout), c.ClockPath(), fmt.Sprintf(`{"offset":%.6f}`, -ahead)); err != nil && ctx.Err() == nil {
		p.r.log.Info("engine's clock cannot be set", "engine", p.i.Spec.Name, "error", err)
	}
}

// post makes one POST of JSON on the connections of the instance's probes.
func (i *Instance) post(ctx context.Context, limit time.Duration, path, body string) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(i.Spec.URL, "/")+path, bytes.NewReader([]byte(body)))
	if err != nil {
		return fmt.Errorf("set clock: %w", bare(err))
	}
	req.Header.Set("Content-Type", "application/json")
	if i.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+i.APIKey)
	}
	resp, err := i.asks.Do(req)
	if err != nil {
		return fmt.Errorf("set clock: %w", bare(err))
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxProbeAnswer))
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("set clock: status %d", resp.StatusCode)
	}
	return nil
}
