package importer

import (
	"cmp"
	"slices"
)

// plan chooses the plan policy by the handler of the profiles and its decider. The handlers that run
// one profile never split a request. A handler that the reader does not know leaves the default.
func (p *picker) plan() {
	switch handler := p.firstOf(slices.Concat(profileHandlers(), []string{singleHandler, dataParallelHandler, headerHandler})...); {
	case handler == nil && len(p.profiles) == 1 && !p.unknown():
		p.doc.set("policy", "plan", text("never"), "llm-d runs the only profile, without prefill")
	case handler == nil:
	case handler.kind == "pd-profile-handler":
		p.pdHandler(handler)
	case handler.kind == "disagg-profile-handler":
		p.disaggHandler(handler)
	case handler.kind == headerHandler:
		p.headerHandler(handler)
	default:
		p.doc.set("policy", "plan", text("never"), handler.kind+" runs one profile, without prefill")
	}
}

// The handlers that run one profile for a request.
const (
	singleHandler       = "single-profile-handler"
	dataParallelHandler = "data-parallel-profile-handler"
	headerHandler       = "header-profile-handler"
)

// unknown reports whether the file has a plugin of an unknown type, which may be a handler.
func (p *picker) unknown() bool {
	return slices.ContainsFunc(p.names, func(name string) bool { return !p.known[p.plugins[name].kind] })
}

// headerHandler reads header-profile-handler (profilehandler/headerprofile). llm-d's coordinator calls
// the picker once for each leg, and names the profile of the leg in a header.
func (p *picker) headerHandler(h *pickerPlugin) {
	p.unequal(h.line, h.key(""), "the proxy runs the legs of a request itself: no header names a profile, and plan decides about prefill")
	h.parameters.take("headerName")
	h.parameters.take("defaultProfile")
}

// newAPI is the group of an EndpointPickerConfig since v0.9.0 of llm-d-router (deploy/config).
const newAPI = "llm-d.ai/v1alpha1"

// pdHandler reads pd-profile-handler, which has three generations (pd_profile_handler.go in
// llm-d-inference-scheduler, later llm-d-router):
//
//   - to v0.5.1, pkg/plugins/profile: prefill runs always with threshold 0, the default. With
//     another threshold, prefill runs if that many bytes of the prompt are not cached.
//   - v0.6: deciderPluginName, by default always-disagg-pd-decider.
//   - since v0.7.0: by default prefix-based-pd-decider (now in
//     pkg/epp/framework/plugins/scheduling/profilehandler/disagg).
//
// Since v0.6 the picker does not start if the file does not declare the decider.
func (p *picker) pdHandler(h *pickerPlugin) {
	const key = "plugins.parameters.deciderPluginName"
	threshold, at, first := p.integer(h.parameters, "threshold", 0, 1<<30)
	ref, e, named := p.text(h.parameters, "deciderPluginName")
	_, prefix := p.plugins["prefix-based-pd-decider"]
	_, always := p.plugins["always-disagg-pd-decider"]
	switch {
	case first && named:
		p.problem(p.file, at.line, "plugins.parameters.threshold", "no version of llm-d has both threshold and deciderPluginName: remove one")
	case first:
		p.threshold(threshold, at.line)
	case named:
		p.decider(ref, e.line, key)
	case prefix:
		p.decider("prefix-based-pd-decider", h.line, key)
		if always {
			p.warn(p.file, h.line, "plugins", "pd-profile-handler names no decider: since v0.7.0 of llm-d that means prefix-based-pd-decider; v0.6 always ran prefill: for this set plan = \"always\"")
		}
	case always && p.version != newAPI:
		p.decider("always-disagg-pd-decider", h.line, key)
	case p.version == newAPI:
		p.problem(p.file, h.line, key, "llm-d does not start with this file: pd-profile-handler needs prefix-based-pd-decider, which the file does not declare")
	default:
		p.doc.set("policy", "plan", text("always"), "pd-profile-handler without threshold, whose default 0 means always; since v0.6 llm-d does not start without a decider")
	}
}

// bytesPerToken is the estimate of the Inference Extension for prompts without a tokenizer.
const bytesPerToken = 4

// threshold sets the plan of the first generation: bytes of the prompt that are not cached.
func (p *picker) threshold(bytes, line int) {
	if bytes == 0 {
		p.doc.set("policy", "plan", text("always"), "threshold 0 of pd-profile-handler: prefill runs for each request")
		return
	}
	p.doc.set("policy", "plan", text("pd_auto"), "threshold of pd-profile-handler; without local_tokens the policy compares measured times")
	p.local((bytes+bytesPerToken-1)/bytesPerToken, line, "threshold in bytes, 4 a token")
}

// local sets the number of uncached tokens from which on prefill runs apart.
func (p *picker) local(tokens, line int, comment string) {
	p.doc.set("policy.params.pd_auto", "local_tokens", float(float64(tokens-1)), comment+"; engines that also compute short prompts need role both")
	p.warn(p.file, line, "", "the engines that compute short prompts alone need role both in pdproxy, as the label llm-d.ai/role: prefill-decode; with role decode, each request has a prefill leg")
}

// disaggHandler reads disagg-profile-handler (disagg_profile_handler.go in llm-d-router), with
// its nested and its flat parameters. Without a decider for prefill llm-d runs decode alone.
func (p *picker) disaggHandler(h *pickerPlugin) {
	deciders, _, _ := p.sub(h.parameters, "deciders")
	ref, e, ok := p.text(deciders, "prefill")
	for _, flat := range []string{"prefillDeciderPluginName", "deciderPluginName"} {
		if name, at, found := p.text(h.parameters, flat); found && !ok {
			ref, e, ok = name, at, true
		}
	}
	encode, at, found := p.text(deciders, "encode")
	if !found {
		encode, at, found = p.text(h.parameters, "encodeDeciderPluginName")
	}
	if found && encode != "" {
		p.doc.note(at.line, "deciders.encode", "%s: add the encoders as engines of role encode; each request with an image then has an encode leg", text(encode))
	}
	order, line, _ := p.text(h.parameters, "stageOrder")
	switch {
	case order == "prefill-first" || order == "prefillFirst" || order == "prefill":
		p.doc.set("policy", "plan", text("always"), "stageOrder prefill-first: prefill runs for each request")
	case order != "" && order != "decode-first" && order != "decodeFirst" && order != "decode":
		p.problem(p.file, line.line, "plugins.parameters.stageOrder", "want decode-first or prefill-first")
	case ok && ref != "":
		p.decider(ref, e.line, "deciders.prefill")
	default:
		p.doc.set("policy", "plan", text("never"), "disagg-profile-handler without a decider for prefill: llm-d runs decode alone, too")
	}
}

// decider reads the plugin that decides whether prefill runs apart.
func (p *picker) decider(name string, line int, key string) {
	d, known := p.plugins[name]
	switch {
	case !known:
		p.problem(p.file, line, key, "%s names no plugin of this file: llm-d does not start with it", text(name))
	case d.kind == "always-disagg-pd-decider":
		p.doc.set("policy", "plan", text("always"), d.kind)
	case d.kind == "prefix-based-pd-decider":
		p.prefixDecider(d)
	default:
		p.lose(p.doc, p.file, cmp.Or(line, d.line), key, "%s: the result has the default plan, which splits each request that can be split", text(d.kind))
	}
}

// prefixDecider reads prefix-based-pd-decider (prefix_based_pd_decider.go).
func (p *picker) prefixDecider(d *pickerPlugin) {
	n, _, _ := p.integer(d.parameters, "nonCachedTokens", 0, 1<<30)
	least, e, _ := p.integer(d.parameters, "promptTokens", 0, 1<<30)
	if n == 0 {
		p.doc.set("policy", "plan", text("never"), "nonCachedTokens is 0, which disables the decider in llm-d")
		return
	}
	p.doc.set("policy", "plan", text("pd_auto"), d.kind+"; without local_tokens the policy compares measured times")
	p.local(n, d.line, "nonCachedTokens")
	if least > n {
		p.lose(p.doc, p.file, e.line, "plugins.parameters.promptTokens", "pd_auto has no minimum for the whole prompt: prompts from %d to %d tokens without a cached part have a prefill leg", n, least-1)
	}
}
