package stableprefix

// API is the form of a request body.
type API uint8

// The APIs whose bodies have rules.
const (
	NoAPI API = iota
	Chat
	Messages
	Responses
)

// APIOf returns the API of a request's path, which may have a query; NoAPI for other paths.
func APIOf(path string) API {
	for i := range len(path) {
		if path[i] == '?' {
			path = path[:i]
			break
		}
	}
	if n := len(path); n > 1 && path[n-1] == '/' {
		path = path[:n-1]
	}
	switch path {
	case "/v1/chat/completions":
		return Chat
	case "/v1/messages", "/v1/messages/count_tokens":
		return Messages
	case "/v1/responses":
		return Responses
	}
	return NoAPI
}

// Agents is a set of agents.
type Agents uint8

// The agents that the rules know.
const (
	ClaudeCode Agents = 1 << iota
	OpenCode
	QwenCode
	Pi

	anyAgent Agents = 1<<iota - 1
)

// agents describes how each agent is recognized: by the beginning of the request header
// User-Agent, or by the beginning of the first system text. A gateway before the proxy may
// replace the header.
var agents = []struct {
	agent     Agents
	userAgent string
	texts     []string
}{
	{ClaudeCode, "claude-cli/", []string{billingHeader, "You are Claude Code, Anthropic", "You are a Claude agent, built on Anthropic"}},
	{OpenCode, "opencode/", []string{"You are OpenCode", "You are opencode"}},
	{QwenCode, "QwenCode/", []string{"You are Qwen Code"}},
	{Pi, "", []string{"You are an expert coding assistant operating inside pi, a coding agent harness"}},
}

// ByUserAgent returns the agent that sends this User-Agent, 0 for an unknown client.
func ByUserAgent(value string) Agents {
	for _, a := range agents {
		if a.userAgent != "" && len(value) >= len(a.userAgent) && value[:len(a.userAgent)] == a.userAgent {
			return a.agent
		}
	}
	return 0
}

const billingHeader = "x-anthropic-billing-header:"

// Action is the effect of a rule on the bytes that it matches.
type Action uint8

// The actions.
const (
	// Remove removes the bytes.
	Remove Action = iota
	// MoveFirst puts a text before the first text of the first user message. Chat templates
	// render system and tools before that message. MoveFirst is for values that stay equal in a
	// session.
	MoveFirst
	// MoveLast puts a text before the first text of the last user message that has a text. It is
	// for values that change in each request.
	MoveLast
	// Sort sorts the list of tools by name.
	Sort
)

// verbs are the words of notes, by action.
var verbs = [...]string{Remove: "removed", MoveFirst: "moved", MoveLast: "moved", Sort: "moved"}

// extent is the end of the text that a rule matches.
type extent uint8

const (
	pairs extent = iota // a header of the form "name: key=value; key=value;" at the beginning of a text
	line                // one line
	rest                // all text up to the end
)

// Rule is one part of the requests of an agent that changes between requests with the same
// meaning.
type Rule struct {
	Name   string // in the configuration, notes and metrics
	Agents Agents
	Action Action
	// Changes is whether the action changes what the model is asked: the text is gone for the
	// model, or the model reads it in another place. Such a rule acts only if the configuration
	// names it.
	Changes bool
	Meaning string // description for operators, without a full stop

	// The text, except for Sort: system texts of the request, where begin is at the beginning of
	// the text (pairs) or of a line after white space. tail is the end of the line, "" for any.
	begin, tail string
	extent      extent
}

// Rules lists all rules in the order in which they act.
var Rules = []Rule{
	{
		// Claude Code 2.1.36 and later puts the header into the first system block, with a new hash
		// (cch) in each request. vLLM removes such blocks of /v1/messages itself
		// (vllm/entrypoints/anthropic/serving.py, _convert_system_message), SGLang 0.5.23 does not.
		Name: "billing_header", Agents: ClaudeCode, Action: Remove,
		Meaning: "the billing header of Claude Code, which has another hash in each request",
		begin:   billingHeader, extent: pairs,
	},
	{
		Name: "token_budget", Agents: ClaudeCode, Action: Remove, Changes: true,
		Meaning: "the counter of remaining tokens that Claude Code appends to the system text",
		begin:   "<total_tokens>", tail: "</total_tokens>", extent: line,
	},
	{
		Name: "env_date", Agents: ClaudeCode | OpenCode, Action: MoveFirst, Changes: true,
		Meaning: "the line with the date in the environment block of the system text",
		begin:   "Today's date: ", extent: line,
	},
	{
		Name: "git_status", Agents: ClaudeCode, Action: MoveFirst, Changes: true,
		Meaning: "the status of the Git repository at the end of the system text, which differs between sessions",
		begin:   "gitStatus: This is the git status", extent: rest,
	},
	{
		Name: "clock", Agents: Pi, Action: MoveLast, Changes: true,
		Meaning: "the line with the time of the request in the system text",
		begin:   "Current date and time: ", extent: line,
	},
	{
		Name: "tool_order", Agents: anyAgent, Action: Sort, Changes: true,
		Meaning: "the order of the tools, which differs after MCP servers connect in another order",
	},
}
