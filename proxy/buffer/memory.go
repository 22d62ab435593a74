package buffer

import (
	"io/fs"
	"math"
	"os"
	"path"
	"runtime/debug"
	"strconv"
	"strings"
)

const (
	// share is the divisor of DefaultLimit.
	share = 4
	// unknown is the assumed memory, in bytes, of a machine that does not report it.
	unknown = 4 << 30
)

// DefaultLimit returns a quarter of the memory that the process may use, in bytes: of
// GOMEMLIMIT, else of its control group's limit, else of the machine's memory.
func DefaultLimit() int64 {
	limit := debug.SetMemoryLimit(-1) // a negative limit only reads the present one
	if limit == math.MaxInt64 {
		limit = memory(os.DirFS("/"))
	}
	return max(limit/share, 1)
}

// memory returns the memory that a process may use, from Linux files below root.
func memory(root fs.FS) int64 {
	most := machine(root)
	groups, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return most
	}
	for line := range strings.Lines(string(groups)) {
		// HIERARCHY:CONTROLLERS:PATH, man 7 cgroups.
		_, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, group, _ := strings.Cut(rest, ":")
		top, file := "sys/fs/cgroup", "memory.max"
		if controllers != "" {
			if !strings.Contains(","+controllers+",", ",memory,") {
				continue
			}
			top, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
		}
		for dir := path.Join(top, group); strings.HasPrefix(dir, top); dir = path.Dir(dir) {
			if n, ok := number(root, path.Join(dir, file)); ok {
				most = min(most, n)
			}
		}
	}
	return most
}

// machine returns the memory of the machine in bytes.
func machine(root fs.FS) int64 {
	text, _ := fs.ReadFile(root, "proc/meminfo") // missing on other systems
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "MemTotal:" {
			if n, err := strconv.ParseInt(f[1], 10, 64); err == nil && n > 0 {
				return n << 10 // kB
			}
		}
	}
	return unknown
}

// number reads a limit from a file. It returns false for a missing file and for "max".
func number(root fs.FS, name string) (int64, bool) {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil && n > 0
}
