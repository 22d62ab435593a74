package cmd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/journal"
)

func (a *app) explainCommand() *cobra.Command {
	var admin adminFlags
	c := &cobra.Command{
		Use:   "explain REQUEST_ID",
		Short: "Show why each leg of a request ran on its engine",
		Long: `Show why each leg of a request ran on its engine: the candidates with their facts
and scores, the legs with their times and the causes of failures, the reason if the proxy
refused the request, each place at which the stream broke off and what followed, and every
fallback. Scores have the unit and the direction that the policy states. With policy.place =
"scores" a table for each leg shows the contribution of each scorer to the sum of each
candidate.

The answer to a client has the id of its request in the header x-request-id.`,
		Example: `  pdproxy explain 0198f3c2-7d1e-7c1a-9a53-0c7b1f6a2d10
  pdproxy explain --admin 10.0.0.5:9090 --token-file admin.token REQUEST_ID`,
		Args: arguments("REQUEST_ID"),
		RunE: func(_ *cobra.Command, args []string) error { return a.explain(args[0], admin) },
	}
	admin.add(c)
	return a.addJSON(c)
}

func (a *app) explain(id string, admin adminFlags) error {
	target, err := admin.target()
	if err != nil {
		return err
	}
	if target.missing != nil {
		fmt.Fprintln(a.err, "pdproxy: request without the admin token:", target.missing)
	}
	resp, err := target.get("/v1/explain/" + url.PathEscape(id))
	if err != nil {
		return exit.Failed(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	if err != nil {
		return exit.Failed(err)
	}
	if resp.StatusCode != http.StatusOK {
		return exit.Failed(errors.New(plain("explain %s: %s", id, refusal(resp.Status, body))))
	}
	if a.json {
		_, err := a.out.Write(body)
		return exit.Failed(err)
	}
	var e journal.Explanation
	if err := json.Unmarshal(body, &e); err != nil {
		return exit.Failed(err)
	}
	_, err = io.WriteString(a.out, explanation(&e))
	return exit.Failed(err)
}

// explanation returns the text of an explanation.
func explanation(e *journal.Explanation) string {
	var out strings.Builder
	say := func(format string, args ...any) { out.WriteString(plain(format+"\n", args...)) }
	say("request %s: %s (status %d) in %s ms", e.RequestID, e.Outcome, e.Status, rounded(e.DurationMS))
	if e.ErrorCode != "" {
		say("error %s: %s", e.ErrorCode, meaning(e.ErrorCode))
	}
	if e.Policy != "" {
		say("flow %s, policy %s, disagg id %d", e.Flow, e.Policy, e.DisaggID)
	}
	if e.RequestedModel != "" {
		say("model %s, requested as %s", e.Model, e.RequestedModel)
	}
	if e.Coordination != "" {
		say("coordination policy: %s", e.Coordination)
	}
	if e.Turn > 0 {
		say("turn %d of conversation %s", e.Turn, orNone(e.Conversation))
	}
	out.WriteString(legTable(e) + scoreTables(e) + candidateTable(e))
	for _, c := range e.Continuations {
		say("the stream broke off at %s ms, behind %d tokens: %s", rounded(c.AtMS), c.Tokens, brokeOff(c))
	}
	if e.Outcome == "broken" && len(e.Continuations) == 0 { // the configuration continues no stream
		if l, failed := lastFailure(e.Legs); failed {
			say("the stream broke off: %s on %s failed (%s)", l.Phase, l.Engine, failure(l))
		}
	}
	for _, f := range e.Fallbacks {
		say("fallback: %s (%s)", f.What, f.Reason)
	}
	for _, n := range e.Notes {
		say("note: %s", n)
	}
	return out.String()
}

// legTable returns the table of the legs.
func legTable(e *journal.Explanation) string {
	if len(e.Legs) == 0 {
		return "the request had no leg\n"
	}
	rows := [][]string{{"LEG", "ENGINE", "RANK", "ATTEMPT", "START (ms)", "FIRST BYTE (ms)", "END (ms)", "STATUS", "ERROR"}}
	for _, l := range e.Legs {
		rows = append(rows, []string{l.Phase, l.Engine, strconv.Itoa(l.Rank), strconv.Itoa(l.Attempt),
			rounded(l.StartMS), orDash(l.FirstByteMS), orDash(l.EndMS), status(l.Status), failure(l)})
	}
	return "\n" + plainTable(rows)
}

// candidateTable returns the table of the candidates; "" without candidates.
func candidateTable(e *journal.Explanation) string {
	if len(e.Candidates) == 0 {
		return ""
	}
	rows := [][]string{{"CANDIDATE", "RANK", "CHOSEN FOR", scoreTitle(e), "FACTS"}}
	scored := false
	for _, c := range e.Candidates {
		scored = scored || c.Score != nil
		rows = append(rows, []string{c.Engine, strconv.Itoa(c.Rank), chosenFor(e, c), orDash(c.Score), facts(c.Facts)})
	}
	text := "\n" + plainTable(rows)
	switch {
	case !scored:
		text += plain("policy %s gives no scores: it compares the facts\n", e.Policy)
	case e.ScoreBetter == "":
		text += plain("policy %s does not state whether a high score is good\n", e.Policy)
	}
	return text
}

// lastFailure returns the last leg that failed.
func lastFailure(legs []journal.ExplainedLeg) (l journal.ExplainedLeg, failed bool) {
	for _, l := range slices.Backward(legs) {
		if l.Error != "" {
			return l, true
		}
	}
	return l, false
}

// failure returns why a leg failed: the reason, and the text of the error.
func failure(l journal.ExplainedLeg) string {
	if l.Cause == "" {
		return l.Error
	}
	return l.Error + ": " + l.Cause
}

// scoreTitle returns the title of the scores, with their unit and the better score.
func scoreTitle(e *journal.Explanation) string {
	var about []string
	if e.ScoreUnit != "" {
		about = append(about, e.ScoreUnit)
	}
	if e.ScoreBetter != "" {
		about = append(about, e.ScoreBetter+" is good")
	}
	if about == nil {
		return "SCORE"
	}
	return "SCORE (" + strings.Join(about, ", ") + ")"
}

// refusal returns the message in the body of an error, or else the status.
func refusal(status string, body []byte) string {
	var e struct{ Error struct{ Message string } }
	if json.Unmarshal(body, &e) != nil || e.Error.Message == "" {
		return status
	}
	return e.Error.Message
}

// chosenFor names the phases whose last try ran on a candidate, or "-".
func chosenFor(e *journal.Explanation, c journal.ExplainedCandidate) string {
	last := map[string]int{} // by phase
	for _, l := range e.Legs {
		last[l.Phase] = max(last[l.Phase], l.Attempt)
	}
	var phases []string
	for _, l := range e.Legs {
		if l.Attempt == last[l.Phase] && l.Engine == c.Engine && l.Rank == c.Rank {
			phases = append(phases, l.Phase)
		}
	}
	if len(phases) == 0 {
		return "-"
	}
	return strings.Join(phases, ", ")
}

func orNone(key string) string {
	if key == "" {
		return "(not known)"
	}
	return key
}

func orDash(v *float64) string {
	if v == nil {
		return "-"
	}
	return rounded(*v)
}

// status returns an HTTP status, or "-" if a leg got none.
func status(code int) string {
	if code == 0 {
		return "-"
	}
	return strconv.Itoa(code)
}
