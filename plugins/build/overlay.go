package build

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// overlay lists the files that the go command reads in place of those on disk.
type overlay struct {
	replace map[string]string // path in the build -> path that is read
	flags   []string
}

// sdkFolder is the path of the SDK while the plugin is compiled. The go command
// rejects an overlay of the module cache, so go.mod gets a replace directive to
// this folder, which exists only in the overlay. The path is part of the
// module's build information, so a fixed one makes builds reproducible.
const sdkFolder = ".pdproxy-sdk"

// overlayFor writes the files that a plugin with an SDK for TinyGo needs into
// work, and returns where the go command has to see them.
func (t *toolchain) overlayFor(ctx context.Context, p *plugin, work string) (*overlay, error) {
	o := &overlay{replace: map[string]string{}}
	add := func(target, name, text string) error {
		o.replace[target] = filepath.Join(work, name)
		return os.WriteFile(filepath.Join(work, name), []byte(text), 0o600)
	}
	sdk := p.tiny.pkg.Dir
	if strings.HasPrefix(sdk, t.modCache+string(filepath.Separator)) {
		root, err := t.moveSDK(ctx, p, work, o)
		if err != nil {
			return nil, err
		}
		below, err := filepath.Rel(p.tiny.pkg.Module.Dir, sdk)
		if err != nil {
			return nil, err
		}
		sdk = filepath.Join(root, below)
	}
	glue, err := p.tiny.glue()
	if err != nil {
		return nil, err
	}
	if err := add(filepath.Join(sdk, glueFile), glueFile, glue); err != nil {
		return nil, err
	}
	if err := add(filepath.Join(p.Dir, initFile), initFile, initSource); err != nil {
		return nil, err
	}
	for name, text := range p.tiny.stubs {
		if err := add(filepath.Join(sdk, name), "stubs_"+name, string(text)); err != nil {
			return nil, err
		}
	}
	if p.tiny.tags != "" {
		o.flags = append(o.flags, "-tags", p.tiny.tags)
	}
	return o, nil
}

// moveSDK makes the SDK's module appear next to the go.mod (or go.work) that
// selects it, and returns its path.
func (t *toolchain) moveSDK(ctx context.Context, p *plugin, work string, o *overlay) (string, error) {
	if p.Module == nil || p.Module.GoMod == "" {
		return "", fmt.Errorf("%s is not in a module", t.dir)
	}
	sdk := p.tiny.pkg.Module
	decides, edit := p.Module.GoMod, "mod"
	if t.workFile != "" {
		decides, edit = t.workFile, "work"
	}
	text, err := os.ReadFile(decides)
	if err != nil {
		return "", err
	}
	alternative := filepath.Join(work, "go."+edit)
	if err := os.WriteFile(alternative, text, 0o600); err != nil {
		return "", err
	}
	// Without a version on its left side the directive replaces those with one.
	cmd := t.command(ctx, []string{"GOWORK=off"}, edit, "edit", "-replace="+sdk.Path+"=./"+sdkFolder, alternative)
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("go %s edit: %w", edit, err)
	}
	o.replace[decides] = alternative
	if edit == "mod" {
		o.flags = append(o.flags, "-mod=readonly")
	}
	root := filepath.Join(filepath.Dir(decides), sdkFolder)
	return root, filepath.WalkDir(sdk.Dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || strings.HasSuffix(path, "_test.go") {
			return err
		}
		below, err := filepath.Rel(sdk.Dir, path)
		o.replace[filepath.Join(root, below)] = path
		return err
	})
}
