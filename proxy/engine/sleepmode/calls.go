package sleepmode

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

// Results of calls, for metrics and logs.
const (
	OK          = "ok"
	Used        = "used"         // a request used the engine before it fell asleep
	Unsupported = "unsupported"  // the engine has no such route
	Refused     = "refused"      // the engine answered with an error status
	NoAnswer    = "no_answer"    // the connection failed
	BadAnswer   = "bad_answer"   // the answer cannot be read
	Timeout     = "timeout"      // sleep.timeout has passed
	Gone        = "gone"         // the engine left, or the proxy ended
	StillAsleep = "still_asleep" // the engine sleeps although it accepted the call
)

// The calls. Source: vLLM entrypoints/serve/dev/sleep/api_router.py. At level 1 the engine keeps its
// weights in the memory of the host and drops its KV. With mode "wait" it finishes its requests first;
// releases without modes ignore the parameter.
const (
	sleepPath  = "/sleep?level=1&mode=wait"
	wakePath   = "/wake_up"
	statusPath = "/is_sleeping"
)

// maxSleepAnswer bounds an answer that is read, in bytes.
const maxSleepAnswer = 4 << 10

// fallAsleep makes the engine sleep.
func fallAsleep(ctx context.Context, i *engine.Instance) (result string, err error) {
	return call(ctx, i.Post, sleepPath, new(bytes.Buffer))
}

// wakeUp wakes the engine, and asks whether it is awake: the answer to the first call does not say so
// in every release.
func wakeUp(ctx context.Context, i *engine.Instance) (result string, err error) {
	if result, err = call(ctx, i.Post, wakePath, new(bytes.Buffer)); result != OK {
		return result, err
	}
	var answer bytes.Buffer
	if result, err = call(ctx, i.Get, statusPath, &answer); result != OK {
		return result, err
	}
	switch asleep, err := readSleeping(answer.Bytes()); {
	case err != nil:
		return BadAnswer, err
	case asleep:
		return StillAsleep, errors.New("the engine accepted /wake_up, and still sleeps")
	}
	return OK, nil
}

// call makes one call. The error contains nothing of the answer.
func call(ctx context.Context, do func(context.Context, string, *bytes.Buffer) (int, error), path string, answer *bytes.Buffer) (result string, err error) {
	switch status, err := do(ctx, path, answer); {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return Timeout, ctx.Err()
	case ctx.Err() != nil:
		return Gone, ctx.Err()
	case err != nil:
		return NoAnswer, err
	case status == http.StatusNotFound, status == http.StatusMethodNotAllowed:
		return Unsupported, fmt.Errorf("%s answered with status %d: the engine needs VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode", path, status)
	case status/100 != 2:
		return Refused, fmt.Errorf("%s answered with status %d", path, status)
	}
	return OK, nil
}

// readSleeping reads the answer of GET /is_sleeping.
func readSleeping(b []byte) (bool, error) {
	var m struct {
		Sleeping *bool `json:"is_sleeping"`
	}
	if len(b) > maxSleepAnswer || json.Unmarshal(b, &m) != nil || m.Sleeping == nil {
		return false, errors.New("the answer of " + statusPath + " says nothing about the sleep mode")
	}
	return *m.Sleeping, nil
}
