package proxy

import (
	"encoding/json"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/config"
)

func (s *Server) runningRows() []admin.RunningRow {
	rows := []admin.RunningRow{}
	for _, row := range s.live.list(time.Now()) {
		rows = append(rows, admin.RunningRow(row))
	}
	return rows
}

func (s *Server) explanation(id string) (any, bool) {
	e, ok := s.explain.get(id)
	return e, ok
}

func (s *Server) perfRows() []json.RawMessage {
	rows := []json.RawMessage{}
	for _, row := range s.explain.perfRows() {
		if text, err := json.Marshal(row); err == nil {
			rows = append(rows, text)
		}
	}
	return rows
}

// adminSidecar returns the sidecar for operators, nil if the process is none.
func (s *Server) adminSidecar() admin.Sidecar {
	if sc := s.sidecar.Load(); sc != nil {
		return sc
	}
	return nil
}

// Config, LocalName, Order, SetOrder and ResetOrder implement admin.Sidecar.

func (sc *sidecar) Config() config.Sidecar { return sc.cfg }

func (sc *sidecar) LocalName() string { return sc.local }

func (sc *sidecar) Order() []string { return *sc.order.Load() }

func (sc *sidecar) SetOrder(policies []string) error {
	if err := sc.cfg.CheckOrder(policies); err != nil {
		return err
	}
	sc.order.Store(&policies)
	return nil
}

func (sc *sidecar) ResetOrder() { sc.configured() }
