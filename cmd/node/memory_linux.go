package node

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// dropProgram takes the pages of program files out of the process: 25 MB, of which most were needed only at the start.
// The kernel keeps them in its page cache, from which a page that is needed again comes back without a read,
// and can use their memory otherwise.
func dropProgram() {
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return
	}
	defer f.Close()
	for _, m := range readOnlyFiles(bufio.NewScanner(f)) {
		_, _, _ = unix.Syscall(unix.SYS_MADVISE, uintptr(m.start), uintptr(m.end-m.start), unix.MADV_DONTNEED)
	}
}

// mapping is a range of addresses.
type mapping struct{ start, end uint64 }

// readOnlyFiles returns the mappings of /proc/PID/smaps that nobody can write to and whose pages are all those of a file.
// A page that has changed, for example by a relocation or a breakpoint, exists only in the process.
func readOnlyFiles(smaps *bufio.Scanner) (list []mapping) {
	var m mapping
	var readOnly bool
	for smaps.Scan() {
		fields := strings.Fields(smaps.Text())
		switch {
		case len(fields) >= 5 && strings.Contains(fields[0], "-"): // start-end permissions offset device inode path
			_, err := fmt.Sscanf(fields[0], "%x-%x", &m.start, &m.end)
			readOnly = err == nil && !strings.Contains(fields[1], "w") && fields[4] != "0"
		case len(fields) == 3 && fields[0] == "Anonymous:" && fields[1] == "0" && readOnly:
			list = append(list, m)
		}
	}
	return list
}
