// Command pdproxy coordinates prefill and decode in front of LLM serving
// engines. Copy this file for a build with connectors or policies of your own.
package main

import (
	"os"

	"github.com/pdproxy/pdproxy/cmd"
)

func main() { os.Exit(cmd.Main(os.Args[1:], os.Stdout, os.Stderr)) }
