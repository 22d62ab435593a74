package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReadSecret(t *testing.T) {
	for content, want := range map[string]string{
		"secret": "secret", " secret \n": "secret", "two words\r\n": "two words", // accepted
		"": "", " \n": "", "a\nb": "", "a\rb": "", // refused
	} {
		path := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := ReadSecret(path)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: ReadSecret(path) = %q, %v", content, got, err)
		}
		if err != nil && !strings.Contains(err.Error(), "one line") {
			t.Errorf("%q: %v", content, err)
		}
	}
	if got, err := ReadSecret(""); got != "" || err != nil {
		t.Errorf("no path: %q, %v", got, err)
	}
	if _, err := ReadSecret(filepath.Join(t.TempDir(), "away")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

func TestAsProblems(t *testing.T) {
	own := Problems{{Key: "a", Message: "x"}, {Key: "b", Message: "y"}}
	if got := AsProblems(fmt.Errorf("load: %w", own)); len(got) != 2 || got[1] != own[1] {
		t.Errorf(`AsProblems(fmt.Errorf("load: %%w", own)) = %+v`, got)
	}
	if got := AsProblems(errors.New("away")); len(got) != 1 || got[0] != (Problem{Message: "away"}) {
		t.Errorf(`AsProblems(errors.New("away")) = %+v`, got)
	}
}
