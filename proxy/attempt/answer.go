package attempt

import (
	"os"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// readAnswer reads the whole answer of an engine, limit bytes at most, into a buffer that
// memory counts. The whole answer must arrive before the time by; a zero time sets no limit
// beyond the limit of each read. The error is downstream.ErrMemory, buffer.ErrTooLarge or an
// *upstream.Error. After an error the buffer may be nil.
func readAnswer(memory *buffer.Budget, resp *upstream.Response, limit int, by time.Time) (*buffer.Buffer, error) {
	b, err := memory.ReadAll(resp, resp.ContentLength, limit, by)
	switch err {
	case buffer.ErrFull:
		err = downstream.ErrMemory
	case os.ErrDeadlineExceeded:
		err = &upstream.Error{Op: upstream.OpBody, Sent: true, Timeout: true, Err: err}
	}
	return b, err
}

// isStream reports whether an answer is a stream of events.
func isStream(resp *upstream.Response) bool {
	return strings.HasPrefix(strings.ToLower(resp.Get("Content-Type")), "text/event-stream")
}
