// Package scorers has the built-in scorers and filters of policy.place = "scores". A filter is a
// scorer that removes candidates. Scores have the meaning of the scorers of the same name in llm-d's
// router (pkg/epp/framework/plugins/scheduling), so that its configurations keep their weights.
package scorers

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/param"
)

// Scorer is a scorer with its parameters.
type Scorer struct {
	ID      string // its name and parameters, as New reads them
	Needs   abi.Needs
	Headers []string // request headers that it gets, in lower case
	// Score is a pure function of the facts that does not allocate.
	Score func(*abi.ScoreFacts, *abi.Scores)
}

// kind is a built-in scorer without its parameters.
type kind struct {
	name    string
	meaning string // of the score, for operators
	needs   abi.Needs
	begin   func() scorer // returns the scorer with the defaults of its parameters
}

// scorer holds the parameters of one scorer.
type scorer interface {
	// table describes the parameters; it points into the scorer.
	table() param.Table
	score(f *abi.ScoreFacts, to *abi.Scores)
}

// ready is a scorer that prepares or checks its parameters after they are set.
type ready interface{ ready() error }

// told is a scorer that gets a request header.
type told interface{ header() string }

// kinds lists the scorers, and after them the filters.
func kinds() []kind {
	return []kind{
		{"prefix", "share of the prompt in the KV cache, weighed with the length of that part", abi.NeedBlocks, func() scorer { return new(prefix) }},
		{"queue", "few requests that wait in the engine, compared with the other candidates", abi.NeedDetails, func() scorer { return &spread{count: waiting} }},
		{"running_requests", "few requests that run in the engine, compared with the other candidates", abi.NeedDetails, func() scorer { return &spread{count: running} }},
		{"kv_usage", "free share of the KV memory", 0, func() scorer { return new(kvUsage) }},
		{"active_requests", "few requests in flight through the proxy, compared with the busiest candidate", 0, func() scorer { return new(activeRequests) }},
		{"load_aware", "0.5 without waiting requests, less with each one, 0 from the threshold on", abi.NeedDetails, func() scorer { return new(loadAware) }},
		{"token_load", "few tokens in flight, with the uncached tokens of this request; 0 from the threshold on", abi.NeedBlocks, func() scorer { return new(tokenLoad) }},
		{"session", "1 for the target of the conversation's last turn", abi.NeedConversation, func() scorer { return new(session) }},
		{"lora", "1 if the engine runs the request's adapter, 0.8 if there is room for it, 0.6 if requests wait for it", 0, func() scorer { return new(lora) }},
		{"context_length", "how well the prompt fits the range of the engine's label context_length", abi.NeedDetails, func() scorer { return new(contextLength) }},
		{"label", "1 if the engine has the label with one of the values", abi.NeedDetails, func() scorer { return new(label) }},
		{"header_label", "1 if the value of the engine's label is that of the request header", abi.NeedDetails | abi.NeedHeaders, func() scorer { return new(headerLabel) }},
		{"topology", "closeness to the chosen prefill target: 1 on its host, 0.2 in its rack, 0.05 in its zone, 0.02 in its region", abi.NeedDetails, func() scorer { return new(topology) }},
		{"latency", "short predicted times; with a limit of the request, the room between them and the limit", abi.NeedPredictions | abi.NeedTraits | abi.NeedBlocks | abi.NeedDetails, func() scorer { return new(latency) }},
		{"no_hit_lru", "for a prompt of which no candidate has a part: few recent requests; otherwise 0.5", abi.NeedBlocks, func() scorer { return new(noHitLRU) }},
		{"mm_cache", "share of the images, sounds and videos of the request that the target was lately sent", abi.NeedMedia, func() scorer { return new(mmCache) }},

		{"label_filter", "keeps engines that have the label with one of the values", abi.NeedDetails, func() scorer { return new(labelFilter) }},
		{"utilization_filter", "removes engines above a limit", abi.NeedDetails, func() scorer { return new(utilizationFilter) }},
		{"context_length_filter", "removes engines whose label context_length excludes the prompt", abi.NeedDetails, func() scorer { return new(contextLengthFilter) }},
		{"prefix_affinity_filter", "keeps candidates that have most of the prompt, unless their predicted times are much longer", abi.NeedBlocks | abi.NeedPredictions, func() scorer { return new(prefixAffinityFilter) }},
		{"session_filter", "keeps the target of the conversation's last turn", abi.NeedConversation, func() scorer { return new(sessionFilter) }},
		{"topology_filter", "keeps targets that are close to the chosen prefill target", abi.NeedDetails, func() scorer { return new(topologyFilter) }},
		{"slo_headroom_filter", "keeps candidates that are predicted to meet the limits of the request", abi.NeedPredictions | abi.NeedTraits, func() scorer { return new(sloHeadroomFilter) }},
	}
}

// Names lists the built-in scorers and filters.
func Names() []string {
	var names []string
	for _, k := range kinds() {
		names = append(names, k.name)
	}
	return names
}

// Meaning describes a scorer for operators.
func Meaning(name string) string {
	k, _ := find(name)
	return k.meaning
}

// Table describes the parameters of a scorer, with their defaults.
func Table(name string) param.Table {
	k, ok := find(name)
	if !ok {
		return nil
	}
	return k.begin().table()
}

func find(name string) (kind, bool) {
	all := kinds()
	if i := slices.IndexFunc(all, func(k kind) bool { return k.name == name }); i >= 0 {
		return all[i], true
	}
	return kind{}, false
}

// ID returns the text for New: the name, and after a question mark the parameters in the order of
// their names. The text has no white space.
func ID(name string, params map[string]string) string {
	text, mark := name, "?"
	for _, key := range slices.Sorted(maps.Keys(params)) {
		text += mark + key + "=" + strings.Join(strings.Fields(params[key]), ",")
		mark = "&"
	}
	return text
}

// Check returns the scorer with these parameters. The error names the parameter that is wrong: key is
// "" if the name is unknown or a parameter is missing.
func Check(name string, params map[string]string) (s Scorer, key string, err error) {
	k, ok := find(name)
	if !ok {
		return s, "", errors.New("no built-in scorer is named " + strconv.Quote(name) + "; there are " + strings.Join(Names(), ", "))
	}
	one := k.begin()
	table := one.table()
	table.Reset()
	for _, key := range slices.Sorted(maps.Keys(params)) {
		if err := table.SetText(key, params[key]); err != nil {
			return s, key, err
		}
	}
	if r, ok := one.(ready); ok {
		if err := r.ready(); err != nil {
			return s, "", err
		}
	}
	s = Scorer{ID: ID(name, params), Needs: k.needs, Score: one.score}
	if t, ok := one.(told); ok {
		s.Headers = []string{t.header()}
	}
	return s, "", nil
}

// New returns the scorer of an ID.
func New(id string) (Scorer, error) {
	name, list, _ := strings.Cut(id, "?")
	params := map[string]string{}
	for list != "" {
		var one string
		one, list, _ = strings.Cut(list, "&")
		key, value, _ := strings.Cut(one, "=")
		params[key] = strings.ReplaceAll(value, ",", " ")
	}
	s, _, err := Check(name, params)
	return s, err
}

// none is a scorer without parameters.
type none struct{}

func (none) table() param.Table { return nil }
