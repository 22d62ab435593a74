package discovery

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/kube"
)

// kubePool is the pattern for the pods of one InferencePool of the Gateway API Inference
// Extension. Source: gateway-api-inference-extension, api/v1/inferencepool_types.go: each
// target port of each pod is an endpoint of its own.
type kubePool struct {
	kubePattern
	name, namespace string
	pools           *kube.Watch // all InferencePools of the namespace
	pods            *kube.Watch // all pods of the namespace that discovery.kubernetes.pods selects
}

// engines calls each for the pods that take requests. Without the pool there are none.
func (k *kubePool) engines(each func(config.Engine, error)) {
	pool := k.pools.Object(k.namespace, k.name)
	if pool == nil || len(pool.Spec.Selector.MatchLabels) == 0 {
		return
	}
	ports := k.ports(pool)
	pods, _ := k.pods.Now()
	slices.SortFunc(pods, func(a, b *kube.Object) int { return cmp.Compare(a.Metadata.Name, b.Metadata.Name) })
	for _, pod := range pods {
		if !hasLabels(pod, pool.Spec.Selector.MatchLabels) || !podTakesRequests(pod) {
			continue
		}
		if len(ports) == 0 {
			each(config.Engine{Name: k.engine.Name + "@" + pod.Metadata.Name},
				fmt.Errorf("InferencePool %s has no valid target port: give the url a port", pool.Key()))
			continue
		}
		for _, port := range ports {
			name := pod.Metadata.Name
			if len(ports) > 1 {
				name += ":" + port
			}
			each(k.found(name, net.JoinHostPort(pod.Status.PodIP, port), "", pod))
		}
	}
}

// ports returns the pattern's port, or else the target ports of the pool.
func (k *kubePool) ports(pool *kube.Object) (ports []string) {
	if port := k.url.Port(); port != "" {
		return []string{port}
	}
	for _, p := range pool.Spec.TargetPorts {
		if p.Number > 0 && p.Number < 1<<16 {
			ports = append(ports, strconv.Itoa(p.Number))
		}
	}
	return ports
}

// hasLabels reports whether the object has all these labels.
func hasLabels(o *kube.Object, want map[string]string) bool {
	for key, value := range want {
		if got, ok := o.Metadata.Labels[key]; !ok || got != value {
			return false
		}
	}
	return true
}

// podTakesRequests reports whether new requests may go to a pod: it has an address, is
// ready, and does not terminate.
func podTakesRequests(o *kube.Object) bool {
	if o.Status.PodIP == "" || o.Metadata.DeletionTimestamp != "" {
		return false
	}
	for _, c := range o.Status.Conditions {
		if c.Type == "Ready" {
			return c.Status == "True"
		}
	}
	return false
}
