package proxy

import (
	"encoding/json"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admin"
)

func (s *Server) runningRows() []admin.RunningRow {
	rows := []admin.RunningRow{}
	for _, row := range s.books.Running.List(time.Now()) {
		rows = append(rows, admin.RunningRow(row))
	}
	return rows
}

func (s *Server) explanation(id string) (any, bool) {
	e, ok := s.books.Ended.Get(id)
	return e, ok
}

func (s *Server) perfRows() []json.RawMessage {
	rows := []json.RawMessage{}
	for _, row := range s.books.Ended.PerfRows() {
		if text, err := json.Marshal(row); err == nil {
			rows = append(rows, text)
		}
	}
	return rows
}
