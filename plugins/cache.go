package plugins

import (
	"cmp"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// maxCache is the size in bytes above which the compile cache is pruned to
// half. The cache keeps every version of every plugin, each with some MiB; the
// oldest are removed first.
const maxCache = 1 << 30

// prune limits the compile cache in dir. It ignores files that it cannot read
// or remove, because the cache only saves time.
func prune(dir string, limit int64) {
	type entry struct {
		path  string
		size  int64
		since time.Time
	}
	var entries []entry
	var total int64
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil
		}
		if info, err := d.Info(); err == nil {
			entries = append(entries, entry{path, info.Size(), info.ModTime()})
			total += info.Size()
		}
		return nil
	})
	if total <= limit {
		return
	}
	slices.SortFunc(entries, func(a, b entry) int { return cmp.Or(a.since.Compare(b.since), cmp.Compare(a.path, b.path)) })
	for _, e := range entries {
		if total <= limit/2 {
			return
		}
		if os.Remove(e.path) == nil {
			total -= e.size
		}
	}
}
