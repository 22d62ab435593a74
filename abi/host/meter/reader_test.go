package meter

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
)

// guests are the modules of the repository.
func guests(t testing.TB) map[string][]byte {
	t.Helper()
	found := map[string][]byte{}
	root := filepath.Join("..", "..", "..")
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".wasm") {
			found[path], err = os.ReadFile(path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestMeteredCompiles: the engine accepts the metered form of each guest.
func TestMeteredCompiles(t *testing.T) {
	for path, wasm := range guests(t) {
		m, err := Read(wasm)
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		ctx := t.Context()
		r := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfig().WithCoreFeatures(api.CoreFeaturesV2))
		metered := m.Meter()
		if _, err := r.CompileModule(ctx, metered); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		t.Log(path, len(wasm), len(metered))
		_ = r.Close(ctx)
	}
}
