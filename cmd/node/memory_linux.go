package node

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// dropProgram takes the pages of the program's file out of the process: 25 MB, of which most are needed
// only at the start. The kernel keeps them in its page cache. A page that is needed again comes back
// from there without a read.
func dropProgram() {
	program, err := os.Executable()
	if err != nil {
		return
	}
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return
	}
	defer f.Close()
	for _, m := range unchanged(bufio.NewScanner(f), program) {
		_, _, _ = unix.Syscall(unix.SYS_MADVISE, uintptr(m.start), uintptr(m.end-m.start), unix.MADV_DONTNEED)
	}
}

// mapping is a range of addresses.
type mapping struct{ start, end uint64 }

// unchanged returns the mappings of the program's file in /proc/PID/smaps that nobody can write to, and
// of which no page has changed. A page that has changed, for example by a relocation or a breakpoint,
// exists only in the process, as an anonymous page or in swap space. Other files are left out: a
// library that is being loaded changes its pages later.
func unchanged(smaps *bufio.Scanner, program string) (list []mapping) {
	var m mapping
	var same bool // as far as the lines of m have told
	for smaps.Scan() {
		fields := strings.Fields(smaps.Text())
		switch {
		case len(fields) >= 5 && strings.Contains(fields[0], "-"): // start-end permissions offset device inode path
			_, err := fmt.Sscanf(fields[0], "%x-%x", &m.start, &m.end)
			file := strings.TrimSuffix(strings.Join(fields[5:], " "), " (deleted)")
			same = err == nil && !strings.Contains(fields[1], "w") && file == program
		case len(fields) == 3 && fields[0] == "Anonymous:":
			same = same && fields[1] == "0"
		case len(fields) == 3 && fields[0] == "Swap:" && fields[1] == "0" && same: // stands behind Anonymous
			list = append(list, m)
		}
	}
	return list
}
