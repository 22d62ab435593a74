package discovery

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Roles in the registrations of TensorRT-LLM workers: ServerRole in
// tensorrt_llm/llmapi/disagg_utils.py. Other roles (encoders, image generation) are not
// served.
const (
	workerContext    = 0
	workerGeneration = 1
)

// newCluster returns the source for workers of a TensorRT-LLM cluster in etcd:
// trtllm-serve with disagg_cluster puts a record below /trtllm-disagg/NAME/workers/ and
// keeps its lease alive (tensorrt_llm/serve/disagg_auto_scaling.py).
func newCluster(cfg config.DiscoveryTRTLLM, log *slog.Logger) *etcdSource {
	s := newEtcd("trtllm", etcdEndpoints(cfg.ClusterURI), workersPrefix(cfg.ClusterName), log)
	s.read = readWorker
	// A restarted worker has another id at the same address, and the lease of the old
	// one may still run.
	s.same = func(e config.Engine) string { return e.URL }
	return s
}

// workersPrefix returns the key prefix of a cluster's workers.
func workersPrefix(cluster string) string { return "/trtllm-disagg/" + cluster + "/workers/" }

// unspecified reports whether a host means every address of its machine.
func unspecified(host string) bool {
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsUnspecified()
}

// readWorker converts a worker's record to an engine. The worker's id, at the end of
// the key, is the instance's name: a restarted worker is another instance.
func readWorker(key string, value []byte) (config.Engine, error) {
	var w struct {
		Host string `json:"host"`
		Port int    `json:"port"`
		Role *int   `json:"role"`
	}
	if err := json.Unmarshal(value, &w); err != nil {
		return config.Engine{}, fmt.Errorf("decode worker: %w", err)
	}
	if w.Role == nil {
		return config.Engine{}, errors.New("decode worker: no role")
	}
	e := config.DefaultEngine()
	e.Name, e.Connector = key[strings.LastIndexByte(key, '/')+1:], config.ConnectorTRTLLM
	switch *w.Role {
	case workerContext:
		e.Role = config.RolePrefill
	case workerGeneration:
		e.Role = config.RoleDecode
	default:
		return config.Engine{}, fmt.Errorf("role %d: %w", *w.Role, errSkip)
	}
	if w.Port < 1 || w.Port > 65535 {
		return config.Engine{}, errors.New("decode worker: no port")
	}
	host := strings.Trim(w.Host, "[]")
	if unspecified(host) {
		return config.Engine{}, errors.New("decode worker: its host is no address that others can call")
	}
	e.URL = (&url.URL{Scheme: "http", Host: net.JoinHostPort(host, strconv.Itoa(w.Port))}).String()
	if err := e.Check(); err != nil {
		return config.Engine{}, err
	}
	return e, nil
}
