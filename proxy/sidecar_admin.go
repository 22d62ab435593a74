package proxy

import (
	"encoding/json"
	"net/http"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// SidecarRow is the answer of GET /v1/sidecar.
type SidecarRow struct {
	Engine     string   `json:"engine"` // the local engine's name
	Role       string   `json:"role"`
	Connector  string   `json:"connector"`
	Policies   []string `json:"policies"`   // in the order in which they are tried now
	Configured []string `json:"configured"` // as the configuration has them
}

// maxOrderBody bounds the body of PUT /v1/sidecar/policies.
const maxOrderBody = 4 << 10

// sidecarOf gives the handler the sidecar; there is nothing to see on a proxy
// that is none.
func (s *Server) sidecarOf(h func(http.ResponseWriter, *http.Request, *sidecar)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		sc := s.sidecar.Load()
		if sc == nil {
			downstream.Error(w, &openai.Error{Status: 404, Code: "no_sidecar", Message: "this proxy is no sidecar: sidecar.local is not set"})
			return
		}
		h(w, r, sc)
	}
}

func (s *Server) adminSidecar(w http.ResponseWriter, _ *http.Request, sc *sidecar) {
	downstream.JSON(w, 200, SidecarRow{
		Engine: sc.local, Role: sc.cfg.Role, Connector: sc.cfg.Connector,
		Policies: *sc.order.Load(), Configured: sc.cfg.Order(),
	})
}

// adminOrder makes requests from now on try the coordination policies in the
// given order, those that it leaves out not at all.
func (s *Server) adminOrder(w http.ResponseWriter, r *http.Request, sc *sidecar) {
	var body struct {
		Policies []string `json:"policies"`
	}
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxOrderBody))
	d.DisallowUnknownFields()
	err := d.Decode(&body)
	if err == nil {
		err = sc.cfg.CheckOrder(body.Policies)
	}
	if err != nil {
		downstream.Error(w, &openai.Error{Status: 400, Code: "bad_value", Param: "policies", Message: "policies: " + err.Error()})
		return
	}
	sc.order.Store(&body.Policies)
	s.log.Info("coordination policies changed", "policies", body.Policies)
	s.adminSidecar(w, r, sc)
}

func (s *Server) adminOrderReset(w http.ResponseWriter, r *http.Request, sc *sidecar) {
	sc.configured()
	s.adminSidecar(w, r, sc)
}
