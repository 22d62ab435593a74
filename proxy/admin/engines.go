package admin

import (
	"errors"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// EngineRow is one row of GET /v1/engines.
type EngineRow struct {
	Name      string    `json:"name"`
	URL       string    `json:"url"`
	Role      string    `json:"role"`
	Connector string    `json:"connector"`
	State     string    `json:"state"`
	Ranks     []RankRow `json:"ranks"`
	Model     string    `json:"model"`
	Source    string    `json:"source"`
	Facts     FactsRow  `json:"facts"`

	Labels map[string]string `json:"labels,omitempty"` // for policies, as configured or found
}

// FactsRow has the known facts that the engine publishes about itself. They decide whether
// two engines can be paired.
type FactsRow struct {
	Version       string       `json:"version,omitempty"`
	Wire          string       `json:"wire,omitempty"`         // trtllm
	BlockTokens   int          `json:"block_tokens,omitempty"` // of a KV block
	KVCacheType   string       `json:"kv_cache_type,omitempty"`
	DPSize        int          `json:"dp_size,omitempty"`
	TPSize        int          `json:"tp_size,omitempty"`
	PPSize        int          `json:"pp_size,omitempty"`
	CPSize        int          `json:"cp_size,omitempty"`
	Transfer      string       `json:"transfer,omitempty"` // sglang: its transfer backend
	BootstrapPort int          `json:"bootstrap_port,omitempty"`
	KVAddress     string       `json:"kv_address,omitempty"`
	EngineIDs     []string     `json:"engine_ids,omitempty"`
	Addresses     []netip.Addr `json:"addresses,omitempty"` // of the host of its URL
}

func factsRow(i *engine.Instance) FactsRow {
	f := i.Facts()
	row := FactsRow{
		Version: f.Version, Wire: f.Wire, BlockTokens: i.BlockTokens(), KVCacheType: f.KVCacheType,
		DPSize: f.DPSize, TPSize: f.TPSize, PPSize: f.PPSize, CPSize: f.CPSize, Transfer: f.Transfer,
		BootstrapPort: f.BootstrapPort, EngineIDs: f.EngineIDs, Addresses: f.Addresses,
	}
	if !f.KVAddress.IsZero() {
		row.KVAddress = f.KVAddress.String()
	}
	return row
}

// RankRow is the load of one rank.
type RankRow struct {
	Rank     int   `json:"rank"`
	Requests int32 `json:"requests"`
	Tokens   int64 `json:"tokens"`
}

// engines has the handlers of /v1/engines and /v1/pairs.
type engines struct{ o Options }

func (e engines) list(w http.ResponseWriter, _ *http.Request) {
	rows := []EngineRow{}
	for _, i := range e.o.Registry.Snapshot().Instances {
		rows = append(rows, engineRow(i))
	}
	e.o.Registry.Settle()
	downstream.JSON(w, 200, rows)
}

func engineRow(i *engine.Instance) EngineRow {
	row := EngineRow{
		Name: i.Spec.Name, URL: i.Spec.URL, Role: i.Role.String(), Connector: i.Spec.Connector,
		State: i.Shown(), Model: i.Spec.Model, Source: i.Source, Ranks: []RankRow{}, Facts: factsRow(i), Labels: i.Spec.Labels.Map(),
	}
	if row.Model == "" {
		row.Model = strings.Join(i.Facts().Models, ",")
	}
	for r := range i.Load {
		row.Ranks = append(row.Ranks, RankRow{Rank: r, Requests: i.Load[r].Requests(), Tokens: i.Load[r].Tokens()})
	}
	return row
}

// maxEngineBody bounds the body of POST /v1/engines.
const maxEngineBody = 64 << 10

func (e engines) add(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxEngineBody))
	var spec config.Engine
	if err == nil {
		spec, err = config.EngineFromJSON(body)
	}
	if err == nil && !e.o.Config().Admin.TrustAddedEngines {
		err = spec.CheckAdded()
	}
	if err != nil {
		downstream.Error(w, badEngine(err))
		return
	}
	if err := e.o.Registry.Add(spec); err != nil {
		text := err.Error()
		if spec.APIKeyFile != "" || spec.CA != "" {
			e.o.Log.Error("an added engine cannot be used", "error", err)
			text = "the engine cannot be used; the log of the proxy has the reason" // the error shows names of local files
		}
		downstream.Error(w, openai.NewError(openai.CodeBadEngine, text))
		return
	}
	row := EngineRow{Name: spec.Name, URL: spec.URL, Role: spec.Role, Connector: spec.Connector, State: engine.Draining.String(), Source: engine.SourceAdmin, Ranks: []RankRow{}}
	for _, i := range e.o.Registry.Snapshot().Instances { // none if another request has removed the engine
		if i.Spec.Name == spec.Name {
			row = engineRow(i) // the last one is the new one: earlier ones drain
		}
	}
	downstream.JSON(w, 201, row)
}

// badEngine returns the error that the caller receives for a refused engine. The keys are those of
// the object that the caller sent, not those of a configuration.
func badEngine(err error) *openai.Error {
	refusal := openai.NewError(openai.CodeBadEngine, err.Error())
	var problems config.Problems
	if !errors.As(err, &problems) {
		return refusal
	}
	var texts []string
	for _, p := range problems {
		key := strings.TrimPrefix(strings.TrimPrefix(p.Key, "engine[0]"), ".")
		if refusal.Param == "" {
			refusal.Param = key
		}
		if key != "" {
			key += ": "
		}
		texts = append(texts, key+p.Message)
	}
	refusal.Message = strings.Join(texts, "; ")
	return refusal
}

func (e engines) remove(w http.ResponseWriter, r *http.Request) {
	drain := 60 * time.Second
	if v := r.URL.Query().Get("drain"); v != "" {
		d, err := time.ParseDuration(v)
		if err != nil || d < 0 {
			downstream.Error(w, openai.NewFieldError(openai.CodeBadValue, "drain", "drain is a duration such as 60s"))
			return
		}
		drain = d
	}
	answerDrain(w, r, 202, "draining", e.o.Registry.Remove(r.PathValue("name"), drain))
}

// drain answers POST /v1/engines/{name}/drain. A fleet's workers learn of it from the registry.
func (e engines) drain(w http.ResponseWriter, r *http.Request) {
	move := false
	if v := r.URL.Query().Get("move"); v != "" {
		if move = v == "true"; !move && v != "false" {
			downstream.Error(w, openai.NewFieldError(openai.CodeBadValue, "move", "move is true or false"))
			return
		}
	}
	answerDrain(w, r, 200, "draining", e.o.Registry.Drain(r.PathValue("name"), move))
}

// undrain answers DELETE /v1/engines/{name}/drain.
func (e engines) undrain(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	err := e.o.Registry.Undrain(name)
	state := engine.Draining.String() // another request has removed the engine
	if i := e.o.Registry.Snapshot().Instance(name); i != nil {
		state = i.Shown()
	}
	answerDrain(w, r, 200, state, err)
}

// answerDrain answers with the new state of the engine, or with the error of a registry that does
// not have it.
func answerDrain(w http.ResponseWriter, r *http.Request, status int, state string, err error) {
	name := r.PathValue("name")
	if err != nil {
		status := 400
		if errors.Is(err, engine.ErrUnknown) {
			status = 404
		}
		downstream.Error(w, &openai.Error{Status: status, Code: openai.CodeUnknownEngine, Param: "name", Message: err.Error()})
		return
	}
	downstream.JSON(w, status, map[string]string{"name": name, "state": state})
}

func (e engines) pairs(w http.ResponseWriter, _ *http.Request) {
	downstream.JSON(w, 200, e.o.Registry.Pairs())
}
