package discovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/kube"
	"github.com/pdproxy/pdproxy/proxy/lograte"
)

// Facts about an engine on its pod, or on the EndpointSlices, which have the labels of
// their Service.
const (
	// labelRole and labelEngine are llm-d's. Sources: llm-d-router,
	// scheduling/filter/bylabel/roles.go, and its core-metrics-extractor.
	labelRole   = "llm-d.ai/role"
	labelEngine = "llm-d.ai/engine-type"
	// annotationBootstrap is the port on which SGLang's prefill listens for decode.
	// Source: sgl-model-gateway, src/service_discovery.rs.
	annotationBootstrap = "sglang.ai/bootstrap-port"
)

// kubeSource follows the EndpointSlices of Services, and the pods of InferencePools: each
// endpoint, and each pod, that takes requests is an engine.
type kubeSource struct {
	services []*kubeService
	pools    []*kubePool
	watches  []*kube.Watch
	changes  chan struct{} // has room for one: objects have changed since the last list
	log      *slog.Logger
	logged   map[string]string        // the present problems of endpoints; used by Run only
	refusals *lograte.Limiter[string] // decides which of them are logged, by name
}

// kubePattern is one pattern for found engines.
type kubePattern struct {
	engine config.Engine
	url    *url.URL          // that of engine
	labels map[string]string // labels of engines, with the label of the pod that each of them copies
}

// kubeService is the pattern for the endpoints of one Service.
type kubeService struct {
	kubePattern
	slices *kube.Watch
	pods   *kube.Watch // nil: pods are not read
}

// newKubernetes reads the files that cfg names, and opens nothing else.
func newKubernetes(cfg config.DiscoveryKubernetes, log *slog.Logger) (*kubeSource, error) {
	api, err := kube.Open(cfg)
	if err != nil {
		return nil, err
	}
	return newKubernetesOver(api, cfg, log)
}

// newKubernetesOver returns the source of an API server.
func newKubernetesOver(api *kube.Client, cfg config.DiscoveryKubernetes, log *slog.Logger) (*kubeSource, error) {
	s := &kubeSource{log: log, refusals: newRefusals(), changes: make(chan struct{}, 1)}
	watches := map[string]*kube.Watch{} // by path: patterns of one namespace share them
	shared := func(path, selector string) *kube.Watch {
		if watches[path] == nil {
			watches[path] = s.watch(api, path, selector)
		}
		return watches[path]
	}
	pods := func(namespace string) *kube.Watch {
		return shared("/api/v1/namespaces/"+url.PathEscape(namespace)+"/pods", strings.TrimPrefix(cfg.Pods, "*"))
	}
	labels := map[string]string{}
	for _, entry := range cfg.Labels {
		name, pod := config.PodLabel(entry)
		labels[name] = pod
	}
	for i, e := range cfg.Engines {
		p, name, namespace, err := newKubePattern(e, api, labels, fmt.Sprintf("discovery.kubernetes.engine[%d].url", i), "SERVICE")
		if err != nil {
			return nil, err
		}
		k := &kubeService{kubePattern: p, slices: s.watch(api,
			"/apis/discovery.k8s.io/v1/namespaces/"+url.PathEscape(namespace)+"/endpointslices", "kubernetes.io/service-name="+name)}
		if cfg.Pods != "" {
			k.pods = pods(namespace)
		}
		s.services = append(s.services, k)
	}
	for i, e := range cfg.Pools {
		p, name, namespace, err := newKubePattern(e, api, labels, fmt.Sprintf("discovery.kubernetes.pool[%d].url", i), "POOL")
		if err != nil {
			return nil, err
		}
		s.pools = append(s.pools, &kubePool{kubePattern: p, name: name, namespace: namespace,
			pools: shared("/apis/inference.networking.k8s.io/v1/namespaces/"+url.PathEscape(namespace)+"/inferencepools", ""), pods: pods(namespace)})
	}
	return s, nil
}

// newKubePattern returns the pattern e, and the name and namespace of the object that the
// host of its URL names. what is a word for the name in errors.
func newKubePattern(e config.Engine, api *kube.Client, labels map[string]string, key, what string) (p kubePattern, name, namespace string, err error) {
	u, err := url.Parse(e.URL)
	if err != nil { // cannot happen: the configuration was validated
		return p, "", "", config.Problems{{Key: key, Message: err.Error()}}
	}
	name, rest, _ := strings.Cut(u.Hostname(), ".")
	namespace, _, _ = strings.Cut(rest, ".") // svc.cluster.local may follow
	namespace = cmp.Or(namespace, api.Namespace)
	if namespace == "" {
		return p, "", "", config.Problems{{Key: key, Message: "needs " + what + ".NAMESPACE as its host, or discovery.kubernetes.namespace"}}
	}
	return kubePattern{engine: e, url: u, labels: labels}, name, namespace, nil
}

// watch adds a watch of the objects at path that match selector.
func (s *kubeSource) watch(api *kube.Client, path, selector string) *kube.Watch {
	t := &trouble{log: s.log, source: s.Name() + " " + path}
	w := kube.NewWatch(api, kube.Selected{Paths: []string{path}, Labels: selector}, t.note, func() {
		select {
		case s.changes <- struct{}{}:
		default:
		}
	})
	s.watches = append(s.watches, w)
	return w
}

// Name is the source of these engines in the registry.
func (*kubeSource) Name() string { return "kubernetes" }

// Run follows the EndpointSlices, and the pods, until ctx ends.
func (s *kubeSource) Run(ctx context.Context, found func([]config.Engine)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, w := range s.watches {
		wg.Go(func() { w.Run(ctx) })
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.changes:
			found(s.engines())
		}
	}
}

// engines lists the endpoints that take requests, sorted by name, each engine once.
func (s *kubeSource) engines() (list []config.Engine) {
	problems := map[string]string{}
	each := func(e config.Engine, err error) {
		switch {
		case err == nil && slices.ContainsFunc(list, func(o config.Engine) bool { return o.Name == e.Name }):
			// An endpoint is in two slices while it moves, or if it has addresses
			// of two families.
		case err == nil:
			list = append(list, e)
		default:
			problems[e.Name] = err.Error()
			if s.logged[e.Name] != err.Error() && s.refusals.Allow(e.Name) {
				level := slog.LevelError
				if errors.Is(err, errSkip) {
					level = slog.LevelInfo
				}
				s.log.Log(context.Background(), level, "endpoint refused", "source", s.Name(), "endpoint", excerpt(e.Name), "error", excerpt(err.Error()))
			}
		}
	}
	for _, k := range s.services {
		k.engines(each)
	}
	for _, k := range s.pools {
		k.engines(each)
	}
	s.logged = problems
	slices.SortFunc(list, func(a, b config.Engine) int { return cmp.Compare(a.Name, b.Name) })
	return list
}

// engines calls each for the endpoints that take requests. If the labels of a pod are
// needed, its endpoint is left out until they are known.
func (k *kubeService) engines(each func(config.Engine, error)) {
	all, _ := k.slices.Now()
	slices.SortFunc(all, func(a, b *kube.Object) int {
		return cmp.Or(cmp.Compare(a.AddressType, b.AddressType), cmp.Compare(a.Metadata.Name, b.Metadata.Name)) // IPv4 first
	})
	for _, slice := range all {
		for i := range slice.Endpoints {
			e := &slice.Endpoints[i]
			if !e.TakesRequests() {
				continue
			}
			var pod *kube.Object
			if ref := e.TargetRef; k.pods != nil && ref != nil && ref.Kind == "Pod" {
				pod = k.pods.Object(cmp.Or(ref.Namespace, slice.Metadata.Namespace), ref.Name)
				if pod == nil || pod.Metadata.UID != ref.UID || pod.Metadata.DeletionTimestamp != "" {
					continue
				}
			}
			each(k.engineAt(slice, e, pod))
		}
	}
}

// engineAt converts an endpoint to an engine; pod is nil if pods are not read. On an
// error the engine has only its name.
func (k *kubeService) engineAt(slice *kube.Object, at *kube.Endpoint, pod *kube.Object) (config.Engine, error) {
	name := at.Addresses[0]
	if at.TargetRef != nil && at.TargetRef.Name != "" {
		name = at.TargetRef.Name
	}
	port, err := k.port(slice)
	if err != nil {
		return config.Engine{Name: k.engine.Name + "@" + name}, err
	}
	return k.found(name, net.JoinHostPort(at.Addresses[0], port), at.Zone, pod, slice)
}

// found returns the engine of a pod or endpoint. The objects describe the engine by their
// labels and annotations, the first one with priority; nil objects are left out. On an error
// the engine has only its name.
func (p *kubePattern) found(name, address, zone string, objects ...*kube.Object) (config.Engine, error) {
	refused := config.Engine{Name: p.engine.Name + "@" + name}
	objects = slices.DeleteFunc(objects, func(o *kube.Object) bool { return o == nil })
	says := func(of func(*kube.Object) map[string]string, key string) string {
		for _, o := range objects {
			if text := of(o)[key]; text != "" {
				return text
			}
		}
		return ""
	}
	labels := func(o *kube.Object) map[string]string { return o.Metadata.Labels }
	annotations := func(o *kube.Object) map[string]string { return o.Metadata.Annotations }

	e, _ := atHost(p.engine, p.url, address)
	e.Name = refused.Name
	if is := says(labels, labelEngine); is != "" && !fits(is, e.Connector) {
		return refused, fmt.Errorf("label %s is %q, not an engine of connector %q: %w", labelEngine, excerpt(is), e.Connector, errSkip)
	}
	var err error
	if e.Role, err = roleOf(says(labels, labelRole), &e); err != nil {
		return refused, err
	}
	if is := says(annotations, annotationBootstrap); is != "" && e.Connector == config.ConnectorSGLang && e.Role != config.RoleDecode {
		if e.BootstrapPort, err = strconv.Atoi(is); err != nil || e.BootstrapPort < 1 {
			return refused, fmt.Errorf("annotation %s is %q, no port", annotationBootstrap, excerpt(is))
		}
	}
	e.Labels = p.labelsOf(zone, func(name string) string { return says(labels, name) })
	if err := e.Check(); err != nil {
		return refused, err
	}
	return e, nil
}

// labelsOf returns the labels of a found engine for policies. The pattern's own labels have priority.
// Next come the labels that the pattern copies from the pod. The zone of the node and the revision of the
// pod come last.
func (p *kubePattern) labelsOf(zone string, says func(string) string) config.Labels {
	labels := map[string]string{"zone": zone, "revision": cmp.Or(says("pod-template-hash"), says("controller-revision-hash"))}
	for name, pod := range p.labels {
		labels[name] = cmp.Or(says(pod), labels[name])
	}
	maps.Copy(labels, p.engine.Labels.Map())
	maps.DeleteFunc(labels, func(_, value string) bool { return value == "" })
	return config.LabelsOf(labels)
}

// port is the pattern's port, or else that of the slice: the only one, or the one named
// http.
func (k *kubeService) port(slice *kube.Object) (string, error) {
	if port := k.url.Port(); port != "" {
		return port, nil
	}
	for _, p := range slice.Ports {
		if (len(slice.Ports) == 1 || p.Name == "http") && p.Port > 0 {
			return strconv.Itoa(p.Port), nil
		}
	}
	return "", fmt.Errorf("EndpointSlice %s has neither one port nor one named http: give the url a port", slice.Key())
}

// roleOf returns the role in llm-d's label; without a label, e's own role. Encoders are
// supported only for vLLM.
func roleOf(label string, e *config.Engine) (string, error) {
	switch label {
	case "":
		return e.Role, nil
	case "prefill", "encode-prefill":
		return config.RolePrefill, nil
	case "decode":
		return config.RoleDecode, nil
	case "both", "prefill-decode", "encode-prefill-decode":
		return config.RoleBoth, nil
	case "encode":
		if strings.HasPrefix(e.Connector, "vllm-") {
			return config.RoleEncode, nil
		}
		return "", fmt.Errorf("label %s is %q: %w", labelRole, label, errSkip)
	default:
		return "", fmt.Errorf("label %s is %q, no role", labelRole, excerpt(label))
	}
}

// fits reports whether llm-d's name of an engine matches the connector.
func fits(engine, connector string) bool {
	switch connector {
	case config.ConnectorSGLang:
		return engine == "sglang"
	case config.ConnectorTRTLLM:
		return engine == "trtllm-serve"
	case config.ConnectorNone:
		return true
	default:
		return engine == "vllm"
	}
}
