package vllm

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// sleepRoutes are routes of vLLM's development mode; without it, they do not exist. Source: vLLM
// entrypoints/serve/dev/sleep/api_router.py.
func (v *VLLM) sleepRoutes(mux *http.ServeMux) {
	if !v.e.Cfg.DevMode {
		return
	}
	mux.HandleFunc("POST /sleep", v.sleep)
	mux.HandleFunc("POST /wake_up", func(w http.ResponseWriter, r *http.Request) {
		if v.sleepFault(w, r) {
			return
		}
		var tags any
		list := r.URL.Query()["tags"]
		if len(list) > 0 {
			tags = list
		}
		status := "sleeping"
		if v.e.WakeUp(list...) {
			status = "awake"
		}
		core.WriteJSON(w, http.StatusOK, core.Obj("status", status, "tags", tags))
	})
	mux.HandleFunc("GET /is_sleeping", func(w http.ResponseWriter, _ *http.Request) {
		core.WriteJSON(w, http.StatusOK, core.Obj("is_sleeping", v.e.Sleeping()))
	})
}

// sleep answers POST /sleep. vLLM's mode keep is missing.
func (v *VLLM) sleep(w http.ResponseWriter, r *http.Request) {
	level, query := 1, r.URL.Query()
	if text := query.Get("level"); text != "" {
		var err error
		if level, err = strconv.Atoi(text); err != nil || level < 0 || level > 2 {
			refuseQuery(w, "level", "'type': 'less_than_equal', 'loc': 'query.level', 'msg': 'Input should be less than or equal to 2'")
			return
		}
	}
	mode := query.Get("mode")
	if mode != "" && mode != "abort" && mode != "wait" {
		refuseQuery(w, "mode", "'type': 'literal_error', 'loc': 'query.mode', 'msg': \"Input should be 'abort', 'wait' or 'keep'\"")
		return
	}
	if v.sleepFault(w, r) {
		return
	}
	v.e.Sleep(level, mode != "wait")
	core.WriteJSON(w, http.StatusOK, core.Obj("status", "sleeping", "level", level))
}

// sleepFault applies the faults of the sleep mode, and reports whether the call has ended. The status
// is that of an engine that could not get back its memory.
func (v *VLLM) sleepFault(w http.ResponseWriter, r *http.Request) (ended bool) {
	if v.e.Faults.HangsSleep(r.Context()) != nil {
		return true
	}
	if !v.e.Faults.FailsSleep() {
		return false
	}
	core.WriteJSON(w, http.StatusInternalServerError, core.Obj("error", core.Obj("message", "CUDA Error: out of memory", "type", "InternalServerError", "param", nil, "code", 500)))
	return true
}

// refuseQuery answers as FastAPI does to a query that it cannot validate.
func refuseQuery(w http.ResponseWriter, param, problem string) {
	core.WriteJSON(w, http.StatusBadRequest, core.Obj("error", core.Obj(
		"message", fmt.Sprintf("1 validation error:\n  {%s}", problem), "type", pydanticType, "param", "query."+param, "code", 400)))
}

// slept turns the end of a sequence by POST /sleep into an answer of status 200 whose finish reason
// is "abort". It returns other errors unchanged.
func (v *VLLM) slept(watched context.Context, s *core.Sequence, err error, emit func(core.Token)) error {
	if err == nil || !errors.Is(context.Cause(watched), core.ErrSlept) {
		return err
	}
	v.e.Stats.Aborted.Add(1)
	s.Finish = "abort"
	emit(0)
	return nil
}
