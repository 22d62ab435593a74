package idtoken

import (
	"context"
	"encoding/json"
	"log/slog"
	"testing"

	"github.com/golang-jwt/jwt/v5"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// TestKeyUse: only keys that the issuer made to verify signatures verify tokens, and only those of
// their algorithm, whether or not a token names its key.
func TestKeyUse(t *testing.T) {
	sets := func(id string, members map[string]any) []byte {
		var set struct {
			Keys []map[string]any `json:"keys"`
		}
		if err := json.Unmarshal(keysOf(t, id, "EdDSA"), &set); err != nil {
			t.Fatal(err)
		}
		for name, value := range members {
			set.Keys[0][name] = value
		}
		text, err := json.Marshal(set)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	for _, tt := range []struct {
		name    string
		members map[string]any
		want    error
	}{
		{"nothing stated", nil, nil},
		{"signatures", map[string]any{"use": "sig", "key_ops": []string{"verify"}, "alg": "RS256"}, nil},
		{"two operations", map[string]any{"key_ops": []string{"encrypt", "verify"}}, nil},
		{"encryption", map[string]any{"use": "enc"}, errInvalid},
		{"encryption of keys", map[string]any{"key_ops": []string{"wrapKey"}}, errInvalid},
		{"encryption and decryption", map[string]any{"use": "sig", "key_ops": []string{"encrypt", "decrypt"}}, errInvalid},
		{"no operation", map[string]any{"key_ops": []string{}}, errInvalid},
		{"another use", map[string]any{"use": "other"}, errInvalid},
		{"an algorithm of encryption", map[string]any{"alg": "RSA-OAEP-256"}, errInvalid},
		{"another algorithm of signatures", map[string]any{"alg": "PS256"}, errInvalid},
		{"encryption with an algorithm of signatures", map[string]any{"use": "enc", "alg": "RS256"}, errInvalid},
	} {
		v, err := New([]config.JWT{issuerConfig()}, [][]byte{sets("RS256", tt.members)}, map[string]*tenant.Tenant{"gold": gold}, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		for form, token := range map[string]string{"named key": sign(t, "RS256", claims(nil)), "no id of the key": sign(t, "RS256", claims(nil), "kid", nil)} {
			if _, err := v.Tenant(context.Background(), token); err != tt.want {
				t.Errorf("%s, %s: got %v, want %v", tt.name, form, err, tt.want)
			}
		}
		if _, err := v.Tenant(context.Background(), sign(t, "EdDSA", claims(jwt.MapClaims{}), "kid", nil)); err != nil {
			t.Errorf("%s: the other key: %v", tt.name, err)
		}
	}
}
