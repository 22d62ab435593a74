package doctor

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// Severity is the effect of a finding on requests.
type Severity string

// The severities.
const (
	Error   Severity = "error"   // requests fail, or an engine gets no request
	Warning Severity = "warning" // requests succeed, but slower or not as configured
	Note    Severity = "note"    // nothing is wrong
)

// Side is where a finding is mended.
type Side string

// The sides.
const (
	Config Side = "config" // the configuration of the proxy
	Flags  Side = "engine" // the engine's flags or its host
)

// Finding is one thing that is wrong, or worth knowing.
type Finding struct {
	Severity Severity `json:"severity"`
	Engine   string   `json:"engine,omitempty"` // "" for several engines and for the configuration
	Side     Side     `json:"side"`
	Problem  string   `json:"problem"`
	Fix      string   `json:"fix,omitempty"` // the key or flag that mends it
}

// add adds a finding about e.
func (r *Report) add(e *Engine, severity Severity, side Side, fix, format string, args ...any) {
	r.Add(Finding{severity, e.Name, side, fmt.Sprintf(format, args...), fix})
}

// reach explains why the probe of an engine failed.
func (r *Report) reach(e *Engine) {
	if e.failure == nil {
		return
	}
	var dns *net.DNSError
	var unknown x509.UnknownAuthorityError
	var verification *tls.CertificateVerificationError
	text := e.failure.Error()
	is, wants := connector.Owner(&engine.Facts{Owner: e.Kind}, e.Connector)
	switch {
	case is != "" && wants != "" && is != wants:
		r.add(e, Error, Config, "engine.connector", "the engine is %s, but connector %q is for %s", is, e.Connector, wants)
	case strings.Contains(text, "status 401"), strings.Contains(text, "status 403"):
		r.add(e, Error, Config, "engine.api_key_file", "the engine refuses the key: %s", text)
	case errors.As(e.failure, &unknown), errors.As(e.failure, &verification):
		r.add(e, Error, Config, "engine.ca", "the certificate of the engine is not trusted: %s", text)
	case strings.Contains(text, "HTTP response to HTTPS client"):
		r.add(e, Error, Config, "engine.url: http:// instead of https://", "the engine has no TLS")
	case errors.As(e.failure, &dns):
		r.add(e, Error, Config, "engine.url", "the name of the host has no address: %s", text)
	case e.Reachable && e.Role == config.RolePrefill && e.Connector == config.ConnectorSGLang && e.Mode != "" && e.Mode != "prefill":
		r.mode(e)
	case e.Reachable && e.Role == config.RolePrefill && (e.Connector == config.ConnectorSGLang || e.Connector == config.ConnectorVLLMMooncake):
		r.add(e, Error, Flags, "engine.bootstrap_host and engine.bootstrap_port, or the engine's --disaggregation-bootstrap-port (SGLang) or VLLM_MOONCAKE_BOOTSTRAP_PORT (vLLM)",
			"the API answers, but the bootstrap server of prefill does not: %s", text)
	case engine.IsRefused(e.failure):
		r.add(e, Error, Flags, "engine.url, or start the engine with --host 0.0.0.0", "no process listens at the address")
	case errors.Is(e.failure, context.DeadlineExceeded), timedOut(e.failure):
		r.add(e, Error, Flags, "engine.url, the network, or health.timeout", "the engine does not answer in time")
	case strings.Contains(text, "names no model"):
		r.add(e, Error, Config, "engine.model", "the engine names no model")
	default:
		r.add(e, Error, Flags, "engine.url and engine.connector", "the probe failed: %s", text)
	}
}

func timedOut(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}

// identity compares what the engine is with what the configuration says.
func (r *Report) identity(e *Engine) {
	spec, f := &e.i.Spec, e.i.Facts()
	if is, wants := connector.Owner(f, e.Connector); is != "" && wants != "" && is != wants {
		r.add(e, Error, Config, "engine.connector", "the engine is %s, but connector %q is for %s", is, e.Connector, wants)
	}
	if spec.Model != "" && len(f.Models) > 0 && !slices.Contains(f.Models, spec.Model) {
		r.add(e, Error, Config, "engine.model, or the engine's --served-model-name", "engine.model is %q, but the engine serves %s", spec.Model, quoted(f.Models))
	}
	if f.DPSize > 0 && f.DPSize != spec.Ranks {
		r.add(e, Warning, Config, fmt.Sprintf("engine.ranks = %d", f.DPSize), "the engine has %d data-parallel ranks, the configuration %d", f.DPSize, spec.Ranks)
	}
	if e.Connector == config.ConnectorSGLang && strings.HasPrefix(f.Version, "0.") && older(f.Version, 5) {
		r.add(e, Warning, Flags, "SGLang 0.5 or later", "SGLang %s is older than the releases that the connector supports", f.Version)
	}
	r.mode(e)
}

// older reports whether a release 0.N has N below least.
func older(version string, least int) bool {
	var minor int
	n, err := fmt.Sscanf(version, "0.%d", &minor)
	return err == nil && n == 1 && minor < least
}

// mode compares SGLang's mode with the role.
func (r *Report) mode(e *Engine) {
	want := e.Role
	if want == config.RoleBoth {
		want = "null"
	}
	if e.Connector == config.ConnectorSGLang && e.Mode != "" && e.Mode != want {
		r.add(e, Error, Flags, fmt.Sprintf("the engine's --disaggregation-mode %s, or engine.role", want),
			"engine.role is %q, but the engine runs with --disaggregation-mode %s", e.Role, e.Mode)
	}
}

// protocol compares the KV connector that the engine shows with the configured one.
func (r *Report) protocol(e *Engine) {
	want := connector.ShowsTransfer(e.Connector, e.Version)
	if want == "" || e.Transfer == "" || e.Transfer == want || e.Role == config.RoleEncode {
		return
	}
	name := map[string]string{"nixl": "NixlConnector", "mooncake": "MooncakeConnector"}[want]
	severity := Error
	if e.Role == config.RoleBoth { // it may serve whole requests only
		severity = Warning
	}
	r.add(e, severity, Flags, fmt.Sprintf(`the engine's --kv-transfer-config '{"kv_connector":"%s","kv_role":"kv_both"}'`, name),
		"connector is %q, but the metrics of the engine show no KV connector %s (found: %s)", e.Connector, name, e.Transfer)
}

// events compares the engine's KV events with the place policy.
func (r *Report) events(e *Engine, uses, known bool) {
	vllm := `the engine's --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}'`
	if e.Role == config.RoleDecode || e.Role == config.RoleEncode { // prompts are placed by the blocks of prefill
		uses = false
	}
	switch {
	case e.foreign != nil:
		r.add(e, Warning, Config, "engine.kv_events, or engine.kv_hosts", "%s", e.foreign)
	case e.Events == "off" && uses && e.Connector == config.ConnectorTRTLLM:
		r.add(e, Warning, Config, `engine.kv_events = "poll"`, "policy.place uses KV events, but the proxy does not poll those of the engine")
	case e.Events == "off" && uses:
		r.add(e, Warning, Flags, vllm+", and for vLLM before 0.32 engine.kv_events",
			"policy.place uses KV events, but the engine announces none; the proxy estimates its blocks")
	case e.Events == "announced" && known && !uses && e.Role != config.RoleDecode:
		r.add(e, Note, Config, `policy.place = "kv_aware"`, "the engine publishes KV events, which policy.place does not use")
	}
	side, fix := Flags, "the engine's --kv-events-config, and the network from the proxy to its port"
	if e.Events == "configured" {
		side, fix = Config, "engine.kv_events and engine.kv_replay, or leave both empty if the engine announces them"
	}
	for _, err := range e.unheard {
		r.add(e, Warning, side, fix, "the publisher of the KV events cannot be reached: %s", err)
	}
	for _, err := range e.unplayed {
		r.add(e, Warning, side, fix, "the replays of the KV events cannot be reached: %s", err)
	}
	for _, err := range e.unpushed {
		r.add(e, Warning, Flags, "the engine's --load-publish-endpoint, and the network from the proxy to its port", "the publisher of the loads cannot be reached: %s", err)
	}
	if n := len(e.i.Facts().KVEvents.Ranks); e.Events == "announced" && n > e.Ranks && e.DPSize == 0 {
		r.add(e, Warning, Config, fmt.Sprintf("engine.ranks = %d", n), "%d ranks publish KV events, but the configuration has %d", n, e.Ranks)
	}
	if uses && e.Caching == "off" {
		r.add(e, Warning, Flags, "the engine without --no-enable-prefix-caching (vLLM) or --disable-radix-cache (SGLang)",
			"policy.place uses the blocks that the engine keeps, but its prefix cache is off")
	}
}

// extras adds findings about load, sleep and routes. wakes: the configuration has sleep.wake.
func (r *Report) extras(e *Engine, wakes bool) {
	if e.loadless != nil {
		r.add(e, Warning, Flags, "the engine without --disable-log-stats (vLLM), with --enable-metrics (SGLang before 0.5.4)",
			"the engine reports no load: %s", e.loadless)
	}
	switch {
	case e.Asleep && !wakes:
		r.add(e, Warning, Flags, "POST /wake_up of the engine, or sleep.wake = true", "the engine sleeps, and gets no requests")
	case e.Kind == "vllm" && wakes && !e.DevMode:
		r.add(e, Warning, Flags, "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode", "the configuration has sleep.wake, but the engine has no routes of the sleep mode")
	}
	if e.DevMode && !wakes {
		r.add(e, Note, Flags, "the engine without VLLM_SERVER_DEV_MODE", "the engine runs in its development mode: any host that reaches it can put it to sleep")
	}
}

// quoted lists a few names. Each may contain any character.
func quoted(names []string) string {
	var list []string
	for _, n := range names[:min(len(names), 3)] {
		list = append(list, fmt.Sprintf("%q", n))
	}
	if len(names) > 3 {
		list = append(list, fmt.Sprintf("and %d more", len(names)-3))
	}
	return strings.Join(list, ", ")
}
