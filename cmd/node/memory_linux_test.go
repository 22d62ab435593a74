package node

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"
)

// TestDropProgram: the pages of the program leave the process, which goes on.
func TestDropProgram(t *testing.T) {
	touchProgram(t)
	before := filePages(t)
	dropProgram()
	if after := filePages(t); after > before/2 {
		t.Errorf("%d KB of files are in the process, %d KB before", after, before)
	}
}

// touchProgram brings the pages of the program into the process.
func touchProgram(t *testing.T) {
	t.Helper()
	smaps, err := os.Open("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	defer smaps.Close()
	memory, err := os.Open("/proc/self/mem")
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range unchanged(bufio.NewScanner(smaps), program) {
		if _, err := memory.ReadAt(make([]byte, m.end-m.start), int64(m.start)); err != nil {
			t.Logf("%x: %v", m.start, err)
		}
	}
}

// filePages returns the KB of file pages in the process.
func filePages(t *testing.T) (size int) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "RssFile:")
	if _, err := fmt.Sscanf(rest, "%d", &size); err != nil {
		t.Fatal(err)
	}
	return size
}

// TestUnchanged: a mapping counts if it is of the program, nobody can write to it, and no page has
// changed, in memory or in swap space.
func TestUnchanged(t *testing.T) {
	const smaps = `00400000-015b9000 r-xp 00000000 fe:00 6226246                            /usr/bin/pd proxy
Rss:               15204 kB
Anonymous:             0 kB
Swap:                  0 kB
SwapPss:               0 kB
VmFlags: rd ex mr mw me
015b9000-02b17000 r--p 011b9000 fe:00 6226246                            /usr/bin/pd proxy (deleted)
Anonymous:             0 kB
Swap:                  0 kB
02b17000-02e1a000 rw-p 02717000 fe:00 6226246                            /usr/bin/pd proxy
Anonymous:             0 kB
Swap:                  0 kB
02e1a000-02e1b000 r--p 02a1a000 fe:00 6226246                            /usr/bin/pd proxy
Anonymous:             4 kB
Swap:                  0 kB
02e1b000-02e1c000 r--p 02a1b000 fe:00 6226246                            /usr/bin/pd proxy
Anonymous:             0 kB
Swap:                  4 kB
7f0389600000-7f0389628000 r--p 00000000 fe:00 6226999                    /usr/lib/libc.so.6
Anonymous:             0 kB
Swap:                  0 kB
7f038965d000-7f0389edb000 r-xp 00000000 00:00 0 
Anonymous:             0 kB
Swap:                  0 kB
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
Anonymous:             0 kB
Swap:                  0 kB
`
	got := unchanged(bufio.NewScanner(strings.NewReader(smaps)), "/usr/bin/pd proxy")
	if want := []mapping{{0x400000, 0x15b9000}, {0x15b9000, 0x2b17000}}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%x, want %x", got, want)
	}
}
