package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

func (s *scene) write(name, text string) (path string, err error) {
	path = filepath.Join(s.dir, name)
	return path, os.WriteFile(path, []byte(text), 0o600)
}

func startPdproxy(connector, place string) func(*shelf, *scene) ([]program, error) {
	return func(h *shelf, s *scene) ([]program, error) {
		var more strings.Builder
		if place != "" {
			fmt.Fprintf(&more, "[policy]\nplace = %q\n", place)
		}
		engines := func(prefix, role string, addrs []string) {
			for i, a := range addrs {
				more.WriteString(engineEntry(fmt.Sprint(prefix, i), a, role, connector))
			}
		}
		if connector == "none" {
			engines("e", "both", s.engines)
		} else {
			engines("p", "prefill", s.prefill)
			engines("d", "decode", s.engines)
		}
		conf, err := pdproxyFile(s.dir, pdproxy, s.listen, more.String())
		return []program{{name: pdproxy, argv: []string{h.pdproxy, "run", conf}, ready: s.listen, path: "/health"}}, err
	}
}

func startNginx(h *shelf, s *scene) ([]program, error) {
	conf, err := nginxFile(s.dir, s.listen, s.engines[0], s.cores, h.descriptors)
	return []program{{name: nginx, argv: []string{nginx, "-e", "stderr", "-c", conf, "-g", "daemon off;"}, ready: s.listen}}, err
}

func startHAProxy(h *shelf, s *scene) ([]program, error) {
	conf, err := fill(s.dir, "haproxy.cfg", map[string]any{
		"Listen": s.listen, "Engines": s.engines, "Workers": s.cores,
		"Descriptors": h.descriptors, "Connections": h.descriptors/2 - 100,
	})
	return []program{{name: "haproxy", argv: []string{"haproxy", "-f", conf, "-db"}, ready: s.listen}}, err
}

func startEnvoy(h *shelf, s *scene) ([]program, error) {
	p, err := envoy(h, s, "")
	return []program{p}, err
}

// envoy is Envoy in front of all engines, or in front of those that a picker
// on a port names.
func envoy(h *shelf, s *scene, picker string) (program, error) {
	admin, err := freePort()
	if err != nil {
		return program{}, err
	}
	var ports []string
	for _, e := range s.engines {
		ports = append(ports, port(e))
	}
	conf, err := fill(s.dir, "envoy.yaml", map[string]any{"Admin": admin, "Port": port(s.listen), "Ports": ports, "Picker": picker})
	argv := []string{h.envoy(), "-c", conf, "--concurrency", strconv.Itoa(s.cores), "--use-dynamic-base-id", "--log-level", "warning"}
	return program{name: "envoy", argv: argv, ready: s.listen}, err
}

func startReverse(h *shelf, s *scene) ([]program, error) {
	return []program{{name: reverse, argv: []string{h.self, "reverse", "-listen", s.listen, "-upstream", s.engines[0]}, ready: s.listen}}, nil
}

// workers returns the flags that name the engines of a router of the SGLang
// family.
func (s *scene) workers(pd string) (argv []string) {
	if s.prefill == nil {
		return append([]string{"--worker-urls"}, urls(s.engines)...)
	}
	argv = append(argv, pd)
	for i, u := range urls(s.prefill) {
		argv = append(argv, "--prefill", u)
		if s.boot != nil {
			argv = append(argv, strconv.Itoa(s.boot[i]))
		}
	}
	for _, u := range urls(s.engines) {
		argv = append(argv, "--decode", u)
	}
	return argv
}

func startVLLMRouter(policy string) func(*shelf, *scene) ([]program, error) {
	return func(h *shelf, s *scene) ([]program, error) {
		metrics, err := freePort()
		if err != nil {
			return nil, err
		}
		argv := append([]string{h.venv("vllm-router", "vllm-router"), "--host", "127.0.0.1", "--port", port(s.listen), "--prometheus-port", metrics},
			s.workers("--vllm-pd-disaggregation")...)
		if policy != "" {
			argv = append(argv, "--policy", policy)
		}
		return []program{{name: "vllm-router", argv: argv, ready: s.listen}}, nil
	}
}

// startSGLangRouter starts sglang-router, or SMG, its successor, which has its
// flags.
func startSGLangRouter(software string) func(*shelf, *scene) ([]program, error) {
	return func(h *shelf, s *scene) ([]program, error) {
		metrics, err := freePort()
		if err != nil {
			return nil, err
		}
		argv := []string{h.venv(software, "python"), "-m", "sglang_router.launch_router"}
		if software == "smg" {
			argv = []string{h.venv(software, "smg"), "launch"}
		}
		argv = append(argv, "--host", "127.0.0.1", "--port", port(s.listen), "--prometheus-port", metrics)
		argv = append(argv, s.workers("--pd-disaggregation")...)
		return []program{{name: software, argv: argv, ready: s.listen}}, nil
	}
}

func startLLMD(h *shelf, s *scene) ([]program, error) {
	if h.sources["LLMD_EPP"] == "" {
		return nil, errSource("LLMD_EPP", "llm-d's endpoint picker: go build ./cmd/epp in a checkout of llm-d-router")
	}
	list := "endpoints:\n"
	for i, e := range s.engines {
		list += fmt.Sprintf("- {name: e%d, address: \"127.0.0.1\", port: %q}\n", i, port(e))
	}
	endpoints, err := s.write("endpoints.yaml", list)
	if err != nil {
		return nil, err
	}
	conf, err := fill(s.dir, "epp.yaml", map[string]any{"Endpoints": endpoints})
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	front, err := envoy(h, s, ports[0])
	epp := program{name: "llm-d-epp", ready: "127.0.0.1:" + ports[0], argv: []string{
		h.sources["LLMD_EPP"], "--config-file=" + conf, "--pool-name=pool", "--pool-namespace=default",
		"--grpc-port=" + ports[0], "--grpc-health-port=" + ports[1], "--metrics-port=" + ports[2],
		"--metrics-endpoint-auth=false", "--secure-serving=false", "--tracing=false", "--zap-devel=false", "-v=0"}}
	return []program{front, epp}, err
}

func startLLMDSidecar(h *shelf, s *scene) ([]program, error) {
	if h.sources["LLMD_SIDECAR"] == "" {
		return nil, errSource("LLMD_SIDECAR", "llm-d's sidecar: go build ./cmd/pd-sidecar in a checkout of llm-d-router")
	}
	return []program{{name: "llm-d-sidecar", ready: s.listen, argv: []string{
		h.sources["LLMD_SIDECAR"], "--port=" + port(s.listen), "--vllm-port=" + port(s.engines[0]), "--kv-connector=nixlv2", "--secure-proxy=false"}}}, nil
}

func errSource(variable, what string) error {
	return fmt.Errorf("no package of it is in a registry: %s names the program (%s)", variable, what)
}
