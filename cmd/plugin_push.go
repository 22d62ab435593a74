package cmd

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/plugins/source"
)

func (a *app) pluginPushCommand() *cobra.Command {
	var signature string
	c := &cobra.Command{
		Use:   "push FILE.wasm oci://REGISTRY/REPOSITORY:TAG",
		Short: "Store a module in a registry, for path = \"oci://...\"",
		Long: `Store the module FILE.wasm, and its signature, as one OCI artifact in a registry.
Print the location with the digest of the artifact, which always names this content.

The credentials come from Docker's configuration file (docker login). A registry on
this host (localhost, 127.0.0.1) is reached over HTTP, every other registry over HTTPS.`,
		Example: `  pdproxy plugin push my-router/my-router.wasm oci://registry.example.com/plugins/my-router:1`,
		Args:    arguments("FILE.wasm", "oci://REGISTRY/REPOSITORY:TAG"),
		RunE:    func(_ *cobra.Command, args []string) error { return a.pluginPush(args[0], args[1], signature) },
	}
	c.Flags().StringVar(&signature, "signature", "", "signature of FILE.wasm by minisign (minisign -Sm FILE.wasm writes FILE.wasm.minisig)")
	completeFile(c, "minisig", "signature")
	return a.addJSON(c)
}

func (a *app) pluginPush(path, location, signaturePath string) error {
	wasm, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	module, err := host.Load(ctx, wasm, host.LoadOptions{CompileWorkers: 2})
	if err != nil { // no proxy would load it
		return exit.Failed(fmt.Errorf("push %s: %w", path, err))
	}
	if err := module.Close(ctx); err != nil {
		return exit.Failed(err)
	}
	var signature []byte
	if signaturePath != "" {
		if signature, err = source.ReadSignature(signaturePath); err != nil {
			return err
		}
	}
	digest, err := source.Push(ctx, location, wasm, signature)
	if err != nil {
		return exit.Failed(err)
	}
	// The location with the digest in place of the tag.
	fixed := location[:strings.LastIndexByte(location, ':')] + "@" + digest
	if a.json {
		return exit.Failed(a.printJSON(struct {
			Path   string `json:"path"`
			Digest string `json:"digest"`
		}{fixed, digest}))
	}
	fmt.Fprintln(a.out, fixed)
	return nil
}
