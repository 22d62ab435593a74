package host

// The limits of texts that a guest hands in. The host checks them before it
// copies the text out of guest memory.
const (
	// MaxName is the most bytes of a name: a key of shared data, a queue, an
	// upstream, a foreign function.
	MaxName = 64 << 10
	// MaxMetricName is the most bytes of a metric's name.
	MaxMetricName = 200
	// MaxDetails is the number of bytes of a local response's details that the
	// host keeps.
	MaxDetails = 1 << 10
)
