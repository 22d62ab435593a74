package enginesim

import "fmt"

// New checks the config and builds the engine of its connector; it opens nothing.
func New(cfg Config) (*Engine, error) {
	build := func(e *Engine) protocol { return newVLLM(e) }
	switch cfg.Connector {
	case "", ConnectorNone, ConnectorVLLMNixl, ConnectorVLLMNixlPush, ConnectorVLLMStore, ConnectorVLLMMoRIIO, ConnectorVLLMMoRIIORead, ConnectorVLLMMooncake, ConnectorVLLMP2PNCCL, ConnectorVLLMP2PTier:
	case ConnectorSGLang:
		build = func(e *Engine) protocol { return newSGLang(e) }
	case ConnectorTRTLLM:
		build = func(e *Engine) protocol { return newTRTLLM(e) }
	default:
		return nil, fmt.Errorf("config connector: %q is unknown", cfg.Connector)
	}
	return newEngine(cfg, build)
}
