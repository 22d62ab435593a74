package manifests

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// sources are the modules of the Go module proxy that contain the custom resource definitions
// for deploy/gateway, with their files.
var sources = map[string][]string{
	"sigs.k8s.io/gateway-api@v1.5.1":                     {"config/crd/standard/*.yaml"},
	"sigs.k8s.io/gateway-api-inference-extension@v1.6.0": {"config/crd/bases/*.yaml"},
	"istio.io/api@v1.28.0":                               {"kubernetes/customresourcedefinitions.gen.yaml"},
	"github.com/envoyproxy/gateway@v1.6.0":               {"charts/gateway-helm/crds/generated/*.yaml"},
}

// TestGatewayManifests: each custom resource of deploy/gateway has the schema of the gateway's
// own release, and no field that the schema does not have.
func TestGatewayManifests(t *testing.T) {
	schemas := definitions(t)
	checked := map[string]int{}
	paths, err := filepath.Glob("../../../../deploy/gateway/*.yaml")
	if err != nil || len(paths) == 0 {
		t.Fatal(paths, err)
	}
	for _, path := range paths {
		for _, object := range documents[map[string]any](t, path) {
			apiVersion, _ := object["apiVersion"].(string)
			kind, _ := object["kind"].(string)
			name := apiVersion + " " + kind
			schema, ok := schemas[name]
			if !ok {
				switch apiVersion {
				case "v1", "apps/v1", "rbac.authorization.k8s.io/v1": // the API server of make test-kubernetes knows these
				default:
					t.Errorf("%s: no definition of %s", path, name)
				}
				continue
			}
			checked[name]++
			check(t, path+" "+name, schema, object)
		}
	}
	for _, name := range []string{
		"gateway.networking.k8s.io/v1 HTTPRoute", "inference.networking.k8s.io/v1 InferencePool", "networking.istio.io/v1 DestinationRule",
		"gateway.envoyproxy.io/v1alpha1 EnvoyExtensionPolicy", "gateway.envoyproxy.io/v1alpha1 BackendTrafficPolicy",
	} {
		if checked[name] == 0 {
			t.Errorf("no manifest has a %s", name)
		}
	}
}

// check reports what the schema does not allow.
func check(t *testing.T, name string, schema *apiextensions.JSONSchemaProps, object map[string]any) {
	t.Helper()
	validator, _, err := validation.NewSchemaValidator(schema)
	if err != nil {
		t.Fatal(name, err)
	}
	for _, err := range validation.ValidateCustomResource(nil, object, validator) {
		t.Errorf("%s: %v", name, err)
	}
	structural, err := structuralschema.NewStructural(schema)
	if err != nil {
		t.Fatal(name, err)
	}
	for _, path := range pruning.PruneWithOptions(object, structural, true, structuralschema.UnknownFieldPathOptions{TrackUnknownFieldPaths: true}) {
		t.Errorf("%s: the schema has no field %s", name, path)
	}
}

// definitions returns the schemas of all sources by API version and kind.
func definitions(t *testing.T) map[string]*apiextensions.JSONSchemaProps {
	t.Helper()
	schemas := map[string]*apiextensions.JSONSchemaProps{}
	for module, patterns := range sources {
		dir := download(t, module)
		for _, pattern := range patterns {
			paths, err := filepath.Glob(filepath.Join(dir, pattern))
			if err != nil {
				t.Fatal(err)
			}
			for _, path := range paths {
				for _, d := range documents[apiextensionsv1.CustomResourceDefinition](t, path) {
					add(t, schemas, &d)
				}
			}
		}
	}
	return schemas
}

// add adds the schemas of a definition; other kinds of objects have no versions.
func add(t *testing.T, schemas map[string]*apiextensions.JSONSchemaProps, d *apiextensionsv1.CustomResourceDefinition) {
	t.Helper()
	for _, v := range d.Spec.Versions {
		schema := &apiextensions.JSONSchemaProps{}
		if err := apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(v.Schema.OpenAPIV3Schema, schema, nil); err != nil {
			t.Fatal(d.Name, err)
		}
		schemas[d.Spec.Group+"/"+v.Name+" "+d.Spec.Names.Kind] = schema
	}
}

// download returns the directory of a module.
func download(t *testing.T, module string) string {
	t.Helper()
	var out bytes.Buffer
	cmd := exec.Command("go", "mod", "download", "-json", module)
	cmd.Dir, cmd.Stdout, cmd.Stderr = t.TempDir(), &out, os.Stderr
	err := cmd.Run()
	var m struct{ Dir, Error string }
	if err := errors.Join(err, json.Unmarshal(out.Bytes(), &m)); err != nil {
		t.Fatal(module, m.Error, err)
	}
	return m.Dir
}

// documents returns the documents of a YAML file.
func documents[T any](t *testing.T, path string) (list []T) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for d := yaml.NewYAMLOrJSONDecoder(f, 4096); ; {
		var one T
		if err := d.Decode(&one); errors.Is(err, io.EOF) {
			return list
		} else if err != nil {
			t.Fatal(path, err)
		}
		list = append(list, one)
	}
}
