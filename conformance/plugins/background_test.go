package plugins

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/plugins/filter"
)

// ticker is a plugin without an HTTP context; CONTEXT stands for its other
// context.
const ticker = `package main

import (
	"SDK/proxywasm"
	"SDK/proxywasm/types"
)

func init() { proxywasm.SetVMContext(&vm{}) }

func main() {}

type vm struct{ types.DefaultVMContext }

func (*vm) NewPluginContext(uint32) types.PluginContext { return &plugin{} }

type plugin struct{ types.DefaultPluginContext }

func (*plugin) OnPluginStart(int) types.OnPluginStartStatus {
	_ = proxywasm.SetTickPeriodMilliSeconds(1)
	return types.OnPluginStartStatusOK
}

func (*plugin) OnTick() { proxywasm.LogInfo("a tick") }

CONTEXT
`

// TestBackground: a plugin of the SDKs without an HTTP context panics when the host
// requests one. Although it does not fail open, no request fails because of it, and it
// continues in the background.
func TestBackground(t *testing.T) {
	contexts := map[string]string{
		"ticks only": "",
		"TCP only":   "func (*plugin) NewTcpContext(uint32) types.TcpContext { return &types.DefaultTcpContext{} }",
	}
	for sdk, path := range sdks {
		for name, context := range contexts {
			t.Run(sdk+" "+name, func(t *testing.T) {
				dir := t.TempDir()
				for _, file := range []string{"go.mod", "go.sum"} {
					text, err := os.ReadFile(filepath.Join("testdata", sdk, file))
					if err != nil {
						t.Fatal(err)
					}
					write(t, filepath.Join(dir, file), string(text))
				}
				write(t, filepath.Join(dir, "main.go"), strings.NewReplacer("SDK", path, "CONTEXT", context).Replace(ticker))
				w := newWorld(t, newCache(t), nil)
				url := w.serve(echo, w.start(buildPlugin(t, dir), func(s *filter.Spec) { s.FailOpen = false }))
				for range 3 {
					if status, _, body := w.do("POST", url, "hello"); status != 200 || body != "hello" {
						t.Errorf("got %d %q", status, body)
					}
				}
				w.logged("works in the background only")
				if strings.Contains(w.log.text(), "plugin failed") {
					t.Errorf("the plugin failed:\n%s", w.log.text())
				}
				w.logged("a tick")
			})
		}
	}
}
