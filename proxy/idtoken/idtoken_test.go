package idtoken

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/golang-jwt/jwt/v5"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// signers are private keys by their ids, which begin with the algorithm.
var signers = sync.OnceValue(func() map[string]crypto.Signer {
	list := map[string]crypto.Signer{}
	list["ES256"], _ = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	list["ES256-other"], _ = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	list["RS256"], _ = rsa.GenerateKey(rand.Reader, 2048)
	_, key, _ := ed25519.GenerateKey(rand.Reader)
	list["EdDSA"] = key
	return list
})

// keysOf returns the set of the public keys with these ids.
func keysOf(t testing.TB, ids ...string) []byte {
	t.Helper()
	set := jwkset.JWKSMarshal{}
	for _, id := range ids {
		key, err := jwkset.NewJWKFromKey(signers()[id].Public(), jwkset.JWKOptions{Metadata: jwkset.JWKMetadataOptions{KID: id}})
		if err != nil {
			t.Fatal(err)
		}
		set.Keys = append(set.Keys, key.Marshal())
	}
	text, err := json.Marshal(set)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// claims returns good claims with changes; a nil value removes a claim.
func claims(changes jwt.MapClaims) jwt.MapClaims {
	c := jwt.MapClaims{"iss": "https://issuer", "aud": "pdproxy", "exp": time.Now().Add(time.Hour).Unix(), "team": "gold", "sub": "who"}
	for name, value := range changes {
		if c[name] = value; value == nil {
			delete(c, name)
		}
	}
	return c
}

// sign returns a token that the key of that id has signed.
func sign(t testing.TB, id string, c jwt.MapClaims, header ...any) string {
	t.Helper()
	method, _, _ := strings.Cut(id, "-")
	token := jwt.NewWithClaims(jwt.GetSigningMethod(method), c)
	token.Header["kid"] = id
	for n := 0; n < len(header); n += 2 {
		if token.Header[header[n].(string)] = header[n+1]; header[n+1] == nil {
			delete(token.Header, header[n].(string))
		}
	}
	text, err := token.SignedString(signers()[id])
	if err != nil {
		t.Fatal(err)
	}
	return text
}

var gold = tenant.New(tenant.Tenant{Name: "gold", Class: "low", Models: []string{"a", "b"}, Limits: tenant.Limits{Requests: 5}})

func issuerConfig() config.JWT {
	c := config.DefaultJWT()
	c.Issuer, c.Audience, c.JWKSFile, c.TenantClaim = "https://issuer", "pdproxy", "keys.json", "team"
	return c
}

// newVerifier returns a verifier with the keys of a file.
func newVerifier(t testing.TB, c config.JWT) *Verifier {
	t.Helper()
	v, err := New([]config.JWT{c}, [][]byte{keysOf(t, "ES256", "RS256", "EdDSA")}, map[string]*tenant.Tenant{"gold": gold}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// Good tokens of each kind of key name their tenant.
func TestGoodTokens(t *testing.T) {
	v := newVerifier(t, issuerConfig())
	for name, token := range map[string]string{
		"ECDSA":              sign(t, "ES256", claims(nil)),
		"RSA":                sign(t, "RS256", claims(nil)),
		"EdDSA":              sign(t, "EdDSA", claims(nil)),
		"no id of the key":   sign(t, "ES256", claims(nil), "kid", nil),
		"several audiences":  sign(t, "ES256", claims(jwt.MapClaims{"aud": []string{"other", "pdproxy"}})),
		"valid since before": sign(t, "ES256", claims(jwt.MapClaims{"nbf": time.Now().Add(-time.Minute).Unix(), "iat": time.Now().Unix()})),
		"issuer's clock":     sign(t, "ES256", claims(jwt.MapClaims{"nbf": time.Now().Add(leeway / 2).Unix(), "iat": time.Now().Add(leeway / 2).Unix()})),
		"clocks differ":      sign(t, "ES256", claims(jwt.MapClaims{"exp": time.Now().Add(-leeway / 2).Unix()})),
	} {
		if got, err := v.Tenant(context.Background(), token); err != nil || got != gold {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

// Every bad token is refused with a text that tells nothing of it.
func TestBadTokens(t *testing.T) {
	v := newVerifier(t, issuerConfig())
	good := sign(t, "ES256", claims(nil))
	parts := strings.Split(good, ".")
	b64 := base64.RawURLEncoding.EncodeToString
	body := func(c jwt.MapClaims) string {
		text, _ := json.Marshal(c)
		return b64(text)
	}
	public, err := x509.MarshalPKIXPublicKey(signers()["RS256"].Public())
	if err != nil {
		t.Fatal(err)
	}
	hmac := func(secret []byte) string {
		token := jwt.NewWithClaims(jwt.SigningMethodHS256, claims(nil))
		token.Header["kid"] = "RS256"
		text, err := token.SignedString(secret)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	for name, tt := range map[string]struct {
		token string
		want  error
	}{
		"empty":                     {"", errInvalid},
		"dots":                      {"..", errInvalid},
		"an API key":                {"pd-5ecret", errInvalid},
		"four parts":                {good + ".x", errInvalid},
		"no base64":                 {"!.!.!", errInvalid},
		"no JSON":                   {b64([]byte("5ecret")) + "." + b64([]byte("5ecret")) + ".x", errInvalid},
		"too long":                  {sign(t, "ES256", claims(jwt.MapClaims{"x": strings.Repeat("x", maxToken)})), errInvalid},
		"alg none":                  {b64([]byte(`{"alg":"none"}`)) + "." + parts[1] + ".", errInvalid},
		"alg None":                  {b64([]byte(`{"alg":"None","kid":"ES256"}`)) + "." + parts[1] + "." + parts[2], errInvalid},
		"no alg":                    {b64([]byte(`{"kid":"ES256"}`)) + "." + parts[1] + "." + parts[2], errInvalid},
		"HMAC with the public key":  {hmac(public), errInvalid},
		"HMAC with the PEM":         {hmac(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public})), errInvalid},
		"HMAC with nothing":         {hmac([]byte{}), errInvalid},
		"another algorithm":         {b64([]byte(`{"alg":"RS256","kid":"ES256"}`)) + "." + parts[1] + "." + parts[2], errInvalid},
		"no signature":              {parts[0] + "." + parts[1] + ".", errInvalid},
		"another body":              {parts[0] + "." + body(claims(jwt.MapClaims{"team": "gold", "sub": "5ecret"})) + "." + parts[2], errInvalid},
		"unknown key":               {sign(t, "ES256-other", claims(nil)), errInvalid},
		"another key of that id":    {sign(t, "ES256-other", claims(nil), "kid", "ES256"), errInvalid},
		"kid is a number":           {sign(t, "ES256", claims(nil), "kid", 5), errInvalid},
		"critical extension":        {sign(t, "ES256", claims(nil), "crit", []string{"exp"}), errInvalid},
		"no issuer":                 {sign(t, "ES256", claims(jwt.MapClaims{"iss": nil})), errIssuer},
		"another issuer":            {sign(t, "ES256", claims(jwt.MapClaims{"iss": "https://5ecret"})), errIssuer},
		"issuer is a number":        {sign(t, "ES256", claims(jwt.MapClaims{"iss": 5})), errIssuer},
		"issuer with a slash":       {sign(t, "ES256", claims(jwt.MapClaims{"iss": "https://issuer/"})), errIssuer},
		"no audience":               {sign(t, "ES256", claims(jwt.MapClaims{"aud": nil})), errInvalid},
		"another audience":          {sign(t, "ES256", claims(jwt.MapClaims{"aud": "5ecret"})), errAudience},
		"audience is a number":      {sign(t, "ES256", claims(jwt.MapClaims{"aud": 5})), errInvalid},
		"no expiry":                 {sign(t, "ES256", claims(jwt.MapClaims{"exp": nil})), errInvalid},
		"expired":                   {sign(t, "ES256", claims(jwt.MapClaims{"exp": time.Now().Add(-time.Hour).Unix()})), errExpired},
		"expiry is a text":          {sign(t, "ES256", claims(jwt.MapClaims{"exp": "5ecret"})), errInvalid},
		"not valid yet":             {sign(t, "ES256", claims(jwt.MapClaims{"nbf": time.Now().Add(time.Hour).Unix()})), errEarly},
		"not valid yet, by little":  {sign(t, "ES256", claims(jwt.MapClaims{"nbf": time.Now().Add(leeway + time.Minute).Unix()})), errEarly},
		"issued in the future":      {sign(t, "ES256", claims(jwt.MapClaims{"iat": time.Now().Add(leeway + time.Minute).Unix()})), errEarly},
		"issue time is a text":      {sign(t, "ES256", claims(jwt.MapClaims{"iat": "5ecret"})), errInvalid},
		"no tenant":                 {sign(t, "ES256", claims(jwt.MapClaims{"team": nil})), errClaim},
		"tenant is a list":          {sign(t, "ES256", claims(jwt.MapClaims{"team": []string{"gold"}})), errClaim},
		"unknown tenant":            {sign(t, "ES256", claims(jwt.MapClaims{"team": "5ecret"})), errTenant},
		"empty tenant":              {sign(t, "ES256", claims(jwt.MapClaims{"team": ""})), errTenant},
		"expired with another key":  {sign(t, "ES256-other", claims(jwt.MapClaims{"exp": time.Now().Add(-time.Hour).Unix()}), "kid", "ES256"), errInvalid},
		"several signatures (JSON)": {`{"payload":"` + parts[1] + `"}`, errInvalid},
	} {
		got, err := v.Tenant(context.Background(), tt.token)
		if err != tt.want || got != nil {
			t.Errorf("%s: %+v, %v, want %v", name, got, err, tt.want)
		}
		var oe *openai.Error
		if !errors.As(err, &oe) || oe.Status != 401 || strings.Contains(oe.Message, "5ecret") {
			t.Errorf("%s: %+v", name, oe)
		}
	}
}

// Claims name the class and the models. A claim with a wrong type is refused.
func TestClaims(t *testing.T) {
	c := issuerConfig()
	c.TenantClaim, c.ClassClaim, c.ModelsClaim = "org.team", "https://example.org/class", "models"
	v := newVerifier(t, c)
	org := map[string]any{"team": "gold"}
	for name, tt := range map[string]struct {
		claims jwt.MapClaims
		class  string
		models []string
		err    error
	}{
		"all":                  {jwt.MapClaims{"org": org, "https://example.org/class": "high", "models": []string{"b", "c"}}, "high", []string{"b"}, nil},
		"no class":             {jwt.MapClaims{"org": org, "models": "a"}, "low", []string{"a"}, nil},
		"no model":             {jwt.MapClaims{"org": org, "models": []string{}}, "low", []string{}, nil},
		"models missing":       {jwt.MapClaims{"org": org}, "", nil, errClaim},
		"models of numbers":    {jwt.MapClaims{"org": org, "models": []any{"a", 5}}, "", nil, errClaim},
		"models an object":     {jwt.MapClaims{"org": org, "models": org}, "", nil, errClaim},
		"class a number":       {jwt.MapClaims{"org": org, "models": "a", "https://example.org/class": 5}, "", nil, errClaim},
		"class too long":       {jwt.MapClaims{"org": org, "models": "a", "https://example.org/class": strings.Repeat("c", maxClass+1)}, "", nil, errClaim},
		"tenant not in object": {jwt.MapClaims{"org": "gold", "models": "a"}, "", nil, errClaim},
	} {
		got, err := v.Tenant(context.Background(), sign(t, "ES256", claims(tt.claims)))
		if err != tt.err || err == nil && (got.Class != tt.class || !reflect.DeepEqual(got.Models, tt.models) || got.Name != "gold") {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	fixed := issuerConfig()
	fixed.TenantClaim, fixed.Tenant = "", "gold"
	if got, err := newVerifier(t, fixed).Tenant(context.Background(), sign(t, "ES256", claims(jwt.MapClaims{"team": "other"}))); err != nil || got != gold {
		t.Errorf("with a fixed tenant: %+v, %v", got, err)
	}
}

// A file without public keys is an error.
func TestKeyFiles(t *testing.T) {
	for name, text := range map[string]string{
		"empty": "", "no JSON": "5ecret", "no keys": `{"keys":[]}`, "a list": `[]`, "a secret key": `{"keys":[{"kty":"oct","kid":"a","alg":"HS256","k":"NWVjcmV0"}]}`,
		"broken key": `{"keys":[{"kty":"RSA","kid":"a","n":"!","e":"AQAB"}]}`,
	} {
		_, err := New([]config.JWT{issuerConfig()}, [][]byte{[]byte(text)}, nil, slog.New(slog.DiscardHandler))
		var file *FileError
		if !errors.As(err, &file) || file.Table != 0 || strings.Contains(err.Error(), "5ecret") || strings.Contains(err.Error(), "NWVj") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// issuerSite is an issuer whose keys a test changes.
type issuerSite struct {
	mu     sync.Mutex
	status int
	keys   []byte
	asked  int
}

func (s *issuerSite) RoundTrip(r *http.Request) (*http.Response, error) {
	s.mu.Lock()
	s.asked++
	status, body := s.status, io.NopCloser(strings.NewReader(string(s.keys)))
	s.mu.Unlock()
	switch status {
	case 0:
		return nil, errors.New("nobody listens")
	case hangs:
		<-r.Context().Done()
		return nil, r.Context().Err()
	case hangsInBody:
		return &http.Response{StatusCode: 200, Body: hanging{r.Context()}, Request: r}, nil
	}
	header := http.Header{"Location": {"https://elsewhere"}}
	return &http.Response{StatusCode: status, Header: header, Body: body, Request: r}, nil
}

// The issuer accepts a request and then sends nothing, or no body.
const (
	hangs       = -1
	hangsInBody = -2
)

// hanging is a body that does not come.
type hanging struct{ ctx context.Context }

func (h hanging) Read([]byte) (int, error) { <-h.ctx.Done(); return 0, h.ctx.Err() }
func (hanging) Close() error               { return nil }

func (s *issuerSite) set(status int, keys []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status, s.keys = status, keys
}

// Keys are read when a token needs them, again when they are old or a token has a new key,
// and never more often than fetchPause.
func TestFetchedKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, site := withSite(t)
		step := func(name, id string, asked int, want error) {
			t.Helper()
			_, err := v.Tenant(context.Background(), sign(t, id, claims(nil)))
			synctest.Wait() // keys that are old are read beside the request
			if err != want || site.asked != asked {
				t.Errorf("%s: error %v after %d requests to the issuer, want %v after %d", name, err, site.asked, want, asked)
			}
		}
		step("the issuer is away", "ES256", 1, errKeys)
		step("soon again", "ES256", 1, errKeys)
		for n, bad := range []struct {
			status int
			keys   []byte
		}{{500, keysOf(t, "ES256")}, {302, keysOf(t, "ES256")}, {200, []byte("<html>")}, {200, []byte(strings.Repeat(" ", maxKeys) + "{}")}} {
			site.set(bad.status, bad.keys)
			time.Sleep(fetchPause)
			step("a bad answer", "ES256", 2+n, errKeys)
		}
		site.set(200, keysOf(t, "ES256"))
		time.Sleep(fetchPause)
		step("the issuer is back", "ES256", 6, nil)
		step("an unknown key", "RS256", 6, errInvalid)
		time.Sleep(fetchPause)
		step("an unknown key later", "RS256", 7, errInvalid)
		step("the key is known", "ES256", 7, nil)
		site.set(200, keysOf(t, "RS256"))
		time.Sleep(fetchPause)
		step("the issuer has changed its key", "RS256", 8, nil)
		step("the old key", "ES256", 8, errInvalid)
		site.set(0, nil)
		time.Sleep(time.Hour + time.Second)
		step("old keys while the issuer is away", "RS256", 9, nil)
		site.set(200, keysOf(t, "ES256"))
		time.Sleep(fetchPause)
		step("keys that are a little old", "RS256", 10, nil)
		step("the key was withdrawn", "RS256", 10, errInvalid)
		site.set(200, keysOf(t, "RS256"))
		time.Sleep(2*time.Hour + time.Second)
		step("the key was withdrawn long ago", "ES256", 11, errInvalid)
		site.set(0, nil)
		time.Sleep(2*time.Hour + time.Second)
		step("very old keys while the issuer is away", "RS256", 12, nil)
		step("very old keys, soon again", "RS256", 12, nil)
	})
}

// withSite returns a verifier, and the site of its issuer, which nobody reaches yet.
func withSite(t *testing.T) (*Verifier, *issuerSite) {
	t.Helper()
	c := issuerConfig()
	c.JWKSFile, c.JWKSURL = "", "https://issuer/jwks.json"
	v, err := New([]config.JWT{c}, [][]byte{nil}, map[string]*tenant.Tenant{"gold": gold}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	site := &issuerSite{}
	v.issuers[c.Issuer].keys.client.Transport = site
	return v, site
}

// A reload keeps the keys of an issuer that is away, and asks an issuer at once: a key that the
// issuer has withdrawn is refused afterwards.
func TestKeysOverAReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, site := withSite(t)
		token := sign(t, "ES256", claims(nil))
		sends := func(name string, asked int, want error) {
			t.Helper()
			_, err := v.Tenant(context.Background(), token)
			if synctest.Wait(); err != want || site.asked != asked {
				t.Errorf("%s: error %v after %d requests to the issuer, want %v after %d", name, err, site.asked, want, asked)
			}
		}
		reload := func() {
			old := v
			v, _ = withSite(t)
			v.issuers["https://issuer"].keys.client.Transport = site
			v.Continue(old)
			synctest.Wait()
		}
		v.Continue(nil) // at the start
		reload()
		sends("no keys to keep", 1, errKeys)
		site.set(200, keysOf(t, "ES256"))
		reload()
		sends("the issuer is there", 2, nil)
		site.set(0, nil)
		reload()
		sends("the issuer is away", 3, nil)
		site.set(200, keysOf(t, "RS256"))
		reload()
		sends("the key is withdrawn", 4, errInvalid)
		c := issuerConfig()
		c.JWKSFile, c.JWKSURL = "", "https://issuer/other"
		other, err := New([]config.JWT{c}, [][]byte{nil}, nil, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		if other.Continue(v); other.issuers[c.Issuer].keys.keys.Load() != nil {
			t.Error("another URL has the keys of the old one")
		}
	})
}

// An issuer that hangs gets one request at a time. Tokens with known keys do not wait for it,
// and other tokens wait for fetchLimit at most.
func TestHangingIssuer(t *testing.T) {
	for name, how := range map[string]int{"no answer": hangs, "no body": hangsInBody} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				v, site := withSite(t)
				began := time.Now()
				sends := func(ctx context.Context, id string, after time.Duration, want error) {
					t.Helper()
					if _, err := v.Tenant(ctx, sign(t, id, claims(nil))); err != want || time.Since(began) != after {
						t.Errorf("%s: error %v after %v, want %v after %v", id, err, time.Since(began), want, after)
					}
				}
				site.set(how, nil)
				var clients sync.WaitGroup
				for range 20 {
					clients.Go(func() { sends(context.Background(), "ES256", fetchLimit, errKeys) })
				}
				impatient, cancel := context.WithTimeout(context.Background(), time.Second)
				defer cancel()
				clients.Go(func() { sends(impatient, "ES256", time.Second, errKeys) })
				clients.Wait()
				if site.asked != 1 {
					t.Errorf("%d requests to the issuer, want 1", site.asked)
				}
				site.set(200, keysOf(t, "ES256"))
				time.Sleep(fetchPause)
				sends(context.Background(), "ES256", fetchLimit+fetchPause, nil)
				site.set(how, nil)
				time.Sleep(time.Hour + time.Second) // the keys are old
				began = time.Now()
				sends(context.Background(), "ES256", 0, nil)
				synctest.Wait()
				if site.asked != 3 {
					t.Errorf("%d requests to the issuer, want 3", site.asked)
				}
				clients.Go(func() { sends(context.Background(), "RS256", fetchLimit, errInvalid) })
				synctest.Wait()
				sends(context.Background(), "ES256", 0, nil)
				clients.Wait()
				sends(context.Background(), "RS256", fetchLimit, errInvalid) // soon again
				sends(context.Background(), "ES256", fetchLimit, nil)
				if site.asked != 3 {
					t.Errorf("%d requests to the issuer, want 3", site.asked)
				}
			})
		})
	}
}

// FuzzTenant: no text makes the verifier fail, and none but a signed token is accepted.
func FuzzTenant(f *testing.F) {
	v := newVerifier(f, issuerConfig())
	good := sign(f, "ES256", claims(nil))
	for _, text := range []string{good, "", "..", good[:len(good)-1], strings.Replace(good, ".", "..", 1), "e30.e30.e30"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, token string) {
		got, err := v.Tenant(context.Background(), token)
		var oe *openai.Error
		if (err == nil) != (got != nil) || err != nil && !errors.As(err, &oe) || err == nil && !strings.HasPrefix(token, good[:strings.LastIndexByte(good, '.')+1]) {
			t.Errorf("%+v, %v", got, err)
		}
	})
}
