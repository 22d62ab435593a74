package config

import "time"

// Sleep configures how the proxy uses the sleep mode of vLLM engines, which run with
// --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1.
type Sleep struct {
	// Wake makes a request for a model whose engines sleep wake one engine, or a prefill
	// and a decode engine. The request waits for at most Limits.NoEngineTimeout. Default
	// false.
	Wake bool `toml:"wake"`
	// After is how long no request may use a model until all its engines are put to
	// sleep. Default 0: never.
	After Duration `toml:"after"`
	// Timeout is how long an engine may take to fall asleep or to wake up. Default 2m;
	// never 0.
	Timeout Duration `toml:"timeout"`
}

func defaultSleep() Sleep { return Sleep{Timeout: Duration(2 * time.Minute)} }

func (k *checker) sleep() {
	s := k.config.Sleep
	k.atLeast("sleep.after", int(s.After), 0)
	k.positive("sleep.timeout", int64(s.Timeout))
	switch {
	case s.Wake && k.config.Limits.NoEngineTimeout == 0:
		k.add("sleep.wake", "needs limits.no_engine_timeout, the time for which a request waits until the engine is awake")
	case s.Wake && k.config.Health.LoadInterval == 0:
		k.add("sleep.wake", "needs health.load_interval, because the proxy learns from the load reports of engines which of them sleep")
	case s.After > 0 && !s.Wake:
		k.add("sleep.after", "needs sleep.wake: nobody would wake the engines")
	}
}
