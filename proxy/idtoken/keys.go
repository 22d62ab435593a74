package idtoken

import (
	"context"
	"crypto"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/MicahParks/keyfunc/v3"
	"github.com/golang-jwt/jwt/v5"

	"github.com/pdproxy/pdproxy/proxy/config"
)

const (
	// leeway is the accepted difference between the clocks of the issuer and of this host.
	leeway = 30 * time.Second
	// fetchPause is the shortest time between two requests to an issuer, so that tokens
	// with unknown keys cause no load on the issuer.
	fetchPause = 10 * time.Second
	// fetchLimit bounds one request to an issuer.
	fetchLimit = 5 * time.Second
	// maxKeys is the size of the largest accepted set of keys, in bytes.
	maxKeys = 1 << 20
)

// errNoKeys reports that no set of keys has been read yet.
var errNoKeys = errors.New("no keys of the issuer have been read")

// keySet is the public keys of one issuer. It reads them when a token needs them. No token whose
// key is known waits for the issuer, except the first one after a long pause.
type keySet struct {
	url     string // "": the keys are those of a file
	refresh time.Duration
	client  *http.Client
	keys    atomic.Pointer[loadedKeys] // nil: none were read yet

	mu      sync.Mutex
	tried   time.Time     // of the last request; guarded by mu
	reading chan struct{} // closed when the present request ends; nil: there is none; guarded by mu
}

// loadedKeys is a set of keys that was read at a time.
type loadedKeys struct {
	named keyfunc.Keyfunc // finds the key that a token names
	all   []verifyingKey
	at    time.Time
}

// verifyingKey is a public key and the algorithm for which the issuer made it; "": any.
type verifyingKey struct {
	alg    string
	public crypto.PublicKey
}

// find returns the key of the token, or all keys that may have signed a token without a key id.
func (k *loadedKeys) find(token *jwt.Token) (any, error) {
	if _, named := token.Header[jwkset.HeaderKID]; named {
		return k.named.Keyfunc(token)
	}
	var set jwt.VerificationKeySet
	for _, key := range k.all {
		if key.alg == "" || key.alg == token.Method.Alg() {
			set.Keys = append(set.Keys, key.public)
		}
	}
	return set, nil
}

// verifies reports whether the issuer made a key to verify signatures (RFC 7517, 4.2 to 4.4).
func verifies(key jwkset.JWKMarshal) bool {
	return (key.USE == "" || key.USE == jwkset.UseSig) && (key.KEYOPS == nil || slices.Contains(key.KEYOPS, jwkset.KeyOpsVerify)) &&
		(key.ALG == "" || slices.Contains(methods, key.ALG.String()))
}

func newKeySet(c config.JWT, file []byte, transport http.RoundTripper) (*keySet, error) {
	s := &keySet{url: c.JWKSURL, refresh: time.Duration(c.JWKSRefresh)}
	if s.url == "" {
		return s, s.load(file)
	}
	s.client = &http.Client{Transport: transport, Timeout: fetchLimit, CheckRedirect: func(*http.Request, []*http.Request) error {
		return errors.New("the issuer's keys must be at jwks_url itself, without a redirect")
	}}
	return s, nil
}

// follow takes over the keys of old, if it has any, and begins to read new ones.
func (s *keySet) follow(old *keySet, log *slog.Logger) {
	if keys := old.keys.Load(); keys != nil {
		s.keys.Store(keys)
		s.begin(log)
	}
}

// load replaces the keys by those of a JSON Web Key Set. Keys of an unknown type, and keys that are
// not for signatures, are left out.
func (s *keySet) load(text []byte) error {
	var set jwkset.JWKSMarshal
	if err := json.Unmarshal(text, &set); err != nil {
		return errors.New("the keys are not a JSON Web Key Set")
	}
	storage := jwkset.NewMemoryStorage()
	loaded := &loadedKeys{at: time.Now()}
	for _, one := range set.Keys {
		key, err := jwkset.NewJWKFromMarshal(one, jwkset.JWKMarshalOptions{Private: true}, jwkset.JWKValidateOptions{})
		if err != nil || one.KTY == jwkset.KtyOct || !verifies(one) {
			continue
		}
		if err := storage.KeyWrite(context.Background(), key); err != nil {
			return err
		}
		public := key.Key()
		if private, ok := public.(crypto.Signer); ok {
			public = private.Public()
		}
		loaded.all = append(loaded.all, verifyingKey{one.ALG.String(), public})
	}
	if len(loaded.all) == 0 {
		return errors.New("the keys are not a JSON Web Key Set with a public key for signatures")
	}
	named, err := keyfunc.New(keyfunc.Options{Storage: storage})
	if err != nil {
		return err
	}
	loaded.named = named
	s.keys.Store(loaded)
	return nil
}

// find returns the function that finds the key of a token. The end of ctx ends the wait for the
// issuer.
func (s *keySet) find(ctx context.Context, log *slog.Logger) jwt.Keyfunc {
	return func(token *jwt.Token) (any, error) {
		now := s.keys.Load()
		switch {
		case s.url == "":
		case now == nil || s.long(now):
			now = s.read(ctx, log)
		case time.Since(now.at) > s.refresh:
			s.begin(log)
		}
		if now == nil {
			return nil, errNoKeys
		}
		key, err := now.find(token)
		if errors.Is(err, jwkset.ErrKeyNotFound) && s.url != "" { // the issuer may have a new key
			if next := s.read(ctx, log); next != now {
				return next.find(token)
			}
		}
		return key, err
	}
}

// long reports whether the keys are so old that tokens must not be judged by them before the
// issuer was asked once: an issuer that withdraws a key relies on it.
func (s *keySet) long(keys *loadedKeys) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(keys.at) > 2*s.refresh && (s.reading != nil || s.tried.Before(keys.at.Add(s.refresh)))
}

// read reads the keys from the issuer and returns the present keys, nil for none. It returns at
// once if it has asked the issuer shortly before. Calls at the same time share one request.
func (s *keySet) read(ctx context.Context, log *slog.Logger) *loadedKeys {
	if done := s.begin(log); done != nil {
		select {
		case <-done:
		case <-ctx.Done():
		}
	}
	return s.keys.Load()
}

// begin begins a request to the issuer, and returns a channel that is closed at its end; nil if
// the last request was shortly before.
func (s *keySet) begin(log *slog.Logger) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.reading != nil:
		return s.reading
	case !s.tried.IsZero() && time.Since(s.tried) < fetchPause:
		return nil
	}
	done := make(chan struct{})
	s.tried, s.reading = time.Now(), done
	go func() { // ends after fetchLimit
		defer close(done)
		text, err := s.get()
		if err == nil {
			err = s.load(text)
		}
		if err != nil {
			log.Warn("the keys of an issuer of tokens cannot be read", "url", s.url, "error", err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.reading = nil
	}()
	return done
}

func (s *keySet) get() ([]byte, error) {
	resp, err := s.client.Get(s.url)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the issuer answers with status %d", resp.StatusCode)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxKeys+1))
	if err == nil && len(text) > maxKeys {
		err = fmt.Errorf("the set of keys has more than %d bytes", maxKeys)
	}
	return text, err
}
