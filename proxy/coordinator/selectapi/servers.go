package selectapi

import (
	"net"
	"net/url"
	"slices"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// TensorRT-LLM's default algorithm for block hashes and its default block size in tokens.
// Source: serve/router.py, KV_CACHE_HASH_ALGO_DEFAULT and BlockHashMixin.
const (
	defaultHash        = "v1_block_key"
	defaultBlockTokens = 32
)

// sourceCluster is the Source of engines that register in a disagg_cluster.
const sourceCluster = "trtllm"

// servers has the ready TensorRT-LLM instances of a snapshot whose URL is only host and
// port.
type servers struct {
	of                  *engine.Snapshot
	model               string
	several             bool // the instances serve more than one model
	clustered           bool // at least one instance has registered in a disagg_cluster
	context, generation side
	address             map[*engine.Instance]string
}

// side has the instances of one role.
type side struct {
	instances   []*engine.Instance
	slots       []kvindex.Target
	hash        string // block hash algorithm of the instances; "" if the algorithms or block sizes differ
	blockTokens int    // 0 if they differ
}

type serversCache struct{ atomic.Pointer[servers] }

// servers returns the servers of the registry's current snapshot.
func (h *Handler) servers() *servers {
	now := h.o.Registry.Snapshot()
	if v := h.known.Load(); v != nil && v.of == now {
		return v
	}
	v := &servers{of: now, address: map[*engine.Instance]string{}}
	for _, i := range now.Instances {
		v.add(i)
	}
	h.known.Store(v)
	return v
}

func (v *servers) add(i *engine.Instance) {
	models := i.Models()
	if i.Spec.Connector != config.ConnectorTRTLLM || i.State() != engine.Ready || len(models) == 0 {
		return
	}
	address, ok := hostPort(i.Spec.URL)
	if !ok {
		return
	}
	if v.model == "" {
		v.model = models[0]
	}
	v.several = v.several || !slices.Contains(models, v.model)
	v.clustered = v.clustered || i.Source == sourceCluster
	v.address[i] = address
	if i.Role&abi.RolePrefill != 0 {
		v.context.add(i)
	}
	if i.Role&abi.RoleDecode != 0 {
		v.generation.add(i)
	}
}

func (s *side) add(i *engine.Instance) {
	hash, block := i.Facts().KVHash, i.BlockTokens()
	if hash == "" {
		hash = defaultHash
	}
	if block == 0 {
		block = defaultBlockTokens
	}
	if len(s.instances) == 0 {
		s.hash, s.blockTokens = hash, block
	} else if s.hash != hash || s.blockTokens != block {
		s.hash, s.blockTokens = "", 0
	}
	s.instances = append(s.instances, i)
	s.slots = append(s.slots, i.KV...)
}

// hostPort returns host:port of an http URL without a path. False: any other URL.
func hostPort(raw string) (string, bool) {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "http" || u.Path != "" && u.Path != "/" {
		return "", false
	}
	port := u.Port()
	if port == "" {
		port = "80"
	}
	return net.JoinHostPort(u.Hostname(), port), true
}

func (v *servers) side(phase abi.Phase) *side {
	if phase == abi.Prefill {
		return &v.context
	}
	return &v.generation
}

// roleName returns TensorRT-LLM's name of a phase.
func roleName(phase abi.Phase) string {
	if phase == abi.Prefill {
		return "context"
	}
	return "generation"
}

// clusterInfo is the answer of GET /cluster_info.
type clusterInfo struct {
	IsReady bool         `json:"is_ready"`
	Servers serverLists  `json:"server_lists"`
	Keys    *keyConfigs  `json:"routing_key_configs,omitempty"`
	Workers *workerLists `json:"current_workers,omitempty"`
	Minimal *minimal     `json:"minimal_instances,omitempty"`
}

type serverLists struct {
	Context    []string `json:"context"`
	Generation []string `json:"generation"`
}

// keyConfigs sends workers the settings with which they cut prompts for their routing keys.
type keyConfigs struct {
	Context    *keyConfig `json:"context,omitempty"`
	Generation *keyConfig `json:"generation,omitempty"`
}

type keyConfig struct {
	BlockTokens int    `json:"tokens_per_block"`
	Hash        string `json:"kv_cache_hash_algo"`
}

type workerLists struct {
	Context    []worker `json:"context_servers"`
	Generation []worker `json:"generation_servers"`
}

type worker struct {
	ID   string `json:"worker_id"`
	Host string `json:"host"`
	Port int    `json:"port"`
	Role int    `json:"role"`
}

type minimal struct {
	Context    int `json:"context_servers"`
	Generation int `json:"generation_servers"`
}

func (v *servers) addresses(s *side) []string {
	list := make([]string, 0, len(s.instances))
	for _, i := range s.instances {
		list = append(list, v.address[i])
	}
	return list
}

func (v *servers) workers(s *side, role int) []worker {
	list := make([]worker, 0, len(s.instances))
	for _, i := range s.instances {
		host, text, _ := net.SplitHostPort(v.address[i]) // no error: hostPort joined host and port
		port, _ := net.LookupPort("tcp", text)           // no error: the port of a parsed URL is a number
		list = append(list, worker{i.Spec.Name, host, port, role})
	}
	return list
}

// keyConfigs returns nil if in no role all instances use the same hash algorithm and
// block size.
func (v *servers) keyConfigs() *keyConfigs {
	c := keyConfigs{v.context.keyConfig(), v.generation.keyConfig()}
	if c.Context == nil && c.Generation == nil {
		return nil
	}
	return &c
}

func (s *side) keyConfig() *keyConfig {
	if s.hash == "" {
		return nil
	}
	return &keyConfig{s.blockTokens, s.hash}
}
