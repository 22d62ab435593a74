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
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/pdproxy/pdproxy/proxy/config"
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

// kubeSource follows the EndpointSlices of Services: each endpoint that takes requests
// is an engine.
type kubeSource struct {
	services []*kubeService
	watches  []*kubeWatch
	changes  chan struct{} // has room for one: objects have changed since the last list
	log      *slog.Logger
	logged   map[string]string // the logged problems of endpoints; used by Run only
}

// kubeService is one pattern.
type kubeService struct {
	pattern config.Engine
	url     *url.URL
	slices  *kubeWatch
	pods    *kubeWatch // nil: pods are not read
}

// newKubernetes reads the files that cfg names, and opens nothing else.
func newKubernetes(cfg config.DiscoveryKubernetes, log *slog.Logger) (*kubeSource, error) {
	api, err := newKubeAPI(cfg, serviceAccount, os.Getenv)
	if err != nil {
		return nil, err
	}
	s := &kubeSource{log: log, changes: make(chan struct{}, 1)}
	pods := map[string]*kubeWatch{} // by namespace
	for i, e := range cfg.Engines {
		u, err := url.Parse(e.URL)
		if err != nil { // cannot happen: cfg was validated
			continue
		}
		service, rest, _ := strings.Cut(u.Hostname(), ".")
		namespace, _, _ := strings.Cut(rest, ".") // svc.cluster.local may follow
		namespace = cmp.Or(namespace, api.namespace)
		if namespace == "" {
			return nil, config.Problems{{Key: fmt.Sprintf("discovery.kubernetes.engine[%d].url", i), Message: "needs SERVICE.NAMESPACE as its host, or discovery.kubernetes.namespace"}}
		}
		k := &kubeService{pattern: e, url: u, slices: s.watch(api,
			"/apis/discovery.k8s.io/v1/namespaces/"+url.PathEscape(namespace)+"/endpointslices", "kubernetes.io/service-name="+service)}
		if cfg.Pods != "" {
			if pods[namespace] == nil {
				pods[namespace] = s.watch(api, "/api/v1/namespaces/"+url.PathEscape(namespace)+"/pods", strings.TrimPrefix(cfg.Pods, "*"))
			}
			k.pods = pods[namespace]
		}
		s.services = append(s.services, k)
	}
	return s, nil
}

// watch adds a watch of the objects at path that match selector.
func (s *kubeSource) watch(api *kubeAPI, path, selector string) *kubeWatch {
	w := &kubeWatch{
		api: api, path: path, selector: selector, trouble: trouble{log: s.log, source: s.Name() + " " + path},
		changed: func() {
			select {
			case s.changes <- struct{}{}:
			default:
			}
		},
	}
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
		wg.Go(func() { w.run(ctx) })
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
	for _, k := range s.services {
		k.engines(func(e config.Engine, err error) {
			switch {
			case err == nil && slices.ContainsFunc(list, func(o config.Engine) bool { return o.Name == e.Name }):
				// An endpoint is in two slices while it moves, or if it has addresses
				// of two families.
			case err == nil:
				list = append(list, e)
			default:
				problems[e.Name] = err.Error()
				if s.logged[e.Name] != err.Error() {
					level := slog.LevelError
					if errors.Is(err, errSkip) {
						level = slog.LevelInfo
					}
					s.log.Log(context.Background(), level, "endpoint refused", "source", s.Name(), "endpoint", e.Name, "error", err)
				}
			}
		})
	}
	s.logged = problems
	slices.SortFunc(list, func(a, b config.Engine) int { return cmp.Compare(a.Name, b.Name) })
	return list
}

// engines calls each for the endpoints that take requests. If the labels of a pod are
// needed, its endpoint is left out until they are known.
func (k *kubeService) engines(each func(config.Engine, error)) {
	all, _ := k.slices.now()
	slices.SortFunc(all, func(a, b *kubeObject) int {
		return cmp.Or(cmp.Compare(a.AddressType, b.AddressType), cmp.Compare(a.Metadata.Name, b.Metadata.Name)) // IPv4 first
	})
	for _, slice := range all {
		for i := range slice.Endpoints {
			e := &slice.Endpoints[i]
			if !e.takesRequests() {
				continue
			}
			var pod *kubeObject
			if ref := e.TargetRef; k.pods != nil && ref != nil && ref.Kind == "Pod" {
				pod = k.pods.object(cmp.Or(ref.Namespace, slice.Metadata.Namespace), ref.Name)
				if pod == nil || pod.Metadata.UID != ref.UID || pod.Metadata.DeletionTimestamp != "" {
					continue
				}
			}
			each(k.engine(slice, e, pod))
		}
	}
}

// engine converts an endpoint to an engine; pod is nil if pods are not read. On an
// error the engine has only its name.
func (k *kubeService) engine(slice *kubeObject, at *kubeEndpoint, pod *kubeObject) (config.Engine, error) {
	says := func(of func(*kubeObject) map[string]string, key string) string {
		if pod != nil && of(pod)[key] != "" {
			return of(pod)[key]
		}
		return of(slice)[key]
	}
	labels := func(o *kubeObject) map[string]string { return o.Metadata.Labels }
	annotations := func(o *kubeObject) map[string]string { return o.Metadata.Annotations }

	name := at.Addresses[0]
	if at.TargetRef != nil && at.TargetRef.Name != "" {
		name = at.TargetRef.Name
	}
	refused := config.Engine{Name: k.pattern.Name + "@" + name}
	port, err := k.port(slice)
	if err != nil {
		return refused, err
	}
	e, _ := atHost(k.pattern, k.url, net.JoinHostPort(at.Addresses[0], port))
	e.Name = refused.Name
	if is := says(labels, labelEngine); is != "" && !fits(is, e.Connector) {
		return refused, fmt.Errorf("label %s is %q, not an engine of connector %q: %w", labelEngine, clip(is), e.Connector, errSkip)
	}
	if e.Role, err = roleOf(says(labels, labelRole), &e); err != nil {
		return refused, err
	}
	if is := says(annotations, annotationBootstrap); is != "" && e.Connector == config.ConnectorSGLang && e.Role != config.RoleDecode {
		if e.BootstrapPort, err = strconv.Atoi(is); err != nil || e.BootstrapPort < 1 {
			return refused, fmt.Errorf("annotation %s is %q, no port", annotationBootstrap, clip(is))
		}
	}
	e.Labels = labelsOf(k.pattern.Labels, at, pod)
	if err := e.Check(); err != nil {
		return refused, err
	}
	return e, nil
}

// labelsOf returns the labels of an endpoint's engine for policies: the zone of its
// node, its pod's revision if pods are read, and the pattern's labels, which come first.
func labelsOf(pattern config.Labels, at *kubeEndpoint, pod *kubeObject) config.Labels {
	labels := map[string]string{}
	if at.Zone != "" {
		labels["zone"] = at.Zone
	}
	if pod != nil {
		of := pod.Metadata.Labels
		if revision := cmp.Or(of["pod-template-hash"], of["controller-revision-hash"]); revision != "" {
			labels["revision"] = revision
		}
	}
	maps.Copy(labels, pattern.Map())
	return config.LabelsOf(labels)
}

// port is the pattern's port, or else that of the slice: the only one, or the one named
// http.
func (k *kubeService) port(slice *kubeObject) (string, error) {
	if port := k.url.Port(); port != "" {
		return port, nil
	}
	for _, p := range slice.Ports {
		if (len(slice.Ports) == 1 || p.Name == "http") && p.Port > 0 {
			return strconv.Itoa(p.Port), nil
		}
	}
	return "", fmt.Errorf("EndpointSlice %s has neither one port nor one named http: give the url a port", slice.key())
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
		return "", fmt.Errorf("label %s is %q, no role", labelRole, clip(label))
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
