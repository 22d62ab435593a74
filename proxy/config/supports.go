package config

// Supports reports whether this build does what a key turns on with a value.
// The key is written without array indices, as engine.connector; "" is a value
// that turns nothing on.
func Supports(key, value string) bool {
	for _, m := range missingFeatures() {
		if m.key == key && value != "" && (m.value == "" || m.matches(value)) {
			return false
		}
	}
	return true
}
