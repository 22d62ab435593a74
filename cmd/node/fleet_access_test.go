package node

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestShortTokenOfAFleet: a short token is refused, because it could be guessed.
func TestShortTokenOfAFleet(t *testing.T) {
	for token, want := range map[string]string{
		strings.Repeat("x", minTokenLength): "", strings.Repeat("x", minTokenLength-1): "at least 16 characters", " \n": "one line",
	} {
		cfg := config.Default()
		cfg.Fleet.TokenFile = filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(cfg.Fleet.TokenFile, []byte(token+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := loadFiles(&cfg, slog.New(slog.DiscardHandler))
		if (err == nil) != (want == "") || err != nil && (!strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "fleet.token_file")) {
			t.Errorf("%d characters: %v", len(token), err)
		}
	}
}
