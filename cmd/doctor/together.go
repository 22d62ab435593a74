package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// pairs lists the pairs of ready engines, and adds a finding for each reason why some do not fit.
func (r *Report) pairs(registry *engine.Registry) {
	reasons := make(map[string][]Pair)
	var fits []Pair
	for _, p := range r.Engines {
		for _, d := range r.Engines {
			if !p.Ready || !d.Ready {
				continue
			}
			reason, ok := registry.Misfit(p.i, d.i)
			switch pair := (Pair{Prefill: p.Name, Decode: d.Name}); {
			case !ok:
			case reason == nil:
				pair.Fits = true
				p.fits++
				d.fits++
				if r.Fit++; len(fits) < maxPairs {
					fits = append(fits, pair)
				}
			default:
				r.Misfits++
				pair.Reason = reason.Error()
				if len(r.Pairs) < maxPairs {
					r.Pairs = append(r.Pairs, pair)
				}
				if len(reasons) < maxModels || reasons[pair.Reason] != nil {
					reasons[pair.Reason] = append(reasons[pair.Reason], pair)
				}
			}
		}
	}
	r.Pairs = append(r.Pairs, fits[:min(len(fits), maxPairs-len(r.Pairs))]...)
	partnered := make(map[string]bool)
	for _, e := range r.Engines {
		partnered[e.Name] = e.fits > 0
	}
	for _, reason := range slices.Sorted(maps.Keys(reasons)) {
		list := reasons[reason]
		problem := fmt.Sprintf("%s and %s cannot be a pair: %s", list[0].Prefill, list[0].Decode, reason)
		if more := len(list) - 1; more > 0 {
			problem += fmt.Sprintf(" (and %d more pairs)", more)
		}
		side, fix := pairFix(reason)
		severity := Warning
		if slices.ContainsFunc(list, func(p Pair) bool { return !partnered[p.Prefill] || !partnered[p.Decode] }) {
			severity = Error
		} else if reason == engine.ErrLabels.Error() { // as intended
			continue
		}
		r.Add(Finding{severity, "", side, problem, fix})
	}
}

// pairFix returns what mends a pair that does not fit, by the words of the reason.
func pairFix(reason string) (Side, string) {
	switch {
	case reason == engine.ErrLabels.Error():
		return Config, "engine.labels, or pairs.same_labels"
	case strings.Contains(reason, "releases"):
		return Flags, "the same release on both engines"
	case strings.Contains(reason, "cache types"):
		return Flags, "the same --kv-cache-dtype on both engines"
	case strings.Contains(reason, "page sizes"):
		return Flags, "the same --page-size on both engines"
	case strings.Contains(reason, "blocks of"):
		return Flags, "the same --block-size on both engines"
	case strings.Contains(reason, "transfer backends"):
		return Flags, "the same --disaggregation-transfer-backend on both engines"
	}
	return Flags, "the parallel sizes of both engines, see docs/reference/engines.md"
}

// models adds a finding for each model that no engine can serve: one that an engine names, and one
// that [[model]] names.
func (r *Report) models(cfg *config.Config) {
	serving := make(map[string]string) // by model: "" if requests can be served, else why not
	for _, e := range r.Engines {
		if !e.Ready || e.Role == config.RoleEncode {
			continue
		}
		for _, m := range e.i.Models() {
			if why, known := serving[m]; e.Role == config.RoleBoth || e.fits > 0 {
				serving[m] = ""
			} else if !known || why != "" {
				serving[m] = cmp.Or(why, "no pair of a prefill and a decode engine fits, and no engine has the role both")
			}
		}
	}
	for _, m := range slices.Sorted(maps.Keys(serving)) {
		if serving[m] != "" {
			r.Add(Finding{Error, "", Config, fmt.Sprintf("requests for the model %q cannot run in two legs: %s", m, serving[m]), "engine.role, engine.model, or an engine of the missing role"})
		}
	}
	if len(serving) == 0 {
		r.Add(Finding{Error, "", Config, "no engine is ready: every request gets 503", "[[engine]], or a source of engines"})
		return
	}
	for n, m := range cfg.Models {
		targets := slices.Collect(maps.Keys(m.Split))
		if m.AliasOf != "" {
			targets = append(targets, m.AliasOf)
		}
		slices.Sort(targets)
		for _, target := range targets {
			_, known := serving[target]
			if named := slices.ContainsFunc(cfg.Models, func(o config.Model) bool { return o.Name == target && o.Name != m.Name }); !known && !named {
				r.Add(Finding{Error, "", Config, fmt.Sprintf("[[model]] %q leads to %q, which no ready engine serves", m.Name, target), fmt.Sprintf("model[%d].alias_of or model[%d].split", n, n)})
			}
		}
	}
}

// twins adds findings about engines that must differ or agree, and do not.
func (r *Report) twins() {
	ids, hashes := make(map[string]string), make(map[string][]string)
	for _, e := range r.Engines {
		list := slices.Clone(e.i.Facts().EngineIDs)
		if id := e.i.Spec.EngineID; id != "" && len(list) == 0 {
			list = append(list, id)
		}
		for _, id := range list {
			if other, taken := ids[id]; taken && other != e.Name {
				r.add(e, Error, Flags, `another "engine_id" in the engine's --kv-transfer-config, and engine.engine_id`,
					"the engine has the same engine_id as %s: decode engines confuse the two", other)
			}
			ids[id] = e.Name
		}
		if e.hash != "" && (e.Connector == config.ConnectorVLLMStore || e.Connector == config.ConnectorVLLMP2PTier) {
			hashes[e.hash] = append(hashes[e.hash], e.Name)
		}
	}
	if len(hashes) > 1 {
		r.Add(Finding{Error, "", Flags, fmt.Sprintf("engines that share KV by the hashes of its blocks have different hash algorithms: %s", strings.Join(slices.Sorted(maps.Keys(hashes)), ", ")),
			"the same --prefix-caching-hash-algo and PYTHONHASHSEED on all engines"})
	} else if len(hashes) == 1 {
		r.Add(Finding{Note, "", Flags, "the engines share KV by the hashes of its blocks; no route shows their seed", "the same PYTHONHASHSEED on all engines"})
	}
}
