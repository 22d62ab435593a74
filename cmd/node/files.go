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
	"github.com/pdproxy/pdproxy/proxy/pemfile"
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
// the content of a file. Later changes of certificates are logged to log. A table that lacks
// a key gives no error: config.Validate reports the missing key.
func loadFiles(cfg *config.Config, log *slog.Logger) (*files, error) {
	var f files
	var problems config.Problems
	note := func(key string, err error) { problems = append(problems, fileProblems(cfg, key, err)...) }
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
	switch t := cfg.Server.TLS; {
	case t.Enabled() && t.Complete():
		f.certs, err = edge.LoadCerts("server.tls", t, log)
		note("server.tls", err)
	case cfg.Server.ACME.Complete():
		f.certs, err = edge.ObtainCerts(&cfg.Server, log)
		note("server.acme", err)
	}
	if t := cfg.EPP.TLS; t.Enabled() && t.Complete() {
		f.eppCerts, err = edge.LoadCerts("epp.tls", t, log)
		note("epp.tls", err)
	}
	f.trtllm = connector.TRTLLM{PerfMetrics: cfg.TRTLLM.PerfMetrics}
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
	problems = append(problems, discoveryProblems(cfg)...)
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

// fileProblems returns the problems in err, which concerns the file that key of cfg names. err may
// be nil.
func fileProblems(cfg *config.Config, key string, err error) (problems config.Problems) {
	var files pemfile.Errors
	switch {
	case errors.As(err, &files): // each file has a key of its own
		for _, e := range files {
			problems = append(problems, cfg.Problem(e.Key, e.Err.Error()))
		}
	case err != nil:
		problems = append(problems, cfg.Problem(key, err.Error()))
	}
	return problems
}

// discoveryProblems returns the problems of the files with the keys for discovery.
func discoveryProblems(cfg *config.Config) (problems config.Problems) {
	d := cfg.Discovery
	if !d.Etcd.Access().Complete() {
		d.Etcd = config.DiscoveryEtcd{}
	}
	if _, err := discovery.New(d, discovery.Options{}); err != nil {
		for _, p := range config.AsProblems(err) {
			problems = append(problems, cfg.Problem(p.Key, p.Message))
		}
	}
	return problems
}

// loadTokenizer reads a tokenizer.json.
func loadTokenizer(path string) (tokens.Encoder, error) {
	file, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return bpe.Parse(file)
}

// loadKeys reads the API keys; nil if clients need none. Errors name the file.
func loadKeys(cfg *config.Config) (*admission.Keys, error) {
	path := cfg.Server.Auth.KeysFile
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	keys, err := admission.ParseKeys(text, cfg.Tenants...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return keys, nil
}

// loadTokens returns the verifier of tokens. It notes the problems of files, and leaves out
// a table without a source of keys.
func loadTokens(cfg *config.Config, log *slog.Logger, note func(key string, err error)) (*idtoken.Verifier, error) {
	var (
		tables []config.JWT
		files  [][]byte
		keys   []string // of the file of each table
		failed error
	)
	for i, j := range cfg.JWTs {
		if j.JWKSFile == "" && j.JWKSURL == "" {
			continue
		}
		key := fmt.Sprintf("jwt[%d].jwks_file", i)
		var text []byte
		if j.JWKSFile != "" {
			var err error
			if text, err = os.ReadFile(j.JWKSFile); err != nil {
				note(key, err)
				failed = err
			}
		}
		tables, files, keys = append(tables, j), append(files, text), append(keys, key)
	}
	if failed != nil {
		return nil, failed
	}
	v, err := idtoken.New(tables, files, admission.Tenants(cfg.Tenants), log)
	var file *idtoken.FileError
	if errors.As(err, &file) {
		note(keys[file.Table], fmt.Errorf("%s: %w", tables[file.Table].JWKSFile, err))
	}
	return v, err
}
