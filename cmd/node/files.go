package node

import (
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/engine/discovery"
	"github.com/pdproxy/pdproxy/proxy/idtoken"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
	"github.com/pdproxy/pdproxy/proxy/tokens"
	"github.com/pdproxy/pdproxy/proxy/tokens/bpe"
)

// files holds the content of the files that a configuration names.
type files struct {
	keys     *admission.Keys   // nil: clients need neither a key nor a token
	verifier *idtoken.Verifier // in keys; nil: there are API keys only
	certs    *edge.Certs       // nil: no TLS
	eppCerts *edge.Certs       // of epp.listen; nil: no TLS
	token    string            // of the admin address; "" for none

	trtllm      connector.TRTLLM
	workerToken string // of the workers that register; "" for none
	fleet       fleetAccess
	tokenizers  map[string]tokens.Encoder // by model
}

// loadFiles reads the files that cfg names. Its errors name the key, and never contain
// the content of a file. Later changes of the fleet's certificates are logged to log.
func loadFiles(cfg *config.Config, log *slog.Logger) (*files, error) {
	var f files
	var problems config.Problems
	note := func(key string, err error) {
		if err != nil {
			problems = append(problems, cfg.Problem(key, err.Error()))
		}
	}
	var err error
	f.keys, err = loadKeys(cfg)
	note("server.auth.keys_file", err)
	if len(cfg.JWTs) > 0 {
		if f.verifier, err = loadTokens(cfg, log, note); err == nil {
			f.keys = f.keys.WithTokens(f.verifier)
		}
	}
	f.token, err = config.ReadSecret(cfg.Admin.TokenFile)
	note("admin.token_file", err)
	if cfg.Server.TLS.Enabled() {
		f.certs, err = edge.LoadCerts("server.tls", cfg.Server.TLS, slog.New(slog.DiscardHandler))
		note("server.tls", err)
	}
	if cfg.EPP.TLS.Enabled() {
		f.eppCerts, err = edge.LoadCerts("epp.tls", cfg.EPP.TLS, slog.New(slog.DiscardHandler))
		note("epp.tls", err)
	}
	f.trtllm = connector.TRTLLM{Base64IDs: cfg.TRTLLM.Base64IDs, StripHistory: cfg.TRTLLM.StripHistory, PerfMetrics: cfg.TRTLLM.PerfMetrics, Msgpack: cfg.TRTLLM.Msgpack}
	f.trtllm.AuthKey, err = config.ReadSecret(cfg.TRTLLM.AuthKeyFile)
	note("trtllm.auth_key_file", err)
	f.workerToken, err = config.ReadSecret(cfg.Discovery.TRTLLM.TokenFile)
	note("discovery.trtllm.token_file", err)
	f.fleet = openFleetAccess(cfg, log, note)
	noteEngineFiles(cfg.Engines, note)
	noteRemoteFiles(cfg.Remotes, note)
	_, err = sidecar.PickerTLS(cfg.Sidecar)
	note("sidecar.picker_ca", err)
	_, err = config.ReadSecret(cfg.Discovery.MoRIIO.PasswordFile)
	note("discovery.moriio.password_file", err)
	if _, err := discovery.New(cfg.Discovery, discovery.Options{}); err != nil {
		for _, p := range config.AsProblems(err) {
			problems = append(problems, cfg.Problem(p.Key, p.Message))
		}
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

// loadKeys reads the API keys; nil if clients need none.
func loadKeys(cfg *config.Config) (*admission.Keys, error) {
	if cfg.Server.Auth.KeysFile == "" {
		return nil, nil
	}
	text, err := os.ReadFile(cfg.Server.Auth.KeysFile)
	if err != nil {
		return nil, err
	}
	return admission.ParseKeys(text, cfg.Tenants...)
}

// loadTokens returns the verifier of tokens. It notes the problems of files.
func loadTokens(cfg *config.Config, log *slog.Logger, note func(key string, err error)) (*idtoken.Verifier, error) {
	files := make([][]byte, len(cfg.JWTs))
	var failed error
	for i, j := range cfg.JWTs {
		if j.JWKSFile == "" {
			continue
		}
		var err error
		if files[i], err = os.ReadFile(j.JWKSFile); err != nil {
			note(fmt.Sprintf("jwt[%d].jwks_file", i), err)
			failed = err
		}
	}
	if failed != nil {
		return nil, failed
	}
	v, err := idtoken.New(cfg.JWTs, files, admission.Tenants(cfg.Tenants), log)
	var file *idtoken.FileError
	if errors.As(err, &file) {
		note(fmt.Sprintf("jwt[%d].jwks_file", file.Table), err)
	}
	return v, err
}
