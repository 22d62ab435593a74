package admin

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
	Policies   []string `json:"policies"`   // in the current order
	Configured []string `json:"configured"` // in the order of the configuration
}

// maxOrderBody bounds the body of PUT /v1/sidecar/policies.
const maxOrderBody = 4 << 10

// sidecarRoutes has the handlers of /v1/sidecar.
type sidecarRoutes struct{ o Options }

// with returns a handler that passes the sidecar to h. The handler answers 404 if the
// process is no sidecar.
func (s sidecarRoutes) with(h func(http.ResponseWriter, *http.Request, *sidecar.Sidecar)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		sc := s.o.Sidecar()
		if sc == nil {
			downstream.Error(w, openai.NewError(openai.CodeNoSidecar, "this proxy is no sidecar: sidecar.local is not set"))
			return
		}
		h(w, r, sc)
	}
}

func (s sidecarRoutes) show(w http.ResponseWriter, _ *http.Request, sc *sidecar.Sidecar) {
	cfg := sc.Config()
	downstream.JSON(w, 200, SidecarRow{
		Engine: sc.LocalName(), Role: cfg.Role, Connector: cfg.Connector,
		Policies: sc.Order(), Configured: cfg.Order(),
	})
}

// setOrder makes later requests try the coordination policies in the given order. They do
// not try a policy that the list leaves out.
func (s sidecarRoutes) setOrder(w http.ResponseWriter, r *http.Request, sc *sidecar.Sidecar) {
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
		downstream.Error(w, openai.NewFieldError(openai.CodeBadValue, "policies", "policies: "+err.Error()))
		return
	}
	s.o.Log.Info("coordination policies changed", "policies", body.Policies)
	s.show(w, r, sc)
}

func (s sidecarRoutes) resetOrder(w http.ResponseWriter, r *http.Request, sc *sidecar.Sidecar) {
	sc.ResetOrder()
	s.show(w, r, sc)
}
