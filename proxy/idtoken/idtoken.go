// Package idtoken verifies the tokens (JWT, RFC 7519) that clients send instead of an API key,
// and finds the tenants of the clients. Only signatures with a public key are accepted.
//
// The decisions behind this package are in docs/design/tenants.md.
package idtoken

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"

	"github.com/golang-jwt/jwt/v5"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// Verifier verifies tokens of the configured issuers. It is safe for concurrent use.
type Verifier struct {
	issuers map[string]*issuer
	tenants map[string]*tenant.Tenant
	log     *slog.Logger
}

// issuer is one issuer of tokens.
type issuer struct {
	config.JWT
	keys   *keySet
	parser *jwt.Parser
}

// methods are the accepted algorithms. They all need a public key only, so that no text that
// is public can serve as the secret of a signature (RFC 8725, 2.1).
var methods = []string{"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}

// maxToken is the length of the longest accepted token, in bytes.
const maxToken = 16 << 10

// Refusals. Their texts contain nothing of a token.
var (
	errInvalid  = refusal("the token is not valid")
	errIssuer   = refusal("the proxy does not know the issuer of the token")
	errKeys     = refusal("the proxy has no keys of the issuer of the token yet; try again later")
	errExpired  = refusal("the token has expired")
	errEarly    = refusal("the token is not valid yet")
	errAudience = refusal("the token is for another audience")
	errTenant   = refusal("the token names no tenant of this proxy")
	errClaim    = refusal("a claim of the token is missing or has a wrong type")
)

func refusal(text string) *openai.Error { return openai.NewError(openai.CodeInvalidAPIKey, text) }

// New returns a verifier. files holds the content of the jwks_file of each issuer, in the
// order of list; nil for those with a jwks_url. Keys of a jwks_url are read when the first
// token comes. An error names the table by its number.
func New(list []config.JWT, files [][]byte, tenants map[string]*tenant.Tenant, log *slog.Logger) (*Verifier, error) {
	v := &Verifier{issuers: make(map[string]*issuer, len(list)), tenants: tenants, log: log}
	for n, c := range list {
		keys, err := newKeySet(c, files[n], http.DefaultTransport)
		if err != nil {
			return nil, &FileError{n, err}
		}
		v.issuers[c.Issuer] = &issuer{JWT: c, keys: keys, parser: jwt.NewParser(
			jwt.WithValidMethods(methods), jwt.WithIssuer(c.Issuer), jwt.WithAudience(c.Audience), jwt.WithExpirationRequired(), jwt.WithIssuedAt(), jwt.WithLeeway(leeway),
		)}
	}
	return v, nil
}

// Continue makes v judge tokens by the keys that old has read from the same addresses, until the
// issuers answer v. It asks them at once. Without Continue, no token would be valid after a reload
// while an issuer is away. old may be nil, v too. Call it before v is used.
func (v *Verifier) Continue(old *Verifier) {
	if v == nil || old == nil {
		return
	}
	for name, i := range v.issuers {
		if before := old.issuers[name]; before != nil && before.keys.url == i.keys.url && i.keys.url != "" {
			i.keys.follow(before.keys, v.log)
		}
	}
}

// FileError reports that the jwks_file of a [[jwt]] table cannot be used.
type FileError struct {
	Table int // counted from 0
	err   error
}

// Error implements error.
func (e *FileError) Error() string { return e.err.Error() }

// Unwrap returns the cause.
func (e *FileError) Unwrap() error { return e.err }

// Tenant returns the tenant of the client that sent the token, with the class and the models
// that the token names. The end of ctx ends a wait for the issuer. The error is an *openai.Error
// with status 401.
func (v *Verifier) Tenant(ctx context.Context, token string) (*tenant.Tenant, error) {
	if len(token) > maxToken || strings.Count(token, ".") != 2 {
		return nil, errInvalid
	}
	var claims jwt.MapClaims
	head, _, err := jwt.NewParser().ParseUnverified(token, &claims)
	if err != nil || head.Header["crit"] != nil { // no extension is known that a token could require
		return nil, errInvalid
	}
	name, _ := claims["iss"].(string)
	i := v.issuers[name]
	if i == nil {
		return nil, errIssuer
	}
	claims = nil
	if _, err := i.parser.ParseWithClaims(token, &claims, i.keys.find(ctx, v.log)); err != nil {
		return nil, refused(err)
	}
	return v.tenantOf(i, claims)
}

// refused returns the client's error for an error of the parser.
func refused(err error) error {
	switch {
	case errors.Is(err, errNoKeys):
		return errKeys
	case errors.Is(err, jwt.ErrTokenUnverifiable), errors.Is(err, jwt.ErrTokenSignatureInvalid):
		return errInvalid
	case errors.Is(err, jwt.ErrTokenExpired):
		return errExpired
	case errors.Is(err, jwt.ErrTokenNotValidYet), errors.Is(err, jwt.ErrTokenUsedBeforeIssued):
		return errEarly
	case errors.Is(err, jwt.ErrTokenInvalidAudience):
		return errAudience
	}
	return errInvalid
}

// tenantOf returns the tenant that verified claims name.
func (v *Verifier) tenantOf(i *issuer, claims jwt.MapClaims) (*tenant.Tenant, error) {
	name := i.JWT.Tenant
	if i.TenantClaim != "" {
		value, _ := lookup(claims, i.TenantClaim)
		var ok bool
		if name, ok = value.(string); !ok {
			return nil, errClaim
		}
	}
	t := v.tenants[name]
	if t == nil {
		return nil, errTenant
	}
	var class string
	if value, has := lookup(claims, i.ClassClaim); has {
		var ok bool
		if class, ok = value.(string); !ok || len(class) > maxClass {
			return nil, errClaim
		}
	}
	var models []string
	if i.ModelsClaim != "" {
		value, _ := lookup(claims, i.ModelsClaim)
		var ok bool
		if models, ok = texts(value); !ok {
			return nil, errClaim
		}
	}
	if class == "" && models == nil {
		return t, nil
	}
	return t.With(class, models), nil
}

// maxClass is the longest name of a class, in bytes.
const maxClass = 256

// lookup returns the claim of that name. A dot leads into an object, unless a claim has the
// whole name.
func lookup(claims map[string]any, name string) (value any, ok bool) {
	if name == "" {
		return nil, false
	}
	if value, ok = claims[name]; ok {
		return value, true
	}
	outer, inner, dotted := strings.Cut(name, ".")
	if object, isObject := claims[outer].(map[string]any); dotted && isObject {
		return lookup(object, inner)
	}
	return nil, false
}

// texts reads a list of texts, or one text. The result is not nil.
func texts(value any) (list []string, ok bool) {
	switch value := value.(type) {
	case string:
		return []string{value}, true
	case []any:
		list = []string{}
		for _, one := range value {
			text, isText := one.(string)
			if !isText {
				return nil, false
			}
			list = append(list, text)
		}
		return list, true
	}
	return nil, false
}
