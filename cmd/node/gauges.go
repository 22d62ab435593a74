package node

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// registerGauges registers the gauges whose values are read from the registry, the
// coordinator and the KV index at each scrape.
func registerGauges(reg prometheus.Registerer, r *engine.Registry, c *coordinator.Local, x *kvindex.Index) {
	reg.MustRegister(&fleetGauges{registry: r, coordinator: c, index: x})
}

var (
	leasesDesc   = prometheus.NewDesc("pdproxy_leases_open", "Placements whose lease is not released.", nil, nil)
	loadDesc     = prometheus.NewDesc("pdproxy_engine_load", "Requests in flight on a rank, by this proxy's count.", []string{"engine", "rank"}, nil)
	asleepDesc   = prometheus.NewDesc("pdproxy_engine_asleep", "1 for each rank of an engine that sleeps (vLLM's /sleep) and gets no requests.", []string{"engine", "rank"}, nil)
	stateDesc    = prometheus.NewDesc("pdproxy_engine_up", "1 when the engine is ready and not asleep.", []string{"engine", "role"}, nil)
	blocksDesc   = prometheus.NewDesc("pdproxy_kv_index_blocks", "KV blocks on targets, counted once for each target, by source: event or expected.", []string{"by"}, nil)
	indexDesc    = prometheus.NewDesc("pdproxy_kv_index_bytes", "Memory of the KV index.", nil, nil)
	refusedDesc  = prometheus.NewDesc("pdproxy_pair_refused", "1 for each pair that no request uses, because the two engines cannot transfer KV to each other.", []string{"prefill", "decode"}, nil)
	readyDesc    = prometheus.NewDesc("pdproxy_role_engines_ready", "Engines that are ready, by model and role. 0 for a known model without a ready engine of the role.", []string{"model", "role"}, nil)
	roleRunDesc  = prometheus.NewDesc("pdproxy_role_requests_running", "Running and waiting requests on the ready engines of a role: the requests of this proxy, and the requests of other clients that the engines report.", []string{"model", "role"}, nil)
	roleWaitDesc = prometheus.NewDesc("pdproxy_role_requests_waiting", "Requests that wait inside the ready engines of a role, as the engines report.", []string{"model", "role"}, nil)
	saturateDesc = prometheus.NewDesc("pdproxy_role_saturation_seconds", "Estimated seconds by which the present work delays a new request, mean of the ready engines of a role: prefill tokens in the queue by the measured time of a token, and streams by the cost that kv_aware uses.", []string{"model", "role"}, nil)
	predictDesc  = prometheus.NewDesc("pdproxy_prediction_error_ratio", "Mean error of the predicted times of an engine's type, as a share of the prediction, by the predicted time: prefill, start (of the stream, after prefill) or token. Only while a policy uses predictions, and after some requests.", []string{"engine", "time"}, nil)
	pairDesc     = prometheus.NewDesc("pdproxy_pair_state", "State of a pair: 0 unknown, 1 warming, 2 ready, 3 broken, or one of its engines does not answer probes; the worst of its ranks.", []string{"prefill", "decode"}, nil)
)

type fleetGauges struct {
	registry    *engine.Registry
	coordinator *coordinator.Local
	index       *kvindex.Index
}

// Describe implements prometheus.Collector.
func (g *fleetGauges) Describe(ch chan<- *prometheus.Desc) {
	ch <- leasesDesc
	ch <- loadDesc
	ch <- stateDesc
	ch <- asleepDesc
	ch <- pairDesc
	ch <- refusedDesc
	ch <- blocksDesc
	ch <- indexDesc
	ch <- readyDesc
	ch <- roleRunDesc
	ch <- roleWaitDesc
	ch <- saturateDesc
	ch <- predictDesc
}

// Collect implements prometheus.Collector.
func (g *fleetGauges) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(leasesDesc, float64(g.coordinator.Open()))
	kv := g.index.Stats()
	gauge(blocksDesc, float64(kv.Entries-kv.Guesses), "event")
	gauge(blocksDesc, float64(kv.Guesses), "expected")
	gauge(indexDesc, float64(kv.Bytes))
	seen := make(map[string]bool) // while an instance drains, a new one may have its name
	for _, i := range g.registry.Snapshot().Instances {
		if seen[i.Spec.Name] {
			continue
		}
		seen[i.Spec.Name] = true
		up := 0.0
		if i.State() == engine.Ready && !i.AllAsleep() {
			up = 1
		}
		gauge(stateDesc, up, i.Spec.Name, i.Role.String())
		if times := i.Times.Load(); times != nil {
			for name, mean := range map[string]func() (float64, bool){"prefill": times.PrefillError, "start": times.Start.Error, "token": times.Token.Error} {
				if share, known := mean(); known {
					gauge(predictDesc, share, i.Spec.Name, name)
				}
			}
		}
		for rank := range i.Load {
			gauge(loadDesc, float64(i.Load[rank].Requests()), i.Spec.Name, strconv.Itoa(rank))
			if i.Asleep(rank) {
				gauge(asleepDesc, 1, i.Spec.Name, strconv.Itoa(rank))
			}
		}
	}
	g.collectRoles(ch)
	worst := make(map[[2]string]abi.PairState)
	refused := make(map[[2]string]bool)
	for _, p := range g.registry.Pairs() {
		key := [2]string{p.Prefill, p.Decode}
		if p.Refused != "" && !refused[key] {
			refused[key] = true
			gauge(refusedDesc, 1, key[0], key[1])
		}
		for s := abi.PairUnknown; s <= abi.PairBroken; s++ {
			if s.String() == p.State {
				worst[key] = max(worst[key], s)
			}
		}
	}
	for key, s := range worst {
		gauge(pairDesc, float64(s), key[0], key[1])
	}
}
