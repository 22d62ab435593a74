package source

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"

	"aead.dev/minisign"
)

// ErrSignature reports that the module has no valid signature by the public key.
var ErrSignature = errors.New("the module is not signed by the public key")

// maxSignature is the largest signature file that is read, in bytes.
const maxSignature = 16 << 10

// signatureSuffix follows the name of a module in the name of its signature, as
// minisign writes it.
const signatureSuffix = ".minisig"

func parseKey(text string) (key minisign.PublicKey, err error) {
	if err = key.UnmarshalText([]byte(strings.TrimSpace(text))); err != nil {
		return key, errors.New("not a public key of minisign")
	}
	return key, nil
}

// signaturePlace returns the path or URL of the signature, "" if it is a part of an
// artifact in a registry.
func (s Source) signaturePlace() string {
	switch {
	case s.PublicKey == "":
		return ""
	case s.Signature != "":
		return s.Signature
	case s.inRegistry():
		return ""
	case s.Remote():
		u, err := url.Parse(s.Location)
		if err != nil {
			return s.Location + signatureSuffix
		}
		u.Path, u.RawPath = u.Path+signatureSuffix, ""
		return u.String()
	}
	return s.Location + signatureSuffix
}

// verify checks the module against the public key. signature is the signature of the module; nil if
// the module has none.
func (s Source) verify(ctx context.Context, wasm, signature []byte) error {
	if s.PublicKey == "" {
		return nil
	}
	key, err := parseKey(s.PublicKey)
	if err != nil {
		return fmt.Errorf("%w: public_key: %w", ErrSignature, err)
	}
	if place := s.signaturePlace(); place != "" {
		if signature, err = (Source{Location: place}).bytes(ctx, maxSignature); err != nil {
			return fmt.Errorf("%w: read signature: %w", ErrSignature, err)
		}
	}
	if len(signature) == 0 {
		return fmt.Errorf("%w: the artifact has no signature (pdproxy plugin push --signature adds one)", ErrSignature)
	}
	var parsed minisign.Signature
	if err := parsed.UnmarshalText(signature); err != nil {
		return fmt.Errorf("%w: the signature is not a minisign signature", ErrSignature)
	}
	if parsed.KeyID != key.ID() {
		return fmt.Errorf("%w: the signature is by key %X, the public key is %X", ErrSignature, parsed.KeyID, key.ID())
	}
	if !minisign.Verify(key, wasm, signature) {
		return fmt.Errorf("%w: the signature is of another file", ErrSignature)
	}
	return nil
}

// signatureFile returns the local file of the signature, "" if there is none.
func (s Source) signatureFile() string {
	place := s.signaturePlace()
	if (Source{Location: place}).Remote() {
		return ""
	}
	return place
}

// ReadSignature reads a signature file of minisign.
func ReadSignature(path string) ([]byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if err := new(minisign.Signature).UnmarshalText(text); err != nil {
		return nil, fmt.Errorf("%s is not a signature of minisign", path)
	}
	return text, nil
}
