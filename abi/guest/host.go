package guest

// Level is the level of a log line, as in proxy-wasm.
type Level uint32

// The log levels.
const (
	LogTrace Level = iota
	LogDebug
	LogInfo
	LogWarn
	LogError
	LogCritical
)

// Status is the answer of a host function, as in proxy-wasm.
type Status uint32

// The statuses that foreign functions answer.
const (
	OK          Status = 0
	NotFound    Status = 1 // the host has no such function, or the function did not find its object
	BadArgument Status = 2
)
