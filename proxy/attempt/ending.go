package attempt

import (
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/state/gaps"
)

// ending returns how a whole answer ended.
func ending(api openai.API, answer []byte) (e gaps.Ending) {
	openai.ToolCalls(api, answer, e.Call)
	return e
}
