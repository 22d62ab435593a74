// Package telemetry defines the proxy's Prometheus metrics and OpenTelemetry spans.
// Only Intervals.Observe is called for each event of a stream.
//
// The decisions behind this package are in docs/design/request.md.
package telemetry

import (
	"runtime"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/abi"
)

// Metrics holds the instruments. All methods are safe for concurrent use.
type Metrics struct {
	Other  *Model                 // instruments of requests without a known model
	Pusher atomic.Pointer[Pusher] // receives the ended exchanges, too; nil: no metrics by OTLP

	extension atomic.Pointer[Extension] // receives the ended exchanges, too; nil: metrics.names is empty

	exchanges     *prometheus.CounterVec
	exchangeTime  *prometheus.HistogramVec
	firstToken    *prometheus.HistogramVec
	wholeAnswer   *prometheus.HistogramVec
	queueWait     *prometheus.HistogramVec
	promptTokens  *prometheus.HistogramVec
	outputTokens  *prometheus.HistogramVec
	running       *prometheus.GaugeVec
	waiting       *prometheus.GaugeVec
	build         *prometheus.GaugeVec
	poolObjects   *prometheus.GaugeVec
	models        models
	classes       classVecs
	reloadSuccess prometheus.Gauge
	reloadTime    prometheus.Gauge
	interEvent    *intervalVec
	legTime       *prometheus.HistogramVec
	legErrors     *prometheus.CounterVec
	retries       *prometheus.CounterVec
	fallbacks     *prometheus.CounterVec
	modelChoices  *prometheus.CounterVec
	cleanups      *prometheus.CounterVec
	cleanupTime   *prometheus.HistogramVec
	cancelled     *prometheus.CounterVec
	brokenStreams *prometheus.CounterVec
	continuations *prometheus.CounterVec
	shed          *prometheus.CounterVec
	evictions     *prometheus.CounterVec
	tokenTimes    *prometheus.CounterVec
	clients       *prometheus.CounterVec
	tenantTokens  *prometheus.CounterVec
	tenantRefused *prometheus.CounterVec
	tokens        *prometheus.CounterVec
	restarts      *prometheus.CounterVec
	wakes         *prometheus.CounterVec
	wakeTime      prometheus.Histogram
	sleeps        *prometheus.CounterVec
	disaggIDs     prometheus.Counter
	policyTime    *prometheus.HistogramVec
	policyFails   *prometheus.CounterVec
	matchRatio    prometheus.Histogram
	prompts       *prometheus.CounterVec
	turns         *prometheus.CounterVec
	turnKept      *prometheus.HistogramVec
	warmUps       *prometheus.CounterVec
	kvEvents      *prometheus.CounterVec
	distrust      *prometheus.GaugeVec
	coordinations *prometheus.CounterVec
	picks         *prometheus.CounterVec
	pickTime      prometheus.Histogram
	picksLost     prometheus.Counter
	picksLate     prometheus.Counter
	fleetRefused  *prometheus.CounterVec
	buffers       atomic.Pointer[func() int64] // nil: not counted
}

// waits are histogram bounds, in seconds, for actions of engines.
var waits = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 60, 120, 300}

// turnTimes are histogram bounds, in seconds, for the times between the turns of conversations.
var turnTimes = []float64{.1, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}

// queueWaits are histogram bounds, in seconds. Most requests do not wait: the first bucket
// counts them.
var queueWaits = []float64{.001, .01, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}

// tokenCounts are histogram bounds for the tokens of prompts and answers.
var tokenCounts = prometheus.ExponentialBuckets(1, 4, 11) // 1 to 1 Mi

// New registers the instruments with reg.
func New(reg prometheus.Registerer) *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		reg.MustRegister(c)
		return c
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
		reg.MustRegister(h)
		return h
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
		reg.MustRegister(g)
		return g
	}
	m := &Metrics{
		exchanges:     counter("pdproxy_exchanges_total", "Exchanges that ended, by model, flow and outcome. The model is \"other\" if no engine serves it.", "model", "flow", "outcome"),
		exchangeTime:  histogram("pdproxy_exchange_duration_seconds", "Time from a request's head to the end of its answer.", waits, "model"),
		firstToken:    histogram("pdproxy_time_to_first_token_seconds", "Time from a request's head to the first byte of its stream. The label stream is always true: answers that are no streams are in pdproxy_whole_answer_seconds.", waits, "model", "stream"),
		wholeAnswer:   histogram("pdproxy_whole_answer_seconds", "Time from a request's head to the first byte of its answer, if the answer is no stream: the engine has then computed all of it.", waits, "model"),
		interEvent:    newIntervalVec("pdproxy_inter_event_seconds", "Time between two reads of a stream's events.", "model"),
		legTime:       histogram("pdproxy_leg_duration_seconds", "Time of legs that succeeded.", waits, "phase", "connector"),
		legErrors:     counter("pdproxy_leg_errors_total", "Legs that failed, by reason.", "phase", "engine", "reason"),
		retries:       counter("pdproxy_retries_total", "Legs that were tried again, by the reason of the failure.", "phase", "reason"),
		fallbacks:     counter("pdproxy_fallbacks_total", "Deviations from the configuration, by kind and reason.", "what", "reason"),
		modelChoices:  counter("pdproxy_model_choices_total", "Requests for a name of [[model]], by that name and by the model that was chosen.", "requested", "model"),
		cleanups:      counter("pdproxy_kv_cleanups_total", "Clean-ups of KV that failed exchanges left on engines, by the way that frees the KV.", "connector", "how"),
		cleanupTime:   histogram("pdproxy_kv_cleanup_seconds", "Time from the end of a failed exchange until the KV on its engines was known to be free. KV that only the engine's own time-out frees is not counted.", waits, "connector", "how"),
		cancelled:     counter("pdproxy_legs_cancelled_total", "Legs cancelled because the client left or the other leg failed.", "phase"),
		brokenStreams: counter("pdproxy_broken_streams_total", "Streams that ended in an error event, by reason.", "reason"),
		continuations: counter("pdproxy_continuations_total", "Streams that broke off while continuation was on: continued on other engines, completed by the proxy because only the closing events were missing, or the reason why neither.", "result"),
		shed:          counter("pdproxy_shed_total", "Requests refused by a limit.", "reason"),
		evictions:     counter("pdproxy_evictions_total", "Running requests that the proxy ended for a waiting request of a higher class, by their class and by the reason of that wait: max_exchanges or saturated.", "class", "reason"),
		tokenTimes:    counter("pdproxy_token_time_requests_total", "Streams with a limit for the mean time between their tokens, by priority class and by result: met or missed.", "class", "result"),
		clients:       counter("pdproxy_client_exchanges_total", "Exchanges by the name of the client's API key; empty without keys.", "client", "outcome"),
		tenantTokens:  counter("pdproxy_tenant_tokens_total", "Tokens of prompts and answers that counted against the limits of a tenant. The proxy estimates the tokens that the engine did not report.", "tenant"),
		tenantRefused: counter("pdproxy_tenant_refused_total", "Requests refused by the limits of their tenant, by reason.", "tenant", "reason"),
		tokens:        counter("pdproxy_tokens_total", "Tokens that the engines reported, by model and kind.", "model", "kind"),
		restarts:      counter("pdproxy_engine_restarts_total", "Restarts of engines that the proxy has noticed.", "engine"),
		policyTime:    histogram("pdproxy_policy_duration_seconds", "Time of policy calls.", []float64{1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3}, "policy", "hook"),
		policyFails:   counter("pdproxy_policy_failures_total", "Policy calls whose answer could not be used.", "policy", "hook", "reason"),
		disaggIDs:     prometheus.NewCounter(prometheus.CounterOpts{Name: "pdproxy_disagg_ids_total", Help: "Disagg ids minted."}),
	}
	m.wakes = counter("pdproxy_engine_wakes_total", "Calls that were to wake an engine, by result: ok, or the reason why the engine is not known to be awake.", "engine", "result")
	m.sleeps = counter("pdproxy_engine_sleeps_total", "Calls that were to put an engine to sleep, by result: ok, used (a request came meanwhile), or the reason of the failure.", "engine", "result")
	m.wakeTime = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "pdproxy_engine_wake_seconds", Help: "Time from the call that wakes an engine until the engine was awake.", Buckets: waits})
	reg.MustRegister(m.wakeTime)
	m.matchRatio = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "pdproxy_kv_match_ratio", Help: "Share of a prompt that its prefill target holds according to its KV events.",
		Buckets: []float64{0, .1, .2, .3, .4, .5, .6, .7, .8, .9, .95, 1},
	})
	m.prompts = counter("pdproxy_prompt_token_ids_total", "Prompts to look up in the KV index, by the source of their token ids, or by the reason for missing ids.", "source", "reason")
	m.warmUps = counter("pdproxy_pair_warmups_total", "Warm-up requests of new pairs and trials of broken pairs, by outcome: ok, failed, or busy (not sent).", "outcome")
	m.kvEvents = counter("pdproxy_kv_events_total", "KV events of engines: applied blocks, refused blocks (the index was full), gaps, replays, resyncs by reason, malformed.", "engine", "kind", "reason")
	m.coordinations = counter("pdproxy_coordinations_total", "Placements of a sidecar, by its coordination policy.", "policy")
	m.picks = counter("pdproxy_picker_requests_total", "Requests for which an ext_proc picker was to choose the engines, by result: picked, refused (the picker answered the client itself), cancelled (the client left), or the reason why there was no usable choice.", "result")
	m.pickTime = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "pdproxy_picker_duration_seconds", Help: "Time from the question to an ext_proc picker until its choice, or until the proxy gave up.", Buckets: waits})
	m.picksLost = prometheus.NewCounter(prometheus.CounterOpts{Name: "pdproxy_picker_answers_lost_total", Help: "Answers of engines that an ext_proc picker has not seen to the end because it read too slowly."})
	m.picksLate = prometheus.NewCounter(prometheus.CounterOpts{Name: "pdproxy_picker_heads_late_total", Help: "Answers whose head went to the client without the changes of an ext_proc picker, because the picker was late with this head or with earlier ones."})
	m.fleetRefused = counter("pdproxy_fleet_refused_total", "Connections of workers, standbys and HTTP callers that the coordinator refused, by reason.", "reason")
	m.turnKept = histogram("pdproxy_turn_kv_kept_seconds", "Time for which a decode engine kept the KV of a turn, by the result: returned (the next turn uses it), unusable (the next turn begins in another way), replaced (by a newer turn of the conversation), expired (the time of the policy has ended), evicted (memory was short), freed (the policy kept nothing), recalled (the client did not get the end of the turn) or drained.", turnTimes, "result")
	m.turns = counter("pdproxy_turn_kv_total", "KV of a turn that a decode engine keeps for the next turn, by outcome: kept, or pulled by prefill.", "outcome")
	m.distrust = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "pdproxy_kv_distrust", Help: "1 while an engine's reported cached tokens disagree with the KV index, by the likely reason.",
	}, []string{"engine", "reason"})
	m.queueWait = histogram("pdproxy_queue_wait_seconds", "Time that a request waited in the proxy for a place among limits.max_exchanges and for an engine that is ready; 0 for requests that did not wait.", queueWaits, "model")
	m.promptTokens = histogram("pdproxy_prompt_tokens", "Tokens of the prompt of a request, as the engine reported them.", tokenCounts, "model")
	m.outputTokens = histogram("pdproxy_output_tokens", "Tokens of the answer of a request, as the engine reported them.", tokenCounts, "model")
	m.running = gauge("pdproxy_requests_running", "Requests that have a place among limits.max_exchanges and do not wait for an engine.", "model")
	m.waiting = gauge("pdproxy_requests_waiting", "Requests that wait in the proxy, by reason: max_exchanges for a place among limits.max_exchanges, no_engine for an engine that is ready (limits.no_engine_timeout), policy because the plan policy holds them, saturated because the engines of the model are saturated (limits.saturation_queue_depth).", "model", "reason")
	m.classes.exchanges = counter("pdproxy_class_exchanges_total", "Exchanges that ended, by priority class and outcome.", "class", "outcome")
	m.classes.tokens = counter("pdproxy_class_tokens_total", "Tokens that the engines reported, by priority class and kind.", "class", "kind")
	m.classes.queueWait = histogram("pdproxy_class_queue_wait_seconds", "Time that a request waited in the proxy, by priority class; 0 for requests that did not wait.", queueWaits, "class")
	m.classes.firstToken = histogram("pdproxy_class_time_to_first_token_seconds", "Time from a request's head to the first byte of its stream, by priority class.", waits, "class")
	m.classes.requests = gauge("pdproxy_class_requests", "Requests in the proxy, by priority class and state: running or waiting.", "class", "state")
	m.poolObjects = gauge("pdproxy_pool_objects", "Objects of the InferencePool epp.pool, by kind and state: valid, or invalid (the object changes nothing).", "kind", "state")
	m.build = gauge("pdproxy_build_info", "1, with the version of the program and of Go.", "version", "goversion")
	m.reloadSuccess = prometheus.NewGauge(prometheus.GaugeOpts{Name: "pdproxy_config_reload_success", Help: "1 if the last read of the configuration, at the start or by a reload, succeeded; 0 while an older configuration stays in force."})
	m.reloadTime = prometheus.NewGauge(prometheus.GaugeOpts{Name: "pdproxy_config_reload_timestamp_seconds", Help: "Time of the last read of the configuration that succeeded."})
	held := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "pdproxy_buffer_bytes", Help: "Memory that holds requests and answers, in bytes."}, m.bufferBytes)
	m.models.byName.Store(&map[string]*Model{})
	m.Other = m.newModel(OtherModel)
	reg.MustRegister(held, m.pickTime, m.picksLost, m.picksLate, m.reloadSuccess, m.reloadTime, m.interEvent, m.disaggIDs, m.matchRatio, m.distrust)
	return m
}

// Build sets the version of the program.
func (m *Metrics) Build(version string) {
	m.build.WithLabelValues(version, runtime.Version()).Set(1)
}

// PoolObjects sets the numbers of the valid and the invalid objects of epp.pool of a kind.
func (m *Metrics) PoolObjects(kind string, valid, invalid int) {
	m.poolObjects.WithLabelValues(kind, "valid").Set(float64(valid))
	m.poolObjects.WithLabelValues(kind, "invalid").Set(float64(invalid))
}

// Client counts one ended exchange for the holder of an API key.
func (m *Metrics) Client(name string, o Outcome) {
	m.clients.WithLabelValues(name, o.String()).Inc()
}

// TenantTokens counts the tokens of a request that has ended.
func (m *Metrics) TenantTokens(tenant string, n int64) {
	m.tenantTokens.WithLabelValues(tenant).Add(float64(n))
}

// TenantRefused counts a request that the limits of its tenant refused.
func (m *Metrics) TenantRefused(tenant, reason string) {
	m.tenantRefused.WithLabelValues(tenant, reason).Inc()
}

// ConfigLoaded notes that the configuration was read at that time, at the start or by a
// reload, and whether it is in force now.
func (m *Metrics) ConfigLoaded(ok bool, now time.Time) {
	if !ok {
		m.reloadSuccess.Set(0)
		return
	}
	m.reloadSuccess.Set(1)
	m.reloadTime.Set(float64(now.UnixMilli()) / 1e3)
}

// Picked counts a request to an ext_proc picker, by its result, and the time that it took.
func (m *Metrics) Picked(result string, took time.Duration) {
	m.picks.WithLabelValues(result).Inc()
	m.pickTime.Observe(took.Seconds())
}

// PickerLate counts an answer whose head did not have the changes of an ext_proc picker.
func (m *Metrics) PickerLate() { m.picksLate.Inc() }

// PickerLost counts an answer that an ext_proc picker has not seen to the end.
func (m *Metrics) PickerLost() { m.picksLost.Inc() }

// Leg observes a leg that succeeded.
func (m *Metrics) Leg(phase abi.Phase, connector string, d time.Duration) {
	m.legTime.WithLabelValues(phase.String(), connector).Observe(d.Seconds())
}

// LegError counts a leg that failed.
func (m *Metrics) LegError(phase abi.Phase, engine, reason string) {
	m.legErrors.WithLabelValues(phase.String(), engine, reason).Inc()
}

// Retry counts a leg that is retried.
func (m *Metrics) Retry(phase abi.Phase, reason string) {
	m.retries.WithLabelValues(phase.String(), reason).Inc()
}

// FleetRefused counts a connection to fleet.listen, or to the socket of this host's
// workers, that was refused.
func (m *Metrics) FleetRefused(reason string) { m.fleetRefused.WithLabelValues(reason).Inc() }

// Fallback counts one deviation from the configuration.
func (m *Metrics) Fallback(what, reason string) { m.fallbacks.WithLabelValues(what, reason).Inc() }

// ModelChosen counts a request for a name of [[model]], and the model that serves it.
func (m *Metrics) ModelChosen(requested, model string) {
	m.modelChoices.WithLabelValues(requested, model).Inc()
}

// Coordinated counts a placement that a sidecar's coordination policy made.
func (m *Metrics) Coordinated(policy string) { m.coordinations.WithLabelValues(policy).Inc() }

// Cleanup counts a clean-up: engine memory that was freed, or that stays until the
// engine's own time-out. It also observes the time since the end of the exchange, unless
// this time is 0.
func (m *Metrics) Cleanup(connector, how string, d time.Duration) {
	m.cleanups.WithLabelValues(connector, how).Inc()
	if d > 0 {
		m.cleanupTime.WithLabelValues(connector, how).Observe(d.Seconds())
	}
}

// Cancelled counts a leg that was cancelled in that phase.
func (m *Metrics) Cancelled(phase abi.Phase) { m.cancelled.WithLabelValues(phase.String()).Inc() }

// Continuation counts a stream that broke off, by the result.
func (m *Metrics) Continuation(result string) { m.continuations.WithLabelValues(result).Inc() }

// BrokenStream counts a stream that ended in an error event.
func (m *Metrics) BrokenStream(reason string) { m.brokenStreams.WithLabelValues(reason).Inc() }

// Shed counts a request that a limit rejected.
func (m *Metrics) Shed(reason string) { m.shed.WithLabelValues(reason).Inc() }

// Evicted counts a running request of a class that ended for a waiting one of a higher class.
func (m *Metrics) Evicted(class, reason string) { m.evictions.WithLabelValues(class, reason).Inc() }

// TokenTime counts a stream of a class with a limit for the mean time between its tokens.
func (m *Metrics) TokenTime(class string, met bool) {
	result := "missed"
	if met {
		result = "met"
	}
	m.tokenTimes.WithLabelValues(class, result).Inc()
}

// WatchBuffers sets the source of pdproxy_buffer_bytes. used must be safe for
// concurrent use.
func (m *Metrics) WatchBuffers(used func() int64) { m.buffers.Store(&used) }

func (m *Metrics) bufferBytes() float64 {
	if used := m.buffers.Load(); used != nil {
		return float64((*used)())
	}
	return 0
}

// Restart counts an engine restart.
func (m *Metrics) Restart(engine string) { m.restarts.WithLabelValues(engine).Inc() }

// EngineWoken counts one call that was to wake an engine.
func (m *Metrics) EngineWoken(engine, result string, took time.Duration) {
	m.wakes.WithLabelValues(engine, result).Inc()
	if result == "ok" {
		m.wakeTime.Observe(took.Seconds())
	}
}

// EngineSlept counts one call that was to put an engine to sleep.
func (m *Metrics) EngineSlept(engine, result string, _ time.Duration) {
	m.sleeps.WithLabelValues(engine, result).Inc()
}

// Minted counts one disagg id of any policy.
func (m *Metrics) Minted(string) { m.disaggIDs.Inc() }

// PolicyMeter measures the calls of one hook of one policy, or of one callback of one
// filter. It is safe for concurrent use, and does not allocate.
type PolicyMeter struct {
	metrics      *Metrics
	policy, hook string
	duration     atomic.Pointer[prometheus.Observer] // nil until the first call
}

// PolicyMeter returns a meter. Meters with the same names share their metrics.
func (m *Metrics) PolicyMeter(policy, hook string) *PolicyMeter {
	return &PolicyMeter{metrics: m, policy: policy, hook: hook}
}

// Observe observes one call.
func (p *PolicyMeter) Observe(d time.Duration) {
	o := p.duration.Load()
	if o == nil {
		made := p.metrics.policyTime.WithLabelValues(p.policy, p.hook)
		o = &made
		p.duration.Store(o)
	}
	(*o).Observe(d.Seconds())
}

// Fail counts a call whose result could not be used.
func (p *PolicyMeter) Fail(reason string) {
	p.metrics.policyFails.WithLabelValues(p.policy, p.hook, reason).Inc()
}

// Matched observes the part of a prompt that its target probably holds.
func (m *Metrics) Matched(matched, prompt int64) {
	if prompt > 0 {
		m.matchRatio.Observe(min(1, float64(matched)/float64(prompt)))
	}
}

// Prompt counts a prompt for which token ids were requested.
func (m *Metrics) Prompt(source, reason string) { m.prompts.WithLabelValues(source, reason).Inc() }

// WarmUp counts a warm-up request of a pair.
func (m *Metrics) WarmUp(outcome string) { m.warmUps.WithLabelValues(outcome).Inc() }

// TurnKept observes the time for which a decode engine kept the KV of a turn.
func (m *Metrics) TurnKept(result string, kept time.Duration) {
	m.turnKept.WithLabelValues(result).Observe(kept.Seconds())
}

// Turn counts KV of a conversation's turn that decode retains, or that prefill pulls.
func (m *Metrics) Turn(outcome string) { m.turns.WithLabelValues(outcome).Inc() }

// KVEvents counts n events of a kind.
func (m *Metrics) KVEvents(engine, kind, reason string, n int) {
	m.kvEvents.WithLabelValues(engine, kind, reason).Add(float64(n))
}

// Distrust sets the reason why an engine's reports disagree with the KV index; "" for
// none.
func (m *Metrics) Distrust(engine, reason string) {
	m.distrust.DeletePartialMatch(prometheus.Labels{"engine": engine})
	if reason != "" {
		m.distrust.WithLabelValues(engine, reason).Set(1)
	}
}
