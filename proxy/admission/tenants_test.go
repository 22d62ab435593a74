package admission

import (
	"context"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// attributed is the line of the key "secret-NAME" with attributes.
func attributed(name, attributes string) string {
	return strings.TrimSpace(lineOf(name, "secret-"+name)) + " " + attributes + "\n"
}

// A key has the tenant that its line names, or one of its own name.
func TestTenantOfKey(t *testing.T) {
	gold := config.DefaultTenant()
	gold.Name, gold.Class, gold.Weight, gold.Models, gold.RequestsPerMinute, gold.TokensPerMinute, gold.MaxExchanges = "gold", "high", 3, []string{"m"}, 1, 2, 3
	text := attributed("one", "class=low models=a,b rpm=4 tpm=5 max=6") + attributed("two", "") + attributed("gold", "") +
		attributed("three", "tenant=gold") + attributed("four", "tenant=one") + attributed("five", "tenant=group rpm=7")
	k, err := ParseKeys([]byte(text), gold)
	if err != nil {
		t.Fatal(err)
	}
	configured := tenant.Tenant{Name: "gold", Class: "high", Weight: 3, Models: []string{"m"}, Limits: tenant.Limits{Requests: 1, Tokens: 2, Exchanges: 3}}
	one := tenant.Tenant{Name: "one", Class: "low", Weight: 1, Models: []string{"a", "b"}, Limits: tenant.Limits{Requests: 4, Tokens: 5, Exchanges: 6}}
	for name, want := range map[string]tenant.Tenant{
		"one": one, "four": one, "two": {Name: "two", Weight: 1}, "gold": configured, "three": configured,
		"five": {Name: "group", Weight: 1, Limits: tenant.Limits{Requests: 7}},
	} {
		r := httptest.NewRequest("POST", "/v1/completions", nil)
		r.Header.Set("Authorization", "Bearer secret-"+name)
		r, err := k.Authenticate(r)
		if err != nil || KeyName(r) != name || !reflect.DeepEqual(Tenant(r), tenant.New(want)) {
			t.Errorf("%s: key of %q, tenant %+v, error %v", name, KeyName(r), Tenant(r), err)
		}
	}
	if got := Tenant(httptest.NewRequest("POST", "/", nil)); got != nil {
		t.Errorf("without a key: %+v", got)
	}
}

// Every wrong attribute is an error that names the line and the attribute, never the value.
func TestAttributeErrors(t *testing.T) {
	gold := config.DefaultTenant()
	gold.Name = "gold"
	for attributes, want := range map[string]string{
		"5ecret":                             "line 2: the words after the SHA-256",
		"5ecret=1":                           "line 2: the words after the SHA-256",
		"RPM=5":                              "line 2: the words after the SHA-256",
		"tenant=":                            "line 2: attribute tenant: want letters",
		"tenant=5ecret,":                     "line 2: attribute tenant: want letters",
		"tenant=5ecret":                      "line 2: attribute tenant: no [[tenant]]",
		"tenant":                             "line 2: attribute tenant: want letters",
		"class=5ecret/":                      "line 2: attribute class: want letters",
		"models=":                            "line 2: attribute models: want names",
		"models=5ecret,,b":                   "line 2: attribute models: want names",
		"rpm=":                               "line 2: attribute rpm: want a whole number",
		"rpm=0":                              "line 2: attribute rpm: want a whole number",
		"rpm=-5":                             "line 2: attribute rpm: want a whole number",
		"rpm=+5":                             "line 2: attribute rpm: want a whole number",
		"rpm=5.5":                            "line 2: attribute rpm: want a whole number",
		"rpm=5e3":                            "line 2: attribute rpm: want a whole number",
		"rpm=10000000001":                    "line 2: attribute rpm: want a whole number",
		"tpm=99999999999999999999":           "line 2: attribute tpm: want a whole number",
		"max=2147483648":                     "line 2: attribute max: want a whole number",
		"rpm=5 rpm=5":                        "line 2: attribute rpm: the line has the attribute twice",
		"tenant=gold rpm=5":                  "line 2: attribute rpm: the tenant is a [[tenant]]",
		"tenant=first max=5":                 "line 2: attribute max: line 1 has the limits",
		"rpm = 5":                            "line 2: attribute rpm: want a whole number",
		"rpm=５":                              "line 2: attribute rpm: want a whole number",
		"tenant=" + strings.Repeat("5", 257): "line 2: attribute tenant: want letters",
	} {
		k, err := ParseKeys([]byte(attributed("first", "rpm=1")+attributed("second", attributes)), gold)
		if err == nil || !strings.HasPrefix(err.Error(), want) || k != nil {
			t.Errorf("%q: got %v, want %q", attributes, err, want)
		} else if strings.Contains(err.Error(), "5ecret") {
			t.Errorf("%q: the error has the value: %v", attributes, err)
		}
	}
}

// A line that GenerateKey makes with attributes can be read; a wrong attribute is refused.
func TestGenerateKeyWithAttributes(t *testing.T) {
	key, err := GenerateKey("team", "class=high", "", "rpm=5")
	if err != nil {
		t.Fatal(err)
	}
	k, err := ParseKeys([]byte(key.Line))
	if err != nil {
		t.Fatal(err)
	}
	if c := k.client(key.Key); c == nil || c.tenant.Class != "high" || c.tenant.Limits.Requests != 5 {
		t.Errorf("client %+v of the line %q", c, key.Line)
	}
	if _, err := GenerateKey("team", "rpm=none"); err == nil || !strings.Contains(err.Error(), "attribute rpm") {
		t.Errorf("error %v", err)
	}
}

// fakeTokens accepts one token.
type fakeTokens struct{ tenant *tenant.Tenant }

var errToken = openai.NewError(openai.CodeInvalidAPIKey, "the token is not valid")

func (f fakeTokens) Tenant(_ context.Context, token string) (*tenant.Tenant, error) {
	if token == "a.b.c" {
		return f.tenant, nil
	}
	return nil, errToken
}

// Keys and tokens work side by side. Without keys only tokens are accepted.
func TestAuthenticateTokens(t *testing.T) {
	keys, err := ParseKeys([]byte(lineOf("team", "good")))
	if err != nil {
		t.Fatal(err)
	}
	of := tenant.New(tenant.Tenant{Name: "org"})
	for _, tt := range []struct {
		keys   *Keys
		token  string
		client string
		err    error
	}{
		{keys.WithTokens(fakeTokens{of}), "good", "team", nil},
		{keys.WithTokens(fakeTokens{of}), "a.b.c", "org", nil},
		{keys.WithTokens(fakeTokens{of}), "bad", "", errToken},
		{keys.WithTokens(fakeTokens{of}), "", "", ErrNoKey},
		{(*Keys)(nil).WithTokens(fakeTokens{of}), "a.b.c", "org", nil},
		{(*Keys)(nil).WithTokens(fakeTokens{of}), "good", "", errToken},
	} {
		r := httptest.NewRequest("POST", "/v1/completions", nil)
		r.Header.Set("Authorization", "Bearer "+tt.token)
		got, err := tt.keys.Authenticate(r)
		if err != tt.err {
			t.Errorf("token %q: error %v, want %v", tt.token, err, tt.err)
		} else if err == nil && KeyName(got) != tt.client {
			t.Errorf("token %q: client %q, want %q", tt.token, KeyName(got), tt.client)
		}
	}
}
