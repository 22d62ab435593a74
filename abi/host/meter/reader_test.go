package meter

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
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

func TestList(t *testing.T) {
	for path, wasm := range guests(t) {
		m, err := Read(wasm)
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		n, calls := 0, 0
		for _, f := range m.Functions {
			n += f.Instructions
			calls += f.Calls
		}
		t.Log(path, len(wasm), len(m.Functions), n, calls, m.Tables, m.Elements, m.GrowsTable)
	}
}
