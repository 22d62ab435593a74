package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// tick is the unit of CPU time in /proc/stat: USER_HZ is 100 on Linux.
const tick = 10 * time.Millisecond

// usage holds the resources that processes have used so far.
type usage struct {
	CPU time.Duration // user and system time
	RSS int64         // bytes
}

func (u usage) minus(o usage) usage { return usage{u.CPU - o.CPU, u.RSS - o.RSS} }

// usageOf adds up the usage of processes. A process that has ended causes an error,
// because its CPU time would be missing.
func usageOf(pids []int) (usage, error) {
	var sum usage
	for _, pid := range pids {
		var cpu unix.Timespec
		// The clock of a process, CPUCLOCK_SCHED in the kernel's posix-timers_types.h. Its resolution is
		// a nanosecond, that of /proc/PID/stat a tick.
		if err := unix.ClockGettime(int32(^pid<<3|2), &cpu); err != nil {
			return usage{}, fmt.Errorf("read CPU time: %w", err)
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return usage{}, fmt.Errorf("read RSS: %w", err)
		}
		sum.CPU += time.Duration(cpu.Nano())
		sum.RSS += parseRSS(status)
	}
	return sum, nil
}

// parseParent returns the parent in proc_pid_stat(5). The command's name may contain blanks and
// parentheses, so the fields are counted from its last parenthesis.
func parseParent(stat []byte) (int, error) {
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 2 {
		return 0, fmt.Errorf("read stat: %d fields after the name", len(fields))
	}
	return strconv.Atoi(fields[1])
}

// parseRSS returns the resident bytes of a proc_pid_status(5), 0 without such a
// line.
func parseRSS(status []byte) int64 {
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kb, _ := strconv.ParseInt(strings.Fields(value)[0], 10, 64)
			return kb << 10
		}
	}
	return 0
}

// family returns a process and all its descendants, because nginx works in a
// child.
func family(pid int) ([]int, error) {
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	children := make(map[int][]int)
	for _, path := range paths {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		parent, err := parseParent(stat)
		if err != nil {
			return nil, err
		}
		id, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		children[parent] = append(children[parent], id)
	}
	all := []int{pid}
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i]]...)
	}
	slices.Sort(all)
	return all, nil
}

// busyTime returns the time for which the cores have not been idle since the
// machine's start, including the hypervisor's share.
func busyTime(cores ...int) (time.Duration, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, fmt.Errorf("read CPU time: %w", err)
	}
	return parseBusy(string(text), cores)
}

func parseBusy(stat string, cores []int) (time.Duration, error) {
	var sum time.Duration
	found := 0
	for line := range strings.Lines(stat) {
		fields := strings.Fields(line)
		core, err := strconv.Atoi(strings.TrimPrefix(fields[0], "cpu"))
		if err != nil || len(fields) < 9 || !slices.Contains(cores, core) {
			continue
		}
		found++
		for _, at := range []int{1, 2, 3, 6, 7, 8} { // user, nice, system, irq, softirq, steal
			n, err := strconv.ParseInt(fields[at], 10, 64)
			if err != nil {
				return 0, fmt.Errorf("read CPU time: %w", err)
			}
			sum += time.Duration(n) * tick
		}
	}
	if found != len(cores) {
		return 0, fmt.Errorf("read CPU time: cores %v are not all there", cores)
	}
	return sum, nil
}
