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

// Status is what a host function answers, as in proxy-wasm.
type Status uint32

// The statuses that foreign functions answer.
const (
	OK          Status = 0
	NotFound    Status = 1 // the host has no such function, or the function no such thing
	BadArgument Status = 2
)
