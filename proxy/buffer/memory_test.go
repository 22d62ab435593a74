package buffer

import (
	"math"
	"os"
	"runtime/debug"
	"testing"
	"testing/fstest"
)

func TestMemory(t *testing.T) {
	file := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	meminfo := file("MemTotal:       16000000 kB\nMemFree:         8000000 kB\n")
	const total = 16000000 << 10
	tests := []struct {
		name string
		fs   fstest.MapFS
		want int64
	}{
		{"nothing is known", fstest.MapFS{}, unknown},
		{"no group", fstest.MapFS{"proc/meminfo": meminfo}, total},
		{"a group without limit", fstest.MapFS{"proc/meminfo": meminfo, "proc/self/cgroup": file("0::/a\n"), "sys/fs/cgroup/a/memory.max": file("max\n")}, total},
		{"a group's limit", fstest.MapFS{"proc/meminfo": meminfo, "proc/self/cgroup": file("0::/a/b\n"), "sys/fs/cgroup/a/b/memory.max": file("1073741824\n")}, 1 << 30},
		{"the limit of the group above", fstest.MapFS{"proc/meminfo": meminfo, "proc/self/cgroup": file("0::/a/b\n"),
			"sys/fs/cgroup/a/b/memory.max": file("1073741824\n"), "sys/fs/cgroup/a/memory.max": file("536870912\n")}, 512 << 20},
		{"a container's root", fstest.MapFS{"proc/meminfo": meminfo, "proc/self/cgroup": file("0::/\n"), "sys/fs/cgroup/memory.max": file("268435456\n")}, 256 << 20},
		{"the first version of groups", fstest.MapFS{"proc/meminfo": meminfo, "proc/self/cgroup": file("5:cpu:/x\n4:memory:/x\n"),
			"sys/fs/cgroup/memory/x/memory.limit_in_bytes": file("2147483648\n")}, 2 << 30},
		{"more than the machine has", fstest.MapFS{"proc/meminfo": meminfo, "proc/self/cgroup": file("4:memory:/\n"),
			"sys/fs/cgroup/memory/memory.limit_in_bytes": file("9223372036854771712\n")}, total},
	}
	for _, tt := range tests {
		if got := memory(tt.fs); got != tt.want {
			t.Errorf("%s: memory(tt.fs) = %d, want %d", tt.name, got, tt.want)
		}
	}
}

func TestDefaultLimit(t *testing.T) {
	old := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(old)
	debug.SetMemoryLimit(1 << 40)
	if got := DefaultLimit(); got != 1<<38 {
		t.Errorf("DefaultLimit with a memory limit of the runtime = %d, want a quarter of that limit", got)
	}
	debug.SetMemoryLimit(math.MaxInt64)
	if got, want := DefaultLimit(), memory(os.DirFS("/"))/share; got != want {
		t.Errorf("got %d without one, want %d", got, want)
	}
}
