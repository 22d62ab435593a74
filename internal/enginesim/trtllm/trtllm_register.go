package trtllm

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// Record returns the worker's key and value (serve/disagg_auto_scaling.py).
func (t *TRTLLM) Record() (key, value string) {
	host, port, _ := net.SplitHostPort(t.e.Addr())
	number, _ := strconv.Atoi(port)
	name, role := "CONTEXT", 0
	if t.e.Cfg.Role == core.RoleDecode {
		name, role = "GENERATION", 1
	}
	id := fmt.Sprintf("%s-%s:%s-%d-%d-%03d", name, host, port, time.Now().UnixMilli(), os.Getpid(), rand.IntN(1001))
	text, _ := core.EncodeJSON(core.Obj("worker_id", id, "host", host, "port", number, "role", role))
	return "/trtllm-disagg/" + t.cfg.ClusterName + "/workers/" + id, string(text)
}
