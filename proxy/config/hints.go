package config

import (
	"reflect"
	"strings"
)

// syntaxHint returns advice about the probable mistake in a text that is no TOML, or "". message is
// that of the parser, which stopped at the byte start.
func syntaxHint(text, message string, start int) string {
	lineStart := strings.LastIndexByte(text[:start], '\n') + 1
	line, _, _ := strings.Cut(text[lineStart:], "\n")
	line = strings.TrimSpace(line)
	switch {
	case strings.HasPrefix(message, "expected '.' or '='"):
		return formatHint(text, text[start:])
	case strings.HasPrefix(line, "["):
		return headerHint(line)
	}
	value := text[start:]
	before, after, assigned := strings.Cut(text[lineStart:], "=")
	if first := strings.TrimLeft(after, " \t"); assigned && lineStart+len(before) < start && !strings.HasPrefix(first, "[") && !strings.HasPrefix(first, "{") {
		value = first // the parser may have stopped behind the beginning of the value: after 30 in 30s
	}
	return valueHint(value)
}

// formatHint returns advice for a text that has something else where TOML has a key and "=". rest
// begins where the parser stopped.
func formatHint(text, rest string) string {
	first := firstLine(text)
	key, value, colon := strings.Cut(first, ":")
	switch {
	case strings.HasPrefix(first, "{"):
		return "; the text looks like JSON, and TOML is expected"
	case first == "---", strings.HasPrefix(first, "- "), colon && !strings.ContainsAny(key, "= [") && (value == "" || value[0] == ' '):
		return "; the text looks like YAML, and TOML is expected"
	case strings.HasPrefix(rest, ":"):
		return `; TOML has "=" between key and value`
	}
	return ""
}

// firstLine returns the first line that is neither empty nor a comment.
func firstLine(text string) string {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			return line
		}
	}
	return ""
}

// headerHint returns advice for the header of a table that must not be there.
func headerHint(line string) string {
	key, _, _ := strings.Cut(strings.Trim(line, "[ "), "]")
	if key = strings.TrimSpace(key); isArrayOfTables(key) {
		return "; each entry of " + key + " begins with [[" + key + "]]"
	}
	return ""
}

// isArrayOfTables reports whether the value of a full key is an array of tables.
func isArrayOfTables(key string) bool {
	v := reflect.ValueOf(Config{})
	for part := range strings.SplitSeq(key, ".") {
		if v.Kind() != reflect.Struct {
			return false
		}
		field, found := fieldOf(v, part)
		if !found {
			return false
		}
		v = field
	}
	return v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Struct
}

// valueHint returns advice for a value that is no TOML.
func valueHint(value string) string {
	end := strings.IndexAny(value, " \t\r\n,]}#")
	if end < 0 {
		end = len(value)
	}
	switch word := value[:end]; {
	case word == "" || strings.ContainsAny(word[:1], "\"'[{="):
		return ""
	case word == "yes", word == "no", word == "on", word == "off", strings.EqualFold(word, "true"), strings.EqualFold(word, "false"):
		return "; a boolean is true or false, and strings need quotes"
	}
	return "; strings need quotes"
}
