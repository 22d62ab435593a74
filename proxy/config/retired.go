package config

import "strings"

// retired maps each key that this version does not have any more, and each such value in the form
// NAME=VALUE with the last name of its key, to the end of the problem: the reason and the
// replacement.
var retired = map[string]string{
	"transport.client": "engines are called with one HTTP/1.1 client; remove the key",
}

// retiredKey returns the message for a key that is retired, or "".
func retiredKey(key string) string {
	if why := retired[key]; why != "" {
		return "is retired: " + why
	}
	return ""
}

// retiredValue is retiredKey for a value of key.
func retiredValue(key, value string) string {
	return retiredKey(key[strings.LastIndexByte(key, '.')+1:] + "=" + value)
}
