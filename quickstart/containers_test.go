package quickstart

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// deployments are options whose files differ.
var deployments = []Options{
	{Prefill: 1, Decode: 1, TP: 1, Hosts: []string{"127.0.0.1"}, Proxy: "0.1.0"},
	{Prefill: 6, Decode: 6, TP: 2, Hosts: []string{"10.0.0.5", "10.0.0.6"}, Model: "a$b'c", Proxy: "0.1.0"},
	{Prefill: 1, Decode: 1, Encode: 1, TP: 1, Hosts: []string{"127.0.0.1"}, Proxy: "0.1.0"},
}

// plans calls use with every deployment of every quickstart.
func plans(t *testing.T, use func(t *testing.T, p *Plan)) {
	for _, s := range List() {
		for _, o := range deployments {
			p, err := Make(s.Name, o)
			if err != nil && o.Encode > 0 {
				continue // without encoders
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Run(s.Name, func(t *testing.T) { use(t, p) })
		}
	}
}

// TestCompose: each service has the command and the environment of its script.
func TestCompose(t *testing.T) {
	plans(t, func(t *testing.T, p *Plan) {
		var file struct {
			Services map[string]struct {
				Image               string
				Entrypoint, Command []string
				Environment         []string
				Profiles            []string
			}
		}
		if err := yaml.Unmarshal([]byte(p.Compose()), &file); err != nil {
			t.Fatal(err)
		}
		if want := len(p.Engines) + len(p.Services) + 1; len(file.Services) != want {
			t.Errorf("%d services, want %d", len(file.Services), want)
		}
		plain := func(list []string) []string {
			list = slices.Clone(list)
			for i := range list {
				list[i] = strings.ReplaceAll(list[i], "$$", "$") // as Compose does
			}
			return list
		}
		for _, e := range p.Engines {
			s := file.Services[e.Name]
			if command := plain(slices.Concat(s.Entrypoint, s.Command)); !slices.Equal(command, e.Command) || !slices.Equal(plain(s.Environment), e.Env) || s.Image == "" {
				t.Errorf("%s: %q with %q of %q", e.Name, command, s.Environment, s.Image)
			}
			if want := len(p.hosts) > 1; want != slices.Equal(s.Profiles, []string{"host-" + strings.ReplaceAll(e.Host, ".", "-")}) {
				t.Errorf("%s on %s has the profiles %q", e.Name, e.Host, s.Profiles)
			}
		}
		if s := file.Services["pdproxy"]; s.Image != "ghcr.io/pdproxy/pdproxy:0.1.0" || s.Command != nil {
			t.Errorf("%+v", s)
		}
	})
}

// TestKubernetes: each pod has the command of its script, apart from addresses. The proxy and the
// engines name only Services of the file, and the configuration is one that the proxy accepts.
func TestKubernetes(t *testing.T) {
	plans(t, func(t *testing.T, p *Plan) {
		text := p.Kubernetes()
		if strings.Contains(text, "198.51.100") || strings.Contains(text, "192.0.2.") || strings.Contains(text, p.hosts[0]) {
			t.Errorf("an address is left:\n%s", text)
		}
		commands, services := make(map[string][]string), make(map[string]bool)
		var cfg config.Config
		for d := yaml.NewDecoder(strings.NewReader(text)); ; {
			var o struct {
				Kind     string
				Metadata struct{ Name string }
				Data     map[string]string
				Spec     struct {
					Template struct {
						Spec struct {
							Containers []struct{ Command []string }
						}
					}
				}
			}
			if err := d.Decode(&o); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			switch {
			case o.Kind == "Deployment":
				commands[o.Metadata.Name] = o.Spec.Template.Spec.Containers[0].Command
			case o.Kind == "Service":
				services[o.Metadata.Name] = true
			case o.Data["config.toml"] != "":
				var err error
				if cfg, err = config.Parse([]byte(o.Data["config.toml"])); err != nil {
					t.Fatal(err)
				}
			}
		}
		if len(cfg.Engines) != len(p.Engines) || len(commands) != len(p.Engines)+len(p.Services)+1 || len(services) != len(commands) {
			t.Fatalf("%d engines, %d pods, %d services", len(cfg.Engines), len(commands), len(services))
		}
		for i, e := range p.Engines {
			if want := "http://" + e.Name + ":"; !strings.HasPrefix(cfg.Engines[i].URL, want) || !services[e.Name] {
				t.Errorf("%s has the URL %s", e.Name, cfg.Engines[i].URL)
			}
			got := commands[e.Name]
			if len(got) != len(e.Command) {
				t.Fatalf("%s: %q, want %q", e.Name, got, e.Command)
			}
			for n, arg := range e.Command {
				if arg == e.bind && e.Command[n-1] == "--host" {
					arg = "0.0.0.0"
				}
				if got[n] != arg {
					t.Errorf("%s: argument %q, want %q", e.Name, got[n], arg)
				}
			}
		}
	})
}

// TestPodAddresses: an engine has its own address, and others have the names of their Services.
func TestPodAddresses(t *testing.T) {
	o := deployments[0]
	o.Prefill = 12
	for name, want := range map[string][]string{
		"vllm-nixl":      {"value: $(POD_IP)"},
		"vllm-nixl-push": {"side_channel = \"prefill-11:5611\"", "side_channel = \"prefill-1:5601\""},
		"vllm-moriio":    {"kv_address = \"host:decode-0,handshake:", "amd.com/gpu: 1"},
		"vllm-store":     {`remote_url: "lm://lmcache-server:65432"`, "nvidia.com/gpu: 1"},
	} {
		p, err := Make(name, o)
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range want {
			if text := p.Kubernetes(); !strings.Contains(text, part) {
				t.Errorf("%s: no %q in\n%s", name, part, text)
			}
		}
	}
}
