package config

import (
	"slices"
	"strings"
)

// engines checks every [[engine]] by itself.
func (k *checker) engines() {
	names := map[string]string{}
	for i, e := range k.config.Engines {
		k.engine(indexKey("engine", i), e, names)
	}
}

// engine checks e at the key at. names holds the names in its list.
func (k *checker) engine(at string, e Engine, names map[string]string) {
	key := func(name string) string { return joinKey(at, name) }
	k.name(key("name"), e.Name)
	k.unique(key("name"), e.Name, names)
	k.httpURL(key("url"), e.URL)
	if e.Role == "" {
		k.required(key("role"), e.Role)
	} else {
		k.oneOf(key("role"), e.Role, roles()...)
	}
	k.oneOf(key("connector"), e.Connector, connectors()...)
	if RetiredConnector(e.Connector) != nil {
		return // its other keys may have values of the retired connector
	}
	if e.Role == RoleEncode && slices.Contains(connectors(), e.Connector) && !strings.HasPrefix(e.Connector, "vllm-") {
		k.add(key("role"), "%q is for connectors of vLLM, found %q", RoleEncode, e.Connector)
	}
	_, set := k.config.lines[key("connector")]
	switch {
	case e.Connector != ConnectorNone || e.Role != RolePrefill && e.Role != RoleDecode:
	case !set && k.config.lines != nil:
		k.add(key("connector"), "is missing: role %q needs the connector of the engine, such as %q; an engine without KV transfer needs role %q", e.Role, ConnectorVLLMNixl, RoleBoth)
	default:
		k.add(key("connector"), "%q transfers nothing: it needs role %q, or role %q another connector",
			ConnectorNone, RoleBoth, e.Role)
	}
	k.atLeast(key("ranks"), e.Ranks, 1)
	k.kvEvents(at, e)
	k.within(key("block_tokens"), e.BlockTokens, 0, 1<<20)
	k.host(key("bootstrap_host"), e.BootstrapHost)
	k.within(key("bootstrap_port"), e.BootstrapPort, 0, 65535)
	k.kvAddress(at, e)
	k.identity(at, e)
	if _, err := ParseKVHosts(e.KVHosts); err != nil {
		k.add(key("kv_hosts"), "%v", err)
	}
	if e.Bidirectional && e.Connector != ConnectorVLLMNixl {
		k.add(key("bidirectional"), "is for connector %q, found %q", ConnectorVLLMNixl, e.Connector)
	}
	if err := e.Labels.check(); err != nil {
		k.add(key("labels"), "%v", err)
	}
	if !(e.Weight >= 0 && e.Weight <= 1000) { // false for NaN, too
		k.add(key("weight"), "must be 0 to 1000, found %v", e.Weight)
	}
	if e.HealthPath != "" && !strings.HasPrefix(e.HealthPath, "/") {
		k.add(key("health_path"), "must begin with /")
	}
	k.oneOf(key("priority"), e.Priority, "", LowerFirst, HigherFirst)
	if e.Priority != "" && e.Connector == ConnectorTRTLLM {
		k.add(key("priority"), "is not for connector %q: its engines reject the field", ConnectorTRTLLM)
	}
	k.endpoint(key("endpoint"), e.Endpoint)
	k.atLeast(key("max_conns"), e.MaxConns, 0)
	k.oneOf(key("wire"), e.Wire, "", "g1", "g2", "g3")
}

// kvEvents checks the sources of the KV events of e at the key at.
func (k *checker) kvEvents(at string, e Engine) {
	switch {
	case e.KVEvents == "poll" && e.Connector != ConnectorTRTLLM:
		k.add(joinKey(at, "kv_events"), "%q is for connector %q only", "poll", ConnectorTRTLLM)
	case e.KVEvents != "" && e.KVEvents != "poll":
		k.zmq(joinKey(at, "kv_events"), e.KVEvents)
	}
	if e.KVReplay != "" {
		k.zmq(joinKey(at, "kv_replay"), e.KVReplay)
	}
}

// kvAddress checks the KV transfer address of e at the key at.
func (k *checker) kvAddress(at string, e Engine) {
	if _, err := ParseKVAddress(e.KVAddress); err != nil {
		k.add(joinKey(at, "kv_address"), "%v", err)
	} else if err := e.CheckKVAddress(); err != nil {
		k.add(joinKey(at, "kv_address"), "%v", err)
	}
	k.within(joinKey(at, "tp_size"), e.TPSize, 0, 1<<16)
	k.within(joinKey(at, "pp_size"), e.PPSize, 0, 1<<16)
}

// identity checks the values by which decode finds e at the key at.
func (k *checker) identity(at string, e Engine) {
	if e.SideChannel != "" && !validHostPort(e.SideChannel) {
		k.add(joinKey(at, "side_channel"), "invalid address %q: want host:port", e.SideChannel)
	}
	if e.Pushes() && e.EngineID == "" {
		k.add(joinKey(at, "engine_id"), "is required for connector %q with role %q", e.Connector, e.Role)
	}
	if e.SideChannelled() && e.SideChannel == "" {
		k.add(joinKey(at, "side_channel"), "is required for connector %q with role %q", e.Connector, e.Role)
	}
}

// host requires an IP address or a name, without a port, or an empty text.
func (k *checker) host(key, value string) {
	if !validHost(strings.TrimSuffix(strings.TrimPrefix(value, "["), "]")) {
		k.add(key, "must be a host name or an IP address, found %q", value)
	}
}

// pairs requires a partner for every prefill and every decode engine: an engine of the
// other role with the same model and connector. If there is no engine of the other role
// at all, there is only a warning, because discovery may find one.
// Two engines that cannot pair are one problem, at the first of them. An engine whose own
// connector has a problem makes no further problem of its partners.
func (k *checker) pairs() {
	wrong := func(e Engine) bool {
		return !slices.Contains(connectors(), e.Connector) || e.Connector == ConnectorNone
	}
	named := map[int]bool{} // the engines that a problem names
	for i, e := range k.config.Engines {
		if wrong(e) || named[i] {
			continue
		}
		others, paired := k.config.partners(e)
		if len(others) == 0 || paired || slices.ContainsFunc(others, func(o int) bool { return wrong(k.config.AllEngines()[o]) }) {
			continue
		}
		k.add(engineKey(i, "connector"), "%q cannot pair with %s", e.Connector, k.engineNames(others))
		for _, o := range others {
			named[o] = true
		}
	}
}

// partners returns the indices (in AllEngines) of the engines with the role opposite to
// e's that serve its model, and whether one of them, or one of role both, can be paired
// with e. An engine of role both needs no partner. A model that is read from the engine
// may be any model.
func (c *Config) partners(e Engine) (others []int, paired bool) {
	opposite := map[string]string{RolePrefill: RoleDecode, RoleDecode: RolePrefill}[e.Role]
	if opposite == "" {
		return nil, true
	}
	for i, o := range c.AllEngines() {
		if o.Model != e.Model && o.Model != "" && e.Model != "" {
			continue
		}
		if o.Role == opposite {
			others = append(others, i)
		}
		both := o.Role == RoleBoth && o.Connector != ConnectorSGLang // its engines have only one mode
		paired = paired || (o.Role == opposite || both) && o.Connector == e.Connector
	}
	return others, paired
}

// engineCare checks the keys for probes, calls, retries and circuits.
func (k *checker) engineCare() {
	h := k.config.Health
	k.positive("health.interval", int64(h.Interval))
	k.positive("health.timeout", int64(h.Timeout))
	k.atLeast("health.unhealthy_after", h.UnhealthyAfter, 1)
	k.atLeast("health.healthy_after", h.HealthyAfter, 1)

	r := k.config.Retry
	k.atLeast("retry.attempts", r.Attempts, 1)
	k.share("retry.budget", r.Budget)
	k.atLeast("retry.min_budget", r.MinBudget, 0)
	k.oneOf("retry.continue", r.Continue, ContinueOff, ContinueDrain, ContinueOn)
	k.atLeast("retry.continue_tokens", r.ContinueTokens, 1)

	k.atLeast("circuit.failures", k.config.Circuit.Failures, 1)
	k.positive("circuit.open_for", int64(k.config.Circuit.OpenFor))
	k.sameLabels()

	t := k.config.Transport
	k.atLeast("transport.max_idle", t.MaxIdle, 0)
	k.positive("transport.idle_timeout", int64(t.IdleTimeout))
	k.oneOf("trtllm.schedule_style", k.config.TRTLLM.ScheduleStyle, "", "context_first", "generation_first")
}

// engineKey is the key name of engine i.
func engineKey(i int, name string) string { return joinKey(indexKey("engine", i), name) }
