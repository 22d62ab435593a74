package connector

import (
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

// The wire generations of TensorRT-LLM: the members that a worker's
// disaggregated_params have. All models of its API reject unknown members
// (serve/openai_protocol.py: OpenAIBaseModel, extra="forbid").
//
//   - g1 (up to 1.2): request_type, first_gen_tokens, ctx_request_id,
//     encoded_opaque_state, draft_tokens. The worker mints the id. Releases between g1
//     and g2 that know disagg_request_id but not ctx_usage are served as g1 too.
//   - g2 (release candidates of 1.3): also disagg_request_id, schedule_style,
//     ctx_dp_rank, ctx_info_endpoint, ctx_usage, conversation_id and more.
//   - g3 (later): without conversation_id, with resolved_thinking. The proxy sends none
//     of the members that differ from g2.
const (
	wireG1 = "g1"
	wireG2 = "g2"
	wireG3 = "g3"
)

// lastG2 is the last release candidate of 1.3 with generation g2.
const lastG2 = 24

// wire returns the generation to use with an instance: the configured one, else that of
// the instance's version, else g2.
func wire(t engine.Target) string {
	if w := t.Spec.Wire; w != "" {
		return w
	}
	if w := t.Facts().Wire; w != "" {
		return w
	}
	return wireG2
}

// wireOf returns the generation of a version such as 1.2.0, 1.3.0rc14 or
// 1.3.0rc14.post1; "" for a text that is not a version.
func wireOf(version string) string {
	major, rest, _ := strings.Cut(version, ".")
	minor, patch, _ := strings.Cut(rest, ".")
	x, err1 := strconv.Atoi(major)
	y, err2 := strconv.Atoi(minor)
	switch {
	case err1 != nil || err2 != nil:
		return ""
	case x < 1 || x == 1 && y < 3:
		return wireG1
	case x > 1 || y > 3:
		return wireG3
	}
	_, rc, ok := strings.Cut(patch, "rc")
	if !ok {
		if strings.Contains(patch, "dev") {
			return wireG2
		}
		return wireG3
	}
	rc, _, _ = strings.Cut(rc, ".")
	if n, err := strconv.Atoi(rc); err != nil || n <= lastG2 {
		return wireG2
	}
	return wireG3
}
