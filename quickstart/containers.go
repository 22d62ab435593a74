package quickstart

import (
	"bytes"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Names of the files for containers.
const (
	composeFile    = "docker-compose.yaml"
	kubernetesFile = "kubernetes.yaml"
)

// Images of the engines. Each project publishes its releases under these names.
const (
	vllmImage   = "vllm/vllm-openai:v" + vllmRelease
	rocmImage   = "vllm/vllm-openai-rocm:latest"
	sglangImage = "lmsysorg/sglang:v" + sglangRelease
	trtllmImage = "nvcr.io/nvidia/tensorrt-llm/release:" + trtllmRelease
	proxyImage  = "ghcr.io/pdproxy/pdproxy:"
)

// image is the image with the program and the packages of the quickstart.
func (g *guide) image() string {
	switch {
	case g.amd:
		return rocmImage
	case strings.HasPrefix(g.connector, "vllm-"):
		return vllmImage
	case g.connector == "sglang":
		return sglangImage
	}
	return trtllmImage
}

// Paths in the containers.
const (
	workFolder  = "/deployment"              // the files that engines read
	modelFolder = "/root/.cache/huggingface" // the models that engines have downloaded
	proxyFolder = "/etc/pdproxy"             // the configuration of the proxy
)

// Compose returns docker-compose.yaml. The containers share the network and the GPUs of their host,
// so that addresses, ports and variables are those of the scripts.
func (p *Plan) Compose() string {
	services := make(map[string]any)
	for i := range p.Services {
		s := &p.Services[i]
		services[s.Name] = p.composed(s.Host, s.Command, nil)
	}
	for i := range p.Engines {
		e := &p.Engines[i]
		one := p.composed(e.Host, e.Command, e.Env)
		if p.guide.amd {
			one["devices"], one["group_add"], one["security_opt"] = []string{"/dev/kfd", "/dev/dri"}, []string{"video"}, []string{"seccomp=unconfined"}
		} else {
			one["deploy"] = map[string]any{"resources": map[string]any{"reservations": map[string]any{"devices": []any{
				map[string]any{"driver": "nvidia", "count": "all", "capabilities": []string{"gpu"}}, // the environment chooses the GPUs
			}}}}
		}
		services[e.Name] = one
	}
	proxy := p.composed(p.hosts[0], nil, nil)
	proxy["image"], proxy["volumes"] = proxyImage+p.proxy, []string{"./config.toml:" + proxyFolder + "/config.toml:ro"}
	delete(proxy, "ipc")
	delete(proxy, "working_dir")
	services["pdproxy"] = proxy
	text := fmt.Sprintf("# The quickstart %s in containers. The commands are those of the scripts.\n", p.Name)
	if len(p.hosts) > 1 {
		text += "# Copy this folder to each host, and start the services of the host, for example:\n" +
			"#   docker compose --profile " + profile(p.hosts[0]) + " up\n"
	} else {
		text += "#   docker compose up\n"
	}
	return text + toYAML(map[string]any{"name": "pdproxy-" + p.Name, "services": services})
}

// composed returns a service of docker-compose.yaml.
func (p *Plan) composed(host string, command, env []string) map[string]any {
	volumes := []string{"./:" + workFolder + ":ro", "${HOME}/.cache/huggingface:" + modelFolder}
	if p.encode {
		folder := p.encoderFolder()
		volumes = append(volumes, folder+":"+folder)
	}
	s := map[string]any{
		"image": p.guide.image(), "network_mode": "host", "ipc": "host", "restart": "unless-stopped",
		"working_dir": workFolder, "volumes": volumes,
	}
	if len(command) > 0 {
		s["entrypoint"], s["command"] = escapeCompose(command[:1]), escapeCompose(command[1:])
	}
	if len(env) > 0 {
		s["environment"] = escapeCompose(env)
	}
	if len(p.hosts) > 1 {
		s["profiles"] = []string{profile(host)}
	}
	return s
}

// profile is the name of the services of a host.
func profile(host string) string { return "host-" + strings.ReplaceAll(host, ".", "-") }

// escapeCompose returns texts that Compose does not interpolate.
func escapeCompose(texts []string) []string {
	escaped := make([]string, len(texts))
	for i, text := range texts {
		escaped[i] = strings.ReplaceAll(text, "$", "$$")
	}
	return escaped
}

// toYAML writes documents.
func toYAML(documents ...any) string {
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	for _, d := range documents {
		if err := e.Encode(d); err != nil {
			panic(err) // the documents hold only texts, numbers, lists and maps
		}
	}
	return b.String()
}
