package enginesim

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

func TestFaultsRefused(t *testing.T) {
	for _, cfg := range []Config{
		{Fail: "500"}, {Fail: "1:what"}, {Fail: "2:500"}, {Fail: "-0.1:500"}, {Fail: "NaN:500"}, {Fail: ":500"}, {Hang: "lunch"}, {DieAfter: -1},
		{Role: "none"}, {Connector: "other"}, {KVBlocks: -1}, {Lease: -time.Second},
	} {
		if _, err := New(cfg); err == nil {
			t.Errorf("%+v accepted", cfg)
		}
	}
	if _, err := New(Config{Connector: ConnectorSGLang, LoRA: LoRAConfig{Modules: []string{"sql"}}}); err == nil {
		t.Error("sglang has adapters")
	}
	e := newBare(t, Config{Fail: "1:500"})
	if err := e.SetFault("1:what", 0, ""); err == nil {
		t.Error("unknown fault accepted")
	}
	if err := e.SetKVEventFault("eat", 1); err == nil {
		t.Error("unknown fault of KV events accepted")
	}
	if kind, _ := e.Faults.Draw(); kind != core.Fail500 {
		t.Errorf("a refused change removed the fault %q", kind)
	}
}

func TestFaultRate(t *testing.T) {
	draw := func(seed uint64) (hits int, pattern string) {
		e := newBare(t, Config{Fail: "0.25:500", Seed: seed})
		for range 1000 {
			if err := e.SetKVEventFault("eat", 1); err == nil {
				t.Error("unknown fault of KV events accepted")
			}
			if kind, _ := e.Faults.Draw(); kind == core.Fail500 {
				hits++
				pattern += "x"
			} else {
				pattern += "."
			}
		}
		return hits, pattern
	}
	hits, first := draw(5)
	if hits < 200 || hits > 300 {
		t.Errorf("%d of 1000 at rate 0.25", hits)
	}
	if _, again := draw(5); again != first {
		t.Error("the same seed draws differently")
	}
	if _, other := draw(6); other == first {
		t.Error("seeds draw alike")
	}
}

// TestProtocolConfigDefaults checks the protocols' own settings.
func TestProtocolConfigDefaults(t *testing.T) {
	s := SGLangConfig{LoadBalance: "auto"}.WithDefaults(RolePrefill)
	if s.LoadBalance != core.BalanceFollowRoom || s.BootstrapTimeout != 300*time.Second || s.WaitingTimeout != 300*time.Second || s.HealthPoll != time.Second || s.HandshakeAttempts != 15 || s.HeartbeatFailures != 2 {
		t.Errorf("withDefaults = %+v", s)
	}
	if s := (SGLangConfig{}).WithDefaults(RoleDecode); s.LoadBalance != core.BalanceRoundRobin {
		t.Errorf("decode balances by %q", s.LoadBalance)
	}
	if c := (TRTLLMConfig{}).WithDefaults(time.Second); c.KVTransferTimeout != time.Second {
		t.Errorf("with a lease: %+v", c)
	}
	if _, err := New(Config{Connector: ConnectorTRTLLM, TRTLLM: TRTLLMConfig{Wire: 4}}); err == nil {
		t.Error("the unknown wire generation 4 was accepted")
	}
	if c := (TRTLLMConfig{}).WithDefaults(0); c.Wire != TRTLLMWireG2 || c.KVTransferTimeout != time.Minute || c.DisconnectPoll != time.Second {
		t.Errorf("(TRTLLMConfig{}).withDefaults = %+v", c)
	}
}

func TestKVEventsConfig(t *testing.T) {
	tests := []struct {
		name string
		cfg  Config
		ok   bool
	}{
		{"none", Config{}, true},
		{"a host", Config{KVEvents: KVEventsConfig{Endpoint: "tcp://127.0.0.1:0"}}, true},
		{"a wildcard", Config{Connector: ConnectorSGLang, KVEvents: KVEventsConfig{Endpoint: "tcp://*:5557", Replay: "tcp://*:5558"}}, true},
		{"no scheme", Config{KVEvents: KVEventsConfig{Endpoint: "127.0.0.1:5557"}}, false},
		{"no port", Config{KVEvents: KVEventsConfig{Endpoint: "tcp://127.0.0.1"}}, false},
		{"not a port", Config{KVEvents: KVEventsConfig{Endpoint: "tcp://127.0.0.1:x"}}, false},
		{"no such port", Config{KVEvents: KVEventsConfig{Endpoint: "tcp://127.0.0.1:65536"}}, false},
		{"a replay alone", Config{KVEvents: KVEventsConfig{Replay: "tcp://127.0.0.1:0"}}, false},
		{"a bad replay", Config{KVEvents: KVEventsConfig{Endpoint: "tcp://127.0.0.1:0", Replay: "ipc://x"}}, false},
		{"trtllm", Config{Connector: ConnectorTRTLLM, KVEvents: KVEventsConfig{Endpoint: "tcp://127.0.0.1:0"}}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := New(tt.cfg); (err == nil) != tt.ok {
				t.Errorf("New: %v", err)
			}
		})
	}
}
