package core

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// LoRAConfig configures the LoRA adapters of a vLLM engine (--enable-lora). Adapters change
// neither the text of an answer nor the times of the engine.
type LoRAConfig struct {
	// Modules are the names of the adapters (--lora-modules), which are models too.
	Modules []string
	// MaxLoRAs is the number of different adapters in the running batch (--max-loras);
	// default 1.
	MaxLoRAs int
	// HideInfo leaves out the metric vllm:lora_requests_info.
	HideInfo bool
}

func (c LoRAConfig) withDefaults(connector string) (LoRAConfig, error) {
	switch {
	case len(c.Modules) > 0 && (connector == ConnectorSGLang || connector == ConnectorTRTLLM):
		return c, fmt.Errorf("config lora modules: connector %q has none", connector)
	case c.MaxLoRAs < 0:
		return c, fmt.Errorf("config max loras: %d is negative", c.MaxLoRAs)
	}
	c.MaxLoRAs = max(1, c.MaxLoRAs)
	return c, nil
}

// loras counts the sequences of each adapter. Sources: vLLM v1/core/sched/scheduler.py (a
// waiting request is skipped while max_loras other adapters run), v1/metrics/stats.py
// (LoRARequestStates).
type loras struct {
	mu      sync.Mutex
	present map[string]int // from their arrival to their end
	info    map[string]float64
}

// adapter returns the LoRA adapter of the request; "": the base model.
func (r *Request) adapter(c *Config) string {
	if slices.Contains(c.LoRA.Modules, r.Model) {
		return r.Model
	}
	return ""
}

// count adds sequences of an adapter to those in the engine.
func (l *loras) count(adapter string, more int) {
	if adapter == "" {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.present == nil {
		l.present = make(map[string]int)
	}
	if l.present[adapter] += more; l.present[adapter] == 0 {
		delete(l.present, adapter)
	}
}

// fitsAdapter reports whether the sequence's adapter may run now. The caller holds mu.
func (r *Rank) fitsAdapter(s *Sequence) bool {
	return s.adapter == "" || r.adapters[s.adapter] > 0 || len(r.adapters) < r.Engine.Cfg.LoRA.MaxLoRAs
}

// runAdapter counts the slot of a sequence. The caller holds mu.
func (r *Rank) runAdapter(s *Sequence, more int) {
	if s.adapter == "" {
		return
	}
	if r.adapters == nil {
		r.adapters = make(map[string]int)
	}
	if r.adapters[s.adapter] += more; r.adapters[s.adapter] == 0 {
		delete(r.adapters, s.adapter)
	}
}

// appendInfo writes the metric of adapters as vLLM does: each combination of adapters is a
// sample of its own that stays, and its value is the time when it was the present one. Source:
// v1/metrics/loggers.py, gauge_lora_info.
func (e *Engine) appendInfo(b *strings.Builder) {
	if len(e.Cfg.LoRA.Modules) == 0 || e.Cfg.LoRA.HideInfo || e.Stats.Requests.Load() == 0 {
		return
	}
	running := make(map[string]int)
	for _, r := range e.Ranks {
		r.Mu.Lock()
		for adapter, n := range r.adapters {
			running[adapter] += n
		}
		r.Mu.Unlock()
	}
	l := &e.loras
	l.mu.Lock()
	defer l.mu.Unlock()
	var waiting []string
	for _, adapter := range slices.Sorted(maps.Keys(l.present)) {
		if l.present[adapter] > running[adapter] {
			waiting = append(waiting, adapter)
		}
	}
	if l.info == nil {
		l.info = make(map[string]float64)
	}
	now := fmt.Sprintf(`max_lora="%d",running_lora_adapters=%q,waiting_lora_adapters=%q`,
		e.Cfg.LoRA.MaxLoRAs, strings.Join(slices.Sorted(maps.Keys(running)), ","), strings.Join(waiting, ","))
	l.info[now] = float64(time.Now().UnixNano()) / 1e9
	b.WriteString("# TYPE vllm:lora_requests_info gauge\n")
	for _, labels := range slices.Sorted(maps.Keys(l.info)) {
		fmt.Fprintf(b, "vllm:lora_requests_info{%s} %.15e\n", labels, l.info[labels])
	}
}

// CacheKey separates the prefix caches of salts and adapters.
func (s *Sequence) CacheKey() string {
	if s.adapter == "" {
		return s.Req.CacheSalt
	}
	return s.Req.CacheSalt + loraKey + s.adapter
}

// loraKey is between salt and adapter of a CacheKey.
const loraKey = "\x00lora\x00"
