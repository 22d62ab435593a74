package vllm

import (
	"context"
	"errors"
	"net/http"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// sleepRoutes are routes of vLLM's development mode.
func (v *VLLM) sleepRoutes(mux *http.ServeMux) {
	mux.HandleFunc("POST /sleep", func(w http.ResponseWriter, r *http.Request) {
		levels := map[string]int{"": 1, "0": 0, "1": 1, "2": 2}
		level, known := levels[r.URL.Query().Get("level")]
		if mode := r.URL.Query().Get("mode"); !known || mode != "" && mode != "abort" {
			// vLLM also has the modes wait and keep, and fails for others.
			http.Error(w, "Internal Server Error", http.StatusInternalServerError)
			return
		}
		v.e.Sleep(level)
	})
	mux.HandleFunc("POST /wake_up", func(w http.ResponseWriter, r *http.Request) {
		v.e.WakeUp(r.URL.Query()["tags"]...)
	})
	mux.HandleFunc("GET /is_sleeping", func(w http.ResponseWriter, _ *http.Request) {
		core.WriteJSON(w, http.StatusOK, core.Obj("is_sleeping", v.e.Sleeping()))
	})
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
