// Command measured is a pdproxy that also reports its memory. For each line of standard input it
// collects garbage and writes runtime.MemStats as one line. Any process of the user may trace it.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/pdproxy/pdproxy/cmd"
)

func main() {
	if err := unix.Prctl(unix.PR_SET_PTRACER, math.MaxUint, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: a kernel without Yama
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	go report()
	os.Exit(cmd.Main(os.Args[1:], os.Stderr, os.Stderr))
}

func report() {
	lines, out := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // frees the pools
		runtime.ReadMemStats(&m)
		if out.Encode(&m) != nil {
			return
		}
	}
}
