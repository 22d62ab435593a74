package quickstart

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// folders writes the files of every quickstart with the command that users run.
func folders(t *testing.T) map[string]string {
	program := filepath.Join(t.TempDir(), "pdproxy")
	build := exec.Command("go", "build", "-o", program, "./cmd/pdproxy")
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	list, err := exec.Command(program, "quickstart").Output()
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]string)
	for line := range strings.Lines(string(list)) {
		name := strings.Fields(line)[0]
		for suffix, flags := range map[string][]string{
			"one host":  {"--prefill", "2"},
			"two hosts": {"--host", "10.0.0.5,10.0.0.6", "--tp", "2", "--model", "a model with $x"},
			"encoder":   {"--encode", "1"},
		} {
			if suffix == "encoder" && !strings.HasPrefix(name, "vllm-") {
				continue
			}
			dir := filepath.Join(t.TempDir(), "files")
			if out, err := exec.Command(program, append([]string{"quickstart", name, "--out", dir}, flags...)...).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", name, err, out)
			}
			all[name+", "+suffix] = dir
		}
	}
	if len(all) < 20 {
		t.Fatalf("%d folders", len(all))
	}
	return all
}

// TestFiles: Compose and Kubernetes accept the files, which have no unknown field.
func TestFiles(t *testing.T) {
	for name, dir := range folders(t) {
		t.Run(name, func(t *testing.T) {
			compose(t, dir)
			kubernetes(t, dir)
		})
	}
}

// compose loads the file as `docker compose config` does: against the schema of the specification,
// and with interpolation.
func compose(t *testing.T, dir string) {
	o, err := cli.NewProjectOptions([]string{filepath.Join(dir, "docker-compose.yaml")}, cli.WithEnv([]string{"HOME=/home/user"}), cli.WithProfiles([]string{"*"}))
	if err != nil {
		t.Fatal(err)
	}
	project, err := o.LoadProject(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	engines := 0
	for _, s := range project.Services {
		script, err := os.ReadFile(filepath.Join(dir, s.Name+".sh"))
		if s.Name == "pdproxy" && errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		engines++
		// The shell of the script gives the words of the command.
		text := strings.Replace(string(script), "exec ", "printf '%s\\n' ", 1)
		if s.Name == "lmcache-server" {
			text = strings.Replace(text, "lmcache_server", "printf '%s\\n' lmcache_server", 1)
		}
		out, err := exec.Command("bash", "-c", text).CombinedOutput()
		if got := strings.Join(append(s.Entrypoint, s.Command...), "\n") + "\n"; err != nil || got != string(out) {
			t.Errorf("%s: %q, the script %q, %v", s.Name, got, out, err)
		}
	}
	if engines < 2 {
		t.Errorf("%d engines", engines)
	}
}

// kubernetes decodes each object strictly, as the API server does with fieldValidation=Strict.
func kubernetes(t *testing.T, dir string) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, appsv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	text, err := os.ReadFile(filepath.Join(dir, "kubernetes.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	kinds := make(map[string]int)
	for documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text))); ; {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		object, kind, err := decoder.Decode(document, nil, nil)
		if err != nil {
			t.Fatalf("%v\n%s", err, document)
		}
		kinds[kind.Kind]++
		if d, ok := object.(*appsv1.Deployment); ok {
			deployment(t, d)
		}
	}
	if kinds["Deployment"] < 3 || kinds["Deployment"] != kinds["Service"] || kinds["ConfigMap"] < 1 {
		t.Errorf("%v", kinds)
	}
}

// deployment checks that the labels select the pod and that each mount has its volume.
func deployment(t *testing.T, d *appsv1.Deployment) {
	for name, value := range d.Spec.Selector.MatchLabels {
		if d.Spec.Template.Labels[name] != value {
			t.Errorf("%s selects other pods", d.Name)
		}
	}
	volumes := make(map[string]bool)
	for _, v := range d.Spec.Template.Spec.Volumes {
		volumes[v.Name] = true
	}
	for _, m := range d.Spec.Template.Spec.Containers[0].VolumeMounts {
		if !volumes[m.Name] {
			t.Errorf("%s: no volume %s", d.Name, m.Name)
		}
	}
}
