// Command bench measures the cost of pdproxy per request, per event and per
// open stream, together with other proxies under the same load: nginx, Go's
// httputil.ReverseProxy, and prefill-decode proxies on aiohttp and on FastAPI
// with httpx. The results are ratios within one run, because absolute values
// depend on the machine and the time. The command peers installs more proxies
// and routers and compares them in more respects; its result is
// docs/benchmarks.md.
//
// All traffic uses 127.0.0.1. The proxy under test has one CPU core to itself.
// The load and the engine behind the proxy share another core. README.md
// explains each measurement.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
)

const helpText = `usage:
  bench run     [flags]   the whole suite: every proxy, every case, a table of ratios
  bench peers   [flags]   installs other proxies and routers and compares them; writes docs/benchmarks.json
  bench page    [flags]   writes docs/benchmarks.md and its plots from docs/benchmarks.json
  bench check   [flags]   the program of the working tree beside that of a commit
  bench scale   [flags]   costs over sizes: targets, streams, index entries and more; docs/scale.md
  bench load    [flags]   one load against one address, one JSON line
  bench replay  [flags]   the requests of a trace against one address, one JSON line
  bench backend [flags]   the engine behind the proxies
  bench reverse [flags]   httputil.ReverseProxy as a peer
bench COMMAND -help lists the flags.
`

func main() {
	if err := command(os.Args[1:]); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func command(args []string) error {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, helpText)
		return errors.New("a command is needed")
	}
	switch args[0] {
	case "run":
		return runCommand(args[1:])
	case "check":
		return checkCommand(args[1:])
	case "scale":
		return scaleCommand(args[1:])
	case "load":
		return loadCommand(args[1:])
	case "backend":
		return backendCommand(args[1:])
	case "peers":
		return peersCommand(args[1:])
	case "replay":
		return replayCommand(args[1:])
	case "page":
		return pageCommand(args[1:])
	case "reverse":
		return reverseCommand(args[1:])
	}
	fmt.Fprint(os.Stderr, helpText)
	return fmt.Errorf("unknown command %q", args[0])
}
