package config

import (
	"errors"
	"os"
	"strings"
)

// ReadSecret reads a secret of one line from the file that a key names. White space
// around the secret is removed. An empty path gives "" and no error. Errors never
// contain the secret.
func ReadSecret(path string) (string, error) {
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
