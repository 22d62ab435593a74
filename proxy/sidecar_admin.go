package proxy

import (
	"encoding/json"
	"net/http"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
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
func (s *Server) sidecarOf(h func(http.ResponseWriter, *http.Request, *sidecar.Sidecar)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		sc := s.sidecar.Load()
		if sc == nil {
			downstream.Error(w, &openai.Error{Status: 404, Code: "no_sidecar", Message: "this proxy is no sidecar: sidecar.local is not set"})
			return
		}
		h(w, r, sc)
	}
}

func (s *Server) adminSidecar(w http.ResponseWriter, _ *http.Request, sc *sidecar.Sidecar) {
	cfg := sc.Config()
	downstream.JSON(w, 200, SidecarRow{
		Engine: sc.LocalName(), Role: cfg.Role, Connector: cfg.Connector,
		Policies: sc.Order(), Configured: cfg.Order(),
	})
}

// adminOrder makes requests from now on try the coordination policies in the
// given order, those that it leaves out not at all.
func (s *Server) adminOrder(w http.ResponseWriter, r *http.Request, sc *sidecar.Sidecar) {
	var body struct {
		Policies []string `json:"policies"`
	}
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxOrderBody))
	d.DisallowUnknownFields()
	err := d.Decode(&body)
	if err == nil {
		err = sc.SetOrder(body.Policies)
	}
	if err != nil {
		downstream.Error(w, &openai.Error{Status: 400, Code: "bad_value", Param: "policies", Message: "policies: " + err.Error()})
		return
	}
	s.log.Info("coordination policies changed", "policies", body.Policies)
	s.adminSidecar(w, r, sc)
}

func (s *Server) adminOrderReset(w http.ResponseWriter, r *http.Request, sc *sidecar.Sidecar) {
	sc.ResetOrder()
	s.adminSidecar(w, r, sc)
}
