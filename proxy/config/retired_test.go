package config

import (
	"strings"
	"testing"
)

// TestRetired: a retired key is one problem, at its line, that names the replacement.
func TestRetired(t *testing.T) {
	for name, tt := range map[string]struct {
		text string
		want want
	}{
		"transport.client":     {"[transport]\nclient = 'nethttp'\n", want{"transport.client", 2, "remove the key"}},
		"transport.client own": {"[transport]\nclient = 'own'\n", want{"transport.client", 2, "remove the key"}},
	} {
		t.Run(name, func(t *testing.T) {
			checkProblems(t, tt.text, []want{tt.want})
			if _, err := Parse([]byte(tt.text)); err == nil || !strings.Contains(err.Error(), "is retired: ") {
				t.Errorf("got %v", err)
			}
		})
	}
}
