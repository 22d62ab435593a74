package main

import (
	"bufio"
	"context"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// figures are those of one run. Values that cannot be measured are 0.
type figures struct {
	cpu                          float64 // µs per request or event
	calls, instructions, mallocs float64 // per request or event
}

// mallocs returns the allocations of a process so far.
func mallocs(ctx context.Context, metrics string) (float64, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+metrics+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err
	}
	defer answer.Body.Close()
	for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), "go_memstats_mallocs_total "); ok {
			return strconv.ParseFloat(value, 64)
		}
	}
	return 0, errors.New("the metrics have no go_memstats_mallocs_total")
}

// startPerf counts the system calls and the instructions of a process with perf stat until the
// returned function is called. A counter that the machine does not have is 0.
func startPerf(ctx context.Context, pid int) func() (calls, instructions float64) {
	var out strings.Builder
	cmd := exec.CommandContext(ctx, "perf", "stat", "-x", ",", "-e", "raw_syscalls:sys_enter,instructions", "-p", strconv.Itoa(pid))
	cmd.Stderr = &out
	if cmd.Start() != nil {
		return func() (float64, float64) { return 0, 0 }
	}
	return func() (float64, float64) {
		_ = cmd.Process.Signal(os.Interrupt) // fails if perf refused the counters
		_ = cmd.Wait()                       // its error is the signal
		return parsePerf(out.String(), "raw_syscalls:sys_enter"), parsePerf(out.String(), "instructions")
	}
}

// parsePerf returns the value of an event in the output of perf stat -x ,.
func parsePerf(out, event string) float64 {
	for line := range strings.Lines(out) {
		if fields := strings.Split(line, ","); len(fields) > 2 && strings.HasPrefix(fields[2], event) {
			v, _ := strconv.ParseFloat(fields[0], 64) // "<not supported>" is 0
			return v
		}
	}
	return 0
}
