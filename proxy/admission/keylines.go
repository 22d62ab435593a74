package admission

import (
	"errors"
	"fmt"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// KeyLine describes the line of a key in a file of keys, without the hash of the key.
type KeyLine struct {
	Line     int      `json:"line"` // from 1
	Name     string   `json:"name"`
	Tenant   string   `json:"tenant,omitempty"` // "": a tenant of its own
	Class    string   `json:"class,omitempty"`
	Models   []string `json:"models,omitempty"`              // none: every name
	Requests int64    `json:"requests_per_minute,omitempty"` // 0: no limit, as the following ones
	Tokens   int64    `json:"tokens_per_minute,omitempty"`
	Max      int      `json:"max_requests,omitempty"`
}

// ListKeys returns the lines of the keys in text. The errors are those of ParseKeys.
func ListKeys(text []byte, tenants ...config.Tenant) ([]KeyLine, error) {
	if _, err := ParseKeys(text, tenants...); err != nil {
		return nil, err
	}
	list := []KeyLine{}
	for number, words := range keyLines(text) {
		l := keyLine{}
		for _, word := range words[2:] {
			_ = l.set(word) // ParseKeys has read the same words
		}
		list = append(list, KeyLine{number, words[0], l.tenant, l.class, l.models, l.limits.Requests, l.limits.Tokens, l.limits.Exchanges})
	}
	return list, nil
}

// RemoveKey returns text without one line. The other lines keep their bytes. The error says why
// proxies would refuse the new file, so that the key would remain valid.
func RemoveKey(text []byte, number int, tenants ...config.Tenant) ([]byte, error) {
	var b strings.Builder
	n := 0
	for line := range strings.Lines(string(text)) {
		if n++; n != number {
			b.WriteString(line)
		}
	}
	after := []byte(b.String())
	left := 0
	for range keyLines(after) {
		left++
	}
	if left == 0 {
		return nil, errors.New("it is the only key, and proxies refuse a file without keys: add another key first")
	}
	if _, err := ParseKeys(after, tenants...); err != nil {
		return nil, fmt.Errorf("the file would be wrong without the line: %w", err)
	}
	return after, nil
}

// AddKey returns text with one more line.
func AddKey(text []byte, line string, tenants ...config.Tenant) ([]byte, error) {
	if len(text) > 0 && text[len(text)-1] != '\n' {
		line = "\n" + line
	}
	after := append(text[:len(text):len(text)], line+"\n"...)
	_, err := ParseKeys(after, tenants...)
	return after, err
}
