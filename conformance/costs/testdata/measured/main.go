// Command measured is pdproxy, which also reports its memory: for each line of standard input one
// line of runtime.MemStats, after a garbage collection.
package main

import (
	"bufio"
	"encoding/json"
	"os"
	"runtime"

	"github.com/pdproxy/pdproxy/cmd"
)

func main() {
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
