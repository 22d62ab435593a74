package config

import (
	"fmt"
	"strings"
)

// Warnings returns valid settings that are probably mistakes, in the order of the
// lines. c must have no problems.
func (c *Config) Warnings() []Problem {
	k := &checker{config: c}
	k.warnPartners()
	k.warnURLs()
	if c.Admin.TrustAddedEngines {
		k.add("admin.trust_added_engines", "any holder of the admin token can make the proxy send files of this machine to an engine")
	}
	for i, p := range c.Plugins {
		if p.Remote() && p.SHA256 == "" && p.PublicKey == "" && !strings.Contains(p.Path, "@sha256:") {
			k.add(joinKey(indexKey("plugin", i), "sha256"), "is empty: the proxy runs any module that the server of path sends")
		}
	}
	k.warnClear()
	k.warnUnproven()
	k.warnACME()
	if c.Server.HTTP1 == HTTP1NetHTTP {
		k.add("server.http1", `is deprecated: 0.2.0 removes "nethttp"; remove the key`)
	}
	for i, e := range c.Engines {
		k.warnUnused(i, e)
		if e.InsecureSkipVerify {
			k.add(engineKey(i, "insecure_skip_verify"), "the proxy accepts any certificate: a host on the path can read prompts and keys")
		}
	}
	if c.Sidecar.PickerInsecureSkipVerify {
		k.add("sidecar.picker_insecure_skip_verify", "the proxy accepts any certificate: a host on the path can read prompts and choose engines")
	}
	k.warnScores()
	k.problems.Sort()
	return c.complete(k.problems)
}

// warnClear warns about secrets that other hosts may read.
func (k *checker) warnClear() {
	c := k.config
	for i, e := range c.Engines {
		if e.APIKeyFile == "" {
			continue
		}
		if exposed(e.URL) {
			k.add(engineKey(i, "api_key_file"), "the key is sent over the network without encryption: url is neither https nor loopback")
		}
		if c.Fleet.Open && !c.Fleet.proven() && betweenHosts(c.Fleet.Listen) {
			k.add(engineKey(i, "api_key_file"), "with fleet.open any host that can reach fleet.listen can connect as a worker and gets the key")
		}
	}
	if c.Fleet.PlainHTTP && c.Fleet.TokenFile != "" && betweenHosts(c.Fleet.Listen) {
		k.add("fleet.plain_http", "TensorRT-LLM's workers send the token of fleet.token_file without encryption; workers of the fleet authenticate with the same token")
	}
	if t := c.Discovery.TRTLLM; t.TokenFile != "" && exposed(t.ClusterURI) {
		k.add("discovery.trtllm.token_file", "engines send the token over the network without encryption: discovery.trtllm.cluster_uri is http and not loopback")
	}
	if address, isTCP := strings.CutPrefix(c.Discovery.MoRIIO.Listen, "tcp://"); isTCP && c.Discovery.MoRIIO.PasswordFile != "" && betweenHosts(address) {
		k.add("discovery.moriio.password_file", "engines send the password over the network without encryption, as PLAIN of ZeroMQ does")
	}
}

// warnUnproven warns about addresses without authentication.
func (k *checker) warnUnproven() {
	c := k.config
	if t := c.Discovery.TRTLLM; t.TokenFile == "" {
		if address, plain := strings.CutPrefix(t.ClusterURI, "http://"); plain && isLoopback(address) {
			k.add("discovery.trtllm.cluster_uri", "any user of this host can register an engine that receives prompts: set discovery.trtllm.token_file")
		}
	}
	if m := c.Discovery.MoRIIO; m.PasswordFile == "" {
		if address, isTCP := strings.CutPrefix(m.Listen, "tcp://"); isTCP && isLoopback(address) {
			k.add("discovery.moriio.listen", "any user of this host can register an engine that receives prompts: set discovery.moriio.password_file")
		}
	}
}

// warnPartners warns about a role without an engine to pair with, once for each role,
// and about a configuration without engines.
func (k *checker) warnPartners() {
	if s := k.config.Sidecar; s.Local != "" { // its engine may serve alone
		if (s.Connector == ConnectorSGLang || s.Connector == ConnectorTRTLLM) && k.config.Fleet.NodeID == 0 {
			k.add("fleet.node_id", "is 0: sidecars that share engines need different values, or -1; two sidecars with the same value mint the same ids")
		}
		return
	}
	if len(k.config.Engines) == 0 && k.config.Discovery.Enabled() {
		return
	}
	if len(k.config.Engines) == 0 {
		k.add("engine", "no engine: requests get 503 until one is added")
		return
	}
	alone := map[string][]int{}
	for i, e := range k.config.Engines {
		if _, paired := k.config.partners(e); !paired {
			alone[e.Role] = append(alone[e.Role], i)
		}
	}
	for role, opposite := range map[string]string{RolePrefill: RoleDecode, RoleDecode: RolePrefill} {
		if engines := alone[role]; len(engines) > 0 {
			k.add(engineKey(engines[0], "role"), "no %s engine to pair with %s: until one is added, requests get 503 or an engine of role both",
				opposite, k.engineNames(engines))
		}
	}
}

// engineNames lists the first few engines, by their indices in AllEngines, with name
// and connector.
func (k *checker) engineNames(engines []int) string {
	const most = 3
	var names []string
	for n, i := range engines {
		if n == most {
			names = append(names, fmt.Sprintf("%d more", len(engines)-most))
			break
		}
		e := k.config.AllEngines()[i]
		names = append(names, fmt.Sprintf("%s (%q)", e.Name, e.Connector))
	}
	return strings.Join(names, ", ")
}

// warnURLs warns about two engines with one address, and about the path /v1.
func (k *checker) warnURLs() {
	seen := map[string]string{}
	for i, e := range k.config.Engines {
		if first, again := seen[e.URL]; again {
			k.add(engineKey(i, "url"), "is also the address of %q", first)
			continue
		}
		seen[e.URL] = e.Name
		if endsWithV1(e.URL) {
			k.add(engineKey(i, "url"), "ends with /v1: the proxy adds the whole route itself, such as /v1/chat/completions")
		}
	}
}

// warnUnused warns about keys of e, engine i, that have no effect.
func (k *checker) warnUnused(i int, e Engine) {
	if e.Connector != ConnectorSGLang && e.Connector != ConnectorVLLMMooncake || e.Role == RoleDecode {
		for key, set := range map[string]bool{"bootstrap_host": e.BootstrapHost != "", "bootstrap_port": e.BootstrapPort != 0} {
			if set {
				k.add(engineKey(i, key), "has no effect: only sglang and vllm-mooncake engines that prefill have a bootstrap server")
			}
		}
	}
	if !e.MoRIIO() && e.KVAddress != "" {
		k.add(engineKey(i, "kv_address"), "has no effect: only the connectors of MoRI-IO use it")
	}
	if !e.MoRIIO() && !e.Pushes() && e.Connector != ConnectorVLLMMooncake && e.TPSize != 0 {
		k.add(engineKey(i, "tp_size"), "has no effect: only the connectors of MoRI-IO and Mooncake, and prefill engines of %q, use it", ConnectorVLLMNixlPush)
	}
	if !e.Pushes() {
		for key, set := range map[string]bool{"pp_size": e.PPSize != 0, "engine_id": e.EngineID != ""} {
			if set {
				k.add(engineKey(i, key), "has no effect: only prefill engines of %q use it", ConnectorVLLMNixlPush)
			}
		}
	}
	if !e.SideChannelled() && e.SideChannel != "" {
		k.add(engineKey(i, "side_channel"), "has no effect: only prefill engines of %q and %q use it", ConnectorVLLMNixlPush, ConnectorVLLMP2PTier)
	}
	if e.DecoderKVBlocksTTL != 0 && (!e.Bidirectional || e.Role == RolePrefill) {
		k.add(engineKey(i, "decoder_kv_blocks_ttl"), "has no effect: only bidirectional decode engines retain blocks")
	}
	if e.KVLeaseDuration != 0 && (e.Connector != ConnectorVLLMNixl && e.Connector != ConnectorVLLMMoRIIORead || e.Role == RoleDecode) {
		k.add(engineKey(i, "kv_lease_duration"), "has no effect: only engines of %q and %q that prefill have such a lease", ConnectorVLLMNixl, ConnectorVLLMMoRIIORead)
	}
	if e.HeaderOverrides && e.Connector != ConnectorSGLang {
		k.add(engineKey(i, "header_overrides"), "has no effect: only engines of connector %q read such header lines", ConnectorSGLang)
	}
	if e.Priority != "" && len(k.config.PriorityClasses) == 0 {
		k.add(engineKey(i, "priority"), "has no effect without [[priority_class]]")
	}
	if e.Wire != "" && e.Connector != ConnectorTRTLLM {
		k.add(engineKey(i, "wire"), "has no effect: only connector %q has wire generations", ConnectorTRTLLM)
	}
	if e.Ranks > 1 && e.Connector == ConnectorTRTLLM {
		k.add(engineKey(i, "ranks"), "the workers choose their ranks themselves, because a request cannot name a rank: the rank that a policy chooses is only a hint")
	}
	if e.CA != "" && !strings.HasPrefix(e.URL, "https:") {
		k.add(engineKey(i, "ca"), "has no effect: the url is not https")
	} else if e.CA != "" && e.InsecureSkipVerify {
		k.add(engineKey(i, "ca"), "has no effect with insecure_skip_verify")
	}
}
