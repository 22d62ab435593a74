package enginesim

import (
	"fmt"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/sglang"
	"github.com/pdproxy/pdproxy/internal/enginesim/trtllm"
	"github.com/pdproxy/pdproxy/internal/enginesim/vllm"
)

// Settings and state of engines, see package core.
type (
	Config         = core.Config
	Engine         = core.Engine
	State          = core.State
	KVEventsConfig = core.KVEventsConfig
	LoRAConfig     = core.LoRAConfig
	NixlConfig     = core.NixlConfig
	MoRIIOConfig   = core.MoRIIOConfig
	SGLangConfig   = core.SGLangConfig
	TRTLLMConfig   = core.TRTLLMConfig
)

// Connectors, roles and generations of wire formats, see package core.
const (
	ConnectorVLLMNixl       = core.ConnectorVLLMNixl
	ConnectorVLLMNixlPush   = core.ConnectorVLLMNixlPush
	ConnectorVLLMStore      = core.ConnectorVLLMStore
	ConnectorVLLMMoRIIO     = core.ConnectorVLLMMoRIIO
	ConnectorVLLMMoRIIORead = core.ConnectorVLLMMoRIIORead
	ConnectorVLLMMooncake   = core.ConnectorVLLMMooncake
	ConnectorVLLMP2PTier    = core.ConnectorVLLMP2PTier
	ConnectorSGLang         = core.ConnectorSGLang
	ConnectorTRTLLM         = core.ConnectorTRTLLM
	ConnectorNone           = core.ConnectorNone

	RolePrefill = core.RolePrefill
	RoleDecode  = core.RoleDecode
	RoleBoth    = core.RoleBoth
	RoleEncode  = core.RoleEncode

	NixlWireFlat      = core.NixlWireFlat
	NixlWireRequestID = core.NixlWireRequestID
	NixlWireGroups    = core.NixlWireGroups
	NixlWireLease     = core.NixlWireLease
	NixlWireMode      = core.NixlWireMode
	NixlWireSizes     = core.NixlWireSizes

	TRTLLMWireG1 = core.TRTLLMWireG1
	TRTLLMWireG2 = core.TRTLLMWireG2
	TRTLLMWireG3 = core.TRTLLMWireG3
	KVEventsStop = core.KVEventsStop
)

// All connectors, roles, kinds of fault and phases that hang, see package core.
var (
	Connectors = core.Connectors
	Roles      = core.Roles
	FailKinds  = core.FailKinds
	HangPhases = core.HangPhases
)

// New checks the config and builds the engine of its connector; it opens nothing.
func New(cfg Config) (*Engine, error) {
	build := func(e *Engine) core.Protocol { return vllm.New(e) }
	switch cfg.Connector {
	case "", ConnectorNone, ConnectorVLLMNixl, ConnectorVLLMNixlPush, ConnectorVLLMStore, ConnectorVLLMMoRIIO, ConnectorVLLMMoRIIORead, ConnectorVLLMMooncake, ConnectorVLLMP2PTier:
	case ConnectorSGLang:
		build = func(e *Engine) core.Protocol { return sglang.New(e) }
	case ConnectorTRTLLM:
		build = func(e *Engine) core.Protocol { return trtllm.New(e) }
	default:
		return nil, fmt.Errorf("config connector: %q is unknown", cfg.Connector)
	}
	return core.NewEngine(cfg, build)
}
