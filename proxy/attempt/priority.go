package attempt

import (
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// prioritize sets the field "priority" of the next leg, which goes to t: the priority of the
// request's class, with the sign that the engine expects. Without classes, or if the engine has
// no engine.priority, the leg keeps the client's field.
//
// Sources: vLLM entrypoints/openai/protocol.py and core/sched/request_queue.py (lower values
// first); SGLang srv/managers/schedule_policy.py (higher values first, lower ones with
// --schedule-low-priority-values-first).
func (a *attempt) prioritize(t engine.Target) {
	class := a.env.Class
	a.c.Priority = nil
	if class == nil || t.IsZero() || !a.env.Request.API.Generates() {
		return
	}
	switch t.Spec.Priority {
	case config.LowerFirst:
		a.c.Priority = strconv.AppendInt(nil, int64(-class.Priority), 10)
	case config.HigherFirst:
		a.c.Priority = strconv.AppendInt(nil, int64(class.Priority), 10)
	}
}
