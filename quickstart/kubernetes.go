package quickstart

import (
	"fmt"
	"strings"
)

// podIP is the own address of a container. Kubernetes replaces it in commands and variables.
const podIP = "$(POD_IP)"

// Kubernetes returns kubernetes.yaml: a Deployment and a Service for each process. An engine has
// the address of its pod; the proxy and other engines find it by the name of its Service. The other
// flags and ports are those of the scripts.
func (p *Plan) Kubernetes() string {
	q := p.inPods()
	objects := []any{kubernetesObject("v1", "ConfigMap", "pdproxy", "data", map[string]string{"config.toml": q.names(q.Config, "")})}
	if len(q.Files) > 0 {
		files := make(map[string]string)
		for _, f := range q.Files {
			files[f.Name] = q.names(f.Text, "")
		}
		objects = append(objects, kubernetesObject("v1", "ConfigMap", "engine-files", "data", files))
	}
	for i := range q.Services {
		s := &q.Services[i]
		objects = append(objects, workload(s.Name, q.podOf(s.Name, s.Command, nil), lmcachePort)...)
	}
	for i := range q.Engines {
		e := &q.Engines[i]
		pod := q.podOf(e.Name, e.Command, e.Env)
		c := pod["containers"].([]any)[0].(map[string]any)
		gpu := "nvidia.com/gpu"
		if p.guide.amd {
			gpu = "amd.com/gpu"
		}
		c["resources"] = map[string]any{"limits": map[string]any{gpu: p.tp}}
		c["readinessProbe"] = probe(e.Port)
		objects = append(objects, workload(e.Name, pod, e.Port)...)
	}
	objects = append(objects, workload("pdproxy", map[string]any{
		"containers": []any{map[string]any{
			"name": "pdproxy", "image": proxyImage + p.proxy, "readinessProbe": probe(proxyPort),
			"volumeMounts": []any{map[string]any{"name": "config", "mountPath": proxyFolder}},
		}},
		"volumes": []any{map[string]any{"name": "config", "configMap": map[string]any{"name": "pdproxy"}}},
	}, proxyPort)...)
	if q.encode {
		objects = append(objects, kubernetesObject("v1", "PersistentVolumeClaim", "encoder-cache", "spec", map[string]any{
			"accessModes": []string{"ReadWriteMany"}, "resources": map[string]any{"requests": map[string]any{"storage": "10Gi"}},
		}))
	}
	return fmt.Sprintf(`# The quickstart %s in a namespace of its own. The Helm chart is the way to more proxies:
#   kubectl create namespace pdproxy
#   kubectl -n pdproxy apply -f kubernetes.yaml
#   kubectl -n pdproxy port-forward service/pdproxy %d
`, p.Name, proxyPort) + toYAML(objects...)
}

// The addresses of documentation (RFC 5737) stand for the processes until names replaces them.
const (
	podAddress     = "198.51.100.%d" // engine number n has n+1
	serviceAddress = "192.0.2.1"     // the services beside the engines
)

// inPods returns the plan for pods: each engine has an address and GPUs of its own.
func (p *Plan) inPods() *Plan {
	o := p.options
	o.Hosts = []string{serviceAddress}
	if len(p.hosts) > 1 { // then the engines use the network between hosts
		o.Hosts = append(o.Hosts, "192.0.2.2")
	}
	return build(p.guide, o, func(e *Engine) {
		e.Host, e.bind, e.Env = fmt.Sprintf(podAddress, e.first+1), "0.0.0.0", nil
	})
}

// names replaces the addresses of processes by the names of their Services, and that of the process
// called self by its own address.
func (p *Plan) names(text, self string) string {
	pairs := []string{}
	for i := len(p.Engines) - 1; i >= 0; i-- { // 198.51.100.10 before 198.51.100.1
		e := &p.Engines[i]
		name := e.Name
		if name == self {
			name = podIP
		}
		pairs = append(pairs, e.Host, name)
	}
	for _, s := range p.Services {
		pairs = append(pairs, s.Host, s.Name)
	}
	return strings.NewReplacer(pairs...).Replace(text)
}

// podOf returns the pod of a process.
func (p *Plan) podOf(name string, command, env []string) map[string]any {
	all := []any{map[string]any{"name": "POD_IP", "valueFrom": map[string]any{"fieldRef": map[string]any{"fieldPath": "status.podIP"}}}}
	for _, v := range env {
		name1, value, _ := strings.Cut(v, "=")
		all = append(all, map[string]any{"name": name1, "value": p.names(value, name)})
	}
	args := make([]string, len(command))
	for i, arg := range command {
		args[i] = p.names(arg, name)
	}
	c := map[string]any{"name": "main", "image": p.guide.image(), "command": args, "env": all}
	mounts := []any{map[string]any{"name": "shm", "mountPath": "/dev/shm"}}
	volumes := []any{map[string]any{"name": "shm", "emptyDir": map[string]any{"medium": "Memory"}}}
	if len(p.Files) > 0 {
		c["workingDir"] = workFolder
		mounts = append(mounts, map[string]any{"name": "files", "mountPath": workFolder})
		volumes = append(volumes, map[string]any{"name": "files", "configMap": map[string]any{"name": "engine-files"}})
	}
	if p.encode {
		mounts = append(mounts, map[string]any{"name": "encoder-cache", "mountPath": p.encoderFolder()})
		volumes = append(volumes, map[string]any{"name": "encoder-cache", "persistentVolumeClaim": map[string]any{"claimName": "encoder-cache"}})
	}
	c["volumeMounts"] = mounts
	return map[string]any{"containers": []any{c}, "volumes": volumes}
}

// workload returns the Deployment and the Service of one pod. The Service of an engine has no
// address of its own, and answers before the pod is ready: engines call each other at any port.
func workload(name string, pod map[string]any, port int) []any {
	labels := map[string]any{"app.kubernetes.io/part-of": "pdproxy-quickstart", "app.kubernetes.io/name": name}
	service := map[string]any{"selector": labels, "ports": []any{map[string]any{"name": "http", "port": port}}}
	if port != proxyPort {
		service["clusterIP"], service["publishNotReadyAddresses"] = "None", true
	}
	return []any{
		kubernetesObject("apps/v1", "Deployment", name, "spec", map[string]any{
			"replicas": 1, "strategy": map[string]any{"type": "Recreate"}, // the GPUs are in use
			"selector": map[string]any{"matchLabels": labels},
			"template": map[string]any{"metadata": map[string]any{"labels": labels}, "spec": pod},
		}),
		kubernetesObject("v1", "Service", name, "spec", service),
	}
}

// probe asks an engine or the proxy whether it can serve requests.
func probe(port int) map[string]any {
	return map[string]any{"httpGet": map[string]any{"path": "/health", "port": port}, "periodSeconds": 5}
}

// kubernetesObject returns an object of Kubernetes with one member.
func kubernetesObject(version, kind, name, member string, value any) map[string]any {
	return map[string]any{"apiVersion": version, "kind": kind, "metadata": map[string]any{"name": name}, member: value}
}
