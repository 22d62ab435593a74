package cmd

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine/discovery"
	"github.com/pdproxy/pdproxy/proxy/tokens"
	"github.com/pdproxy/pdproxy/proxy/tokens/bpe"
)

// files is what a configuration's file keys name, read.
type files struct {
	keys  *proxy.Keys  // nil: no key is asked for
	certs *proxy.Certs // nil: no TLS
	token string       // of the admin endpoints; "" none

	trtllm      connector.TRTLLM
	workerToken string // of those that register; "" none
	fleet       fleetAccess
	tokenizers  map[string]tokens.Encoder // by model
}

// loadFiles reads the files that cfg names. Errors name the key and never a
// file's content. log hears later of certificates that change.
func loadFiles(cfg *config.Config, log *slog.Logger) (*files, error) {
	var f files
	var problems config.Problems
	note := func(key string, err error) {
		if err != nil {
			problems = append(problems, config.Problem{Key: key, Message: err.Error()})
		}
	}
	var err error
	f.keys, err = loadKeys(cfg)
	note("server.auth.keys_file", err)
	f.token, err = readSecret(cfg.Admin.TokenFile)
	note("admin.token_file", err)
	if cfg.Server.TLS.Enabled() {
		f.certs, err = proxy.LoadCerts(cfg.Server.TLS, slog.New(slog.DiscardHandler))
		note("server.tls", err)
	}
	f.trtllm = connector.TRTLLM{Base64IDs: cfg.TRTLLM.Base64IDs, StripHistory: cfg.TRTLLM.StripHistory, PerfMetrics: cfg.TRTLLM.PerfMetrics, Msgpack: cfg.TRTLLM.Msgpack}
	f.trtllm.AuthKey, err = readSecret(cfg.TRTLLM.AuthKeyFile)
	note("trtllm.auth_key_file", err)
	f.workerToken, err = readSecret(cfg.Discovery.TRTLLM.TokenFile)
	note("discovery.trtllm.token_file", err)
	f.fleet = openFleetAccess(cfg, log, note)
	for i, e := range cfg.Engines {
		_, err := readSecret(e.APIKeyFile)
		note(fmt.Sprintf("engine[%d].api_key_file", i), err)
	}
	_, err = readSecret(cfg.Discovery.MoRIIO.PasswordFile)
	note("discovery.moriio.password_file", err)
	if _, err := discovery.New(cfg.Discovery, discovery.Options{}); err != nil {
		problems = append(problems, asProblems(err)...)
	}
	f.tokenizers = make(map[string]tokens.Encoder)
	for model, path := range cfg.Tokens.Files {
		f.tokenizers[model], err = loadTokenizer(path)
		note(fmt.Sprintf("tokens.files.%q", model), err)
	}
	if len(problems) > 0 {
		return nil, problems
	}
	return &f, nil
}

// loadTokenizer reads a tokenizer.json.
func loadTokenizer(path string) (tokens.Encoder, error) {
	file, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return bpe.Parse(file)
}

// loadKeys reads the API keys; nil when none are asked for.
func loadKeys(cfg *config.Config) (*proxy.Keys, error) {
	if cfg.Server.Auth.KeysFile == "" {
		return nil, nil
	}
	text, err := os.ReadFile(cfg.Server.Auth.KeysFile)
	if err != nil {
		return nil, err
	}
	return proxy.ParseKeys(text)
}

// readSecret reads a one-line secret; "" for no file.
func readSecret(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	secret := strings.TrimSpace(string(text))
	if secret == "" || strings.ContainsAny(secret, "\r\n") {
		return "", errors.New("the file must hold one line")
	}
	return secret, nil
}

// asProblems lists an error as problems, one at least.
func asProblems(err error) config.Problems {
	var p config.Problems
	if errors.As(err, &p) {
		return p
	}
	return config.Problems{{Message: err.Error()}}
}
