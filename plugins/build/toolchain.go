package build

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// toolchain is the go command that applies in the plugin's folder.
type toolchain struct {
	dir      string // of the plugin
	path     string // of the go command
	version  string // go1.26.8
	modCache string // folder whose files an overlay may not replace
	workFile string // the go.work that applies, "" for none
	log      io.Writer
}

// oldestMinor is the first Go 1.x with //go:wasmexport and -buildmode=c-shared
// for wasip1.
const oldestMinor = 24

func findToolchain(ctx context.Context, dir string, log io.Writer) (*toolchain, error) {
	path, err := exec.LookPath("go")
	if err != nil {
		return nil, ErrNoGo
	}
	t := &toolchain{dir: dir, path: path, log: log}
	out, err := t.output(t.command(ctx, nil, "env", "-json", "GOVERSION", "GOMODCACHE", "GOWORK", "GOMOD"))
	if err != nil {
		return nil, fmt.Errorf("go env: %w", err)
	}
	var env struct{ GOVERSION, GOMODCACHE, GOWORK, GOMOD string }
	if err := json.Unmarshal(out, &env); err != nil {
		return nil, fmt.Errorf("go env: %w", err)
	}
	t.version, t.modCache = env.GOVERSION, env.GOMODCACHE
	if env.GOWORK != "off" {
		t.workFile = env.GOWORK
	}
	if rest, ok := strings.CutPrefix(t.version, "go1."); ok {
		text, _, _ := strings.Cut(rest, ".")
		if minor, err := strconv.Atoi(text); err == nil && minor < oldestMinor {
			return nil, fmt.Errorf("%s is too old: plugins need Go 1.%d or later", t.version, oldestMinor)
		}
	}
	if env.GOMOD == "" || env.GOMOD == os.DevNull {
		return nil, fmt.Errorf("%w: it has no go.mod, in its folder or above (pdproxy plugin new makes a plugin with one)", ErrLoad)
	}
	return t, nil
}

// command returns a go command in the plugin's folder that targets WebAssembly.
func (t *toolchain) command(ctx context.Context, env []string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, t.path, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = t.dir, t.log, t.log
	cmd.Env = append(cmd.Environ(), "GOOS=wasip1", "GOARCH=wasm", "CGO_ENABLED=0")
	cmd.Env = append(cmd.Env, env...)
	return cmd
}

// output returns the standard output of a go command. The error contains its
// standard error without the name of the command.
func (t *toolchain) output(cmd *exec.Cmd) ([]byte, error) {
	var out, problem bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problem
	err := cmd.Run()
	if failed := new(exec.ExitError); errors.As(err, &failed) {
		err = errors.New(strings.ReplaceAll(strings.TrimPrefix(strings.TrimSpace(problem.String()), "go: "), "\ngo: ", "\n"))
	}
	return out.Bytes(), err
}

// goPackage and goModule are the fields of go list's answer that are used.
type goPackage struct {
	ImportPath, Name, Dir   string
	Standard, DepOnly       bool
	GoFiles, IgnoredGoFiles []string
	Module                  *goModule
}

type goModule struct {
	Path, Version, Dir, GoMod string
	Replace                   *goModule
}

// version returns the module's version, "" for a folder.
func (m *goModule) version() string {
	if m.Replace != nil {
		return m.Replace.Version
	}
	return m.Version
}

// plugin is a loaded package main: its folder, and the SDK that it uses.
type plugin struct {
	goPackage
	sdk  goModule
	tiny *tinySDK // nil for an SDK that Go's compiler builds as it is
}

// sdkPackages identify the SDKs that build without changes. An SDK for TinyGo
// is identified by its sources.
var sdkPackages = map[string]string{
	"github.com/pdproxy/pdproxy/abi/guest":              "github.com/pdproxy/pdproxy",
	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm": "github.com/proxy-wasm/proxy-wasm-go-sdk",
}

// load gets from go list the plugin's package and all its dependencies.
func (t *toolchain) load(ctx context.Context) (*plugin, error) {
	out, err := t.output(t.command(ctx, nil, "list", "-deps",
		"-json=ImportPath,Name,Dir,Standard,DepOnly,GoFiles,IgnoredGoFiles,Module", "."))
	if err != nil {
		if strings.Contains(err.Error(), "github.com/pdproxy/pdproxy/abi") {
			return nil, fmt.Errorf("%w: %w\nThe packages abi and abi/guest are in the folder pdproxy of a plugin that pdproxy plugin new has made; the replace directive in its go.mod names this folder", ErrLoad, err)
		}
		return nil, fmt.Errorf("%w: %w", ErrLoad, err)
	}
	p := new(plugin)
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var pkg goPackage
		if err := dec.Decode(&pkg); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		if pkg.Standard {
			continue
		}
		if err := p.add(&pkg); err != nil {
			return nil, err
		}
	}
	if p.Name != "main" {
		return nil, fmt.Errorf("%s holds package %s: a plugin is a package main", t.dir, p.Name)
	}
	return p, nil
}

// add processes one package of go list's answer.
func (p *plugin) add(pkg *goPackage) error {
	if !pkg.DepOnly {
		p.goPackage = *pkg
	}
	if pkg.Module == nil {
		return nil
	}
	if _, ok := sdkPackages[pkg.ImportPath]; ok {
		p.sdk = *pkg.Module
		return nil
	}
	tiny, err := readTinySDK(pkg)
	if err != nil || tiny == nil {
		return err
	}
	if p.tiny != nil {
		return fmt.Errorf("the plugin imports two SDKs, %s and %s", p.tiny.pkg.Module.Path, pkg.Module.Path)
	}
	p.tiny, p.sdk = tiny, *pkg.Module
	return nil
}

// mainDoesWork reports whether func main has a statement.
func (p *plugin) mainDoesWork() (bool, error) {
	for _, name := range p.GoFiles {
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return false, err
		}
		for _, d := range file.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "main" && fn.Body != nil {
				return len(fn.Body.List) > 0, nil
			}
		}
	}
	return false, nil
}
