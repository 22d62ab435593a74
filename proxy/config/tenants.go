package config

import (
	"math"
	"time"
)

// Tenant is a group of clients with common limits. API keys and tokens name their tenant.
type Tenant struct {
	// Name is the name in keys, tokens and metrics: letters, digits and - _ . : @,
	// unique. Required.
	Name string `toml:"name"`
	// Class is the priority class of its requests. Default "": none.
	Class string `toml:"class"`
	// Weight is its share among the tenants that wait. Default 1; above 0.
	Weight float64 `toml:"weight"`
	// Models are the names that its requests may have as the model. A name of [[model]]
	// allows the models to which it leads for requests with that name. Default []: every
	// name.
	Models []string `toml:"models"`
	// RequestsPerMinute is the budget of requests. A tenant that was idle for a minute may
	// use it at once. Default 0: no limit.
	RequestsPerMinute int `toml:"requests_per_minute"`
	// TokensPerMinute is the budget of tokens, of prompts and answers. Default 0: no limit.
	TokensPerMinute int `toml:"tokens_per_minute"`
	// MaxExchanges is how many of its requests may run or wait at a time. Default 0: no
	// limit.
	MaxExchanges int `toml:"max_exchanges"`
}

// DefaultTenant returns the tenant with each key at its default.
func DefaultTenant() Tenant { return Tenant{Weight: 1} }

// MaxTenantBudget is the largest RequestsPerMinute and TokensPerMinute.
const MaxTenantBudget = 10_000_000_000

// maxTenants bounds the tables, and maxTenantModels the models of one.
const (
	maxTenants      = 4096
	maxTenantModels = 1000
)

// JWT is an issuer of tokens that clients send as Authorization: Bearer TOKEN.
type JWT struct {
	// Issuer is the claim iss of its tokens, exactly; unique. Required.
	Issuer string `toml:"issuer"`
	// Audience is a name that the claim aud has. Required.
	Audience string `toml:"audience"`
	// JWKSURL is the address of the issuer's keys: an https URL, or an http URL of this host.
	// The proxy needs exactly one of jwks_url and jwks_file.
	JWKSURL string `toml:"jwks_url"`
	// JWKSFile is a file with the issuer's keys. Default "": the keys come from jwks_url.
	JWKSFile string `toml:"jwks_file"`
	// JWKSRefresh is the time after which the keys are read again. Default 1h.
	JWKSRefresh Duration `toml:"jwks_refresh"`
	// Tenant is the tenant of all clients of the issuer. Default "": by TenantClaim.
	Tenant string `toml:"tenant"`
	// TenantClaim is the claim with the name of a [[tenant]]. Default "": by Tenant.
	TenantClaim string `toml:"tenant_claim"`
	// ClassClaim is the claim with the priority class. Default "": that of the tenant.
	ClassClaim string `toml:"class_claim"`
	// ModelsClaim is the claim with a list of models that the client may use, of those of
	// its tenant. Default "": all of them.
	ModelsClaim string `toml:"models_claim"`
}

// DefaultJWT returns the issuer with each key at its default.
func DefaultJWT() JWT { return JWT{JWKSRefresh: seconds(3600)} }

// leastRefresh bounds the requests to an issuer.
const leastRefresh = Duration(10 * time.Second)

// tenants checks every [[tenant]].
func (k *checker) tenants() {
	if n := len(k.config.Tenants); n > maxTenants {
		k.add("tenant", "must have at most %d tables, found %d", maxTenants, n)
	}
	names := map[string]string{}
	for i, t := range k.config.Tenants {
		key := func(name string) string { return joinKey(indexKey("tenant", i), name) }
		k.name(key("name"), t.Name)
		k.unique(key("name"), t.Name, names)
		if t.Class != "" {
			k.name(key("class"), t.Class)
		}
		if !(t.Weight > 0) || math.IsInf(t.Weight, 0) { // the first is true for NaN, too
			k.add(key("weight"), "must be more than 0, found %v", t.Weight)
		}
		if len(t.Models) > maxTenantModels {
			k.add(key("models"), "must have at most %d names, found %d", maxTenantModels, len(t.Models))
		}
		for n, model := range t.Models {
			k.modelName(indexKey(key("models"), n), model)
		}
		k.within(key("requests_per_minute"), t.RequestsPerMinute, 0, MaxTenantBudget)
		k.within(key("tokens_per_minute"), t.TokensPerMinute, 0, MaxTenantBudget)
		k.within(key("max_exchanges"), t.MaxExchanges, 0, math.MaxInt32)
	}
}

// jwts checks every [[jwt]].
func (k *checker) jwts() {
	issuers := map[string]string{}
	for i, j := range k.config.JWTs {
		key := func(name string) string { return joinKey(indexKey("jwt", i), name) }
		k.required(key("issuer"), j.Issuer)
		k.unique(key("issuer"), j.Issuer, issuers)
		k.required(key("audience"), j.Audience)
		switch {
		case j.JWKSURL == "" && j.JWKSFile == "":
			k.add(key("jwks_url"), "is required, or jwks_file")
		case j.JWKSURL != "" && j.JWKSFile != "":
			k.add(key("jwks_file"), "must not be set together with jwks_url")
		case exposed(j.JWKSURL):
			k.add(key("jwks_url"), "must be https: others on the network could exchange the keys")
		case j.JWKSURL != "":
			k.httpURL(key("jwks_url"), j.JWKSURL)
		}
		if j.JWKSRefresh < leastRefresh {
			k.add(key("jwks_refresh"), "must be at least %v, found %v", leastRefresh, j.JWKSRefresh)
		}
		switch {
		case j.Tenant == "" && j.TenantClaim == "":
			k.add(key("tenant"), "is required, or tenant_claim")
		case j.Tenant != "" && j.TenantClaim != "":
			k.add(key("tenant_claim"), "must not be set together with tenant")
		case j.Tenant != "" && k.config.Tenant(j.Tenant) == nil:
			k.add(key("tenant"), "no [[tenant]] is named %q", j.Tenant)
		}
	}
}

// Tenant returns the [[tenant]] of that name, nil for none.
func (c *Config) Tenant(name string) *Tenant {
	for i := range c.Tenants {
		if c.Tenants[i].Name == name {
			return &c.Tenants[i]
		}
	}
	return nil
}
