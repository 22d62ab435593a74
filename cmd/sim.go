package cmd

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/internal/enginesim"
)

func (a *app) simCommand() *cobra.Command {
	var cfg enginesim.Config
	c := &cobra.Command{
		Use:   "sim",
		Short: "Run one simulated engine as a separate process",
		Example: `  pdproxy sim --connector vllm-nixl --role prefill --listen 127.0.0.1:8100
  pdproxy sim --connector vllm-nixl --role decode --listen 127.0.0.1:8200`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			log, err := a.logger()
			if err != nil {
				return err
			}
			return a.sim(cfg, log)
		},
	}
	f := c.Flags()
	f.StringVar(&cfg.Connector, "connector", enginesim.ConnectorVLLMNixl, "connector of the engine: %s")
	f.StringVar(&cfg.Role, "role", enginesim.RoleBoth, "role of the engine: %s; encode is for a vLLM encoder")
	f.StringVar(&cfg.Listen, "listen", "127.0.0.1:8100", "HTTP address")
	f.StringVar(&cfg.Name, "name", "", "name in logs; default the connector and role")
	f.StringVar(&cfg.Model, "model", "sim", "name of the served model; engines that exchange KV need the same name")
	f.IntVar(&cfg.KVBlocks, "kv-blocks", 4096, "KV blocks of each rank")
	f.IntVar(&cfg.BlockSize, "block-size", 16, "tokens in a block")
	f.IntVar(&cfg.Ranks, "ranks", 1, "data-parallel ranks")
	f.IntVar(&cfg.SideChannelPort, "side-channel-port", 0, "port of the KV side channel; 0: any")
	f.StringVar(&cfg.Nixl.EngineID, "engine-id", "", "vllm-nixl, vllm-nixl-push: id of the engine for its peers; default a random id")
	f.StringVar(&cfg.Store, "store", "", "vllm-store: directory of the shared KV cache; default none")
	f.IntVar(&cfg.Nixl.Wire, "nixl-wire", 0, "vllm-nixl: generation of kv_transfer_params: %s; 1 is of 2025; default the newest generation")
	f.IntVar(&cfg.Nixl.TPSize, "tp-size", 1, "vllm-nixl, vllm-nixl-push: tensor-parallel size")
	f.BoolVar(&cfg.Nixl.Recompute, "recompute", false, "vllm-nixl, vllm-nixl-push: kv_load_failure_policy is recompute instead of fail")
	f.BoolVar(&cfg.DropLoadErrors, "drop-load-errors", false, "vllm: a stream whose KV could not be loaded ends without an error, as in older releases")
	f.BoolVar(&cfg.Nixl.Bidirectional, "bidirectional", false, "vllm-nixl: bidirectional_kv_xfer: decode keeps the KV of its answers, and prefill pulls it")
	f.StringVar(&cfg.Version, "vllm-version", "0.32.0+sim", "vllm: release; from 0.33 on the last event of a stream names the KV that decode keeps")
	f.IntVar(&cfg.BootstrapPort, "bootstrap-port", 0, "sglang, vllm-mooncake prefill: port of the bootstrap server; 0: any")
	f.BoolVar(&cfg.SGLang.HeaderOverrides, "header-overrides", false, "sglang: x-override-* header lines replace members of the body")
	f.StringVar(&cfg.SGLang.Version, "sglang-version", "0.5.23", "sglang: release; before 0.5.20 /v1/responses, and before 0.5.22 /v1/messages, have no transfer")
	f.StringVar(&cfg.SGLang.KVCacheDtype, "kv-cache-dtype", "auto", "sglang: type of the KV cache; both sides of a pair need the same type")
	f.StringVar(&cfg.KVEvents.Endpoint, "zmq-events", "", "vllm-nixl, sglang: tcp://HOST:PORT for the KV events of rank 0; rank r uses PORT+r; HOST may be *")
	f.StringVar(&cfg.KVEvents.Replay, "zmq-replay", "", "tcp://HOST:PORT for replays of KV events, in the same form")
	f.StringVar(&cfg.KVEvents.Loads, "zmq-loads", "", "sglang: tcp://HOST:PORT for the loads of rank 0, in the same form")
	f.IntVar(&cfg.MoRIIO.HandshakePort, "handshake-port", 0, "vllm-moriio: port of the handshake; 0: any")
	f.IntVar(&cfg.MoRIIO.NotifyPort, "notify-port", 0, "vllm-moriio: port of the notifications; 0: any")
	f.StringVar(&cfg.MoRIIO.Register, "register", "", "vllm-moriio: tcp://HOST:PORT of the proxy's registry")
	f.StringVar(&cfg.ECDir, "ec-dir", "", "vllm: directory with the output of encoders")
	f.BoolVar(&cfg.FutureParams, "future-params", false, "vllm-nixl, vllm-moriio-read: kv_transfer_params have members of no release, which a proxy must pass on unchanged")
	f.DurationVar(&cfg.ConnectDelay, "connect-delay", 0, "time to connect to a peer")
	f.StringVar(&cfg.TRTLLM.ClusterURI, "cluster-uri", "", "trtllm: http://HOST:PORT or etcd://HOST:PORT of the cluster storage where the worker registers")
	f.StringVar(&cfg.TRTLLM.ClusterName, "cluster-name", "", "trtllm: name of the cluster in the storage")
	f.StringVar(&cfg.Etcd, "etcd", "", "http://HOST:PORT of the etcd for the registration: trtllm in the form of a worker, others below /pdproxy/engines/")
	f.StringVar(&cfg.TRTLLM.AuthKey, "auth-key", "", "trtllm: the workers' internal_request_auth_key")
	f.BoolVar(&cfg.TRTLLM.PerfMetrics, "perf-metrics", false, "trtllm: return_perf_metrics")
	f.DurationVar(&cfg.Lease, "lease", 30*time.Second, "time that blocks wait for a transfer")
	f.IntVar(&cfg.PrefillUsPerToken, "prefill-us-per-token", 0, "microseconds per uncached prompt token")
	f.IntVar(&cfg.DecodeUsPerToken, "decode-us-per-token", 0, "microseconds per decoded token")
	f.StringSliceVar(&cfg.LoRA.Modules, "lora-modules", nil, "vllm: names of LoRA adapters, with commas between them")
	f.IntVar(&cfg.LoRA.MaxLoRAs, "max-loras", 1, "vllm: different LoRA adapters in one batch")
	f.IntVar(&cfg.MaxRunning, "max-running", 256, "sequences that a rank computes at the same time")
	f.BoolVar(&cfg.DevMode, "dev-mode", false, "vllm: the routes of the sleep mode exist, as with VLLM_SERVER_DEV_MODE=1")
	f.DurationVar(&cfg.WakeTime, "wake-time", 0, "vllm: time to wake up")
	f.StringVar(&cfg.Fail, "fail", "", "RATE:KIND, share of requests with a fault, from 0 to 1, and kind of the fault: %s")
	f.IntVar(&cfg.DieAfter, "die-after", 0, "exit abruptly after this number of requests; 0: never")
	f.StringVar(&cfg.Hang, "hang", "", "phase in which requests hang: %s")
	chooseOf(c, "connector", enginesim.Connectors...)
	chooseOf(c, "role", enginesim.Roles...)
	chooseOf(c, "nixl-wire", "1", "2", "3", "4", "5", "6")
	chooseOf(c, "hang", enginesim.HangPhases...)
	choose(c, f, "fail", choice{allowed: enginesim.FailKinds, cut: behind(":")})
	completeFile(c, "", "store", "ec-dir")
	return a.addJSON(a.addLog(c))
}

// sim runs the engine until a signal arrives, or until an injected fault ends the engine.
func (a *app) sim(cfg enginesim.Config, log *slog.Logger) error {
	cfg.Log = log
	if cfg.Store != "" {
		if _, err := os.ReadDir(cfg.Store); err != nil {
			return fmt.Errorf("--store: %w", err)
		}
	}
	e, err := enginesim.New(cfg)
	if err != nil {
		return err
	}
	if err := e.Start(); err != nil {
		return exit.Failed(err)
	}
	defer e.Close()
	if a.json {
		err = a.printJSON(map[string]string{"url": e.URL(), "connector": cfg.Connector, "role": cfg.Role})
	} else {
		_, err = fmt.Fprintf(a.out, "%s %s engine on %s\n", cfg.Connector, cfg.Role, e.URL())
	}
	if err != nil {
		return exit.Failed(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	select {
	case <-ctx.Done():
		return nil
	case <-e.Died():
		return exit.Failed(fmt.Errorf("the simulated engine died"))
	}
}
